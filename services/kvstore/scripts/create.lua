#!lua
-- Writes a session's record, and grants a lease. Repeated by the same creator: the same answer.
-- ARGV: record, birth, owner, digest, ttl ms, tombstone ttl ms, epoch, detach, deadline, best_effort_from ('': none), birth
-- of a failed session that gives way ('': none).
-- Answers OK, EXISTS, EXPIRED or DELETED.
local record, birth, owner, digest, epoch = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[7])
local session = load_session()
-- It is named, or its place had been taken: an owner that writes a lost session again has an epoch above 1.
if session and session.birth ~= birth
  and ((has_failed(session) and session.birth == ARGV[11]) or outdated(session, epoch)) then
  epoch = math.max(epoch, session.epoch + 1) -- who knew the one before must not take this one for it
  redis.call('DEL', KEYS[1], KEYS[2])
elseif session then
  local mine = session.birth == birth and session.owner == owner
  return answer(mine and OK or EXISTS, session)
else
  local why = absence()
  if why ~= UNKNOWN then return answer(why) end
end
redis.call('HSET', KEYS[1], 'record', record, 'format', FORMAT, 'birth', birth, 'epoch', string.format('%.0f', epoch),
  'owner', owner, 'length', 0, 'digest', digest, 'digest0', digest, 'finish', 0, 'usage', '', 'matched_stop', '', 'matched_token', '',
  'cancel', 0, 'ttl', ARGV[5], 'tombstone_ttl', ARGV[6], 'detach', ARGV[8], 'deadline', ARGV[9])
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'best_effort_from', ARGV[10]) end
session = load_session()
keep_alive(session, true)
return answer(OK, session)
