#!lua
-- Writes a session's record, and grants a lease. Repeated by the same creator: the same answer.
-- ARGV: record, birth, owner, digest, ttl ms, tombstone ttl ms, epoch, detach, deadline, best_effort_from ('': none).
-- Answers OK, EXISTS, EXPIRED or DELETED.
local record, birth, owner, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local session = load_session()
if session then
  local mine = session.birth == birth and session.owner == owner
  return answer(mine and OK or EXISTS, session)
end
local why = absence()
if why ~= UNKNOWN then return answer(why) end
redis.call('HSET', KEYS[1], 'record', record, 'format', FORMAT, 'birth', birth, 'epoch', ARGV[7], 'owner', owner,
  'length', 0, 'digest', digest, 'digest0', digest, 'finish', 0, 'usage', '', 'matched_stop', '', 'matched_token', '',
  'cancel', 0, 'ttl', ARGV[5], 'tombstone_ttl', ARGV[6], 'detach', ARGV[8], 'deadline', ARGV[9])
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'best_effort_from', ARGV[10]) end
session = load_session()
keep_alive(session, true)
return answer(OK, session)
