#!lua
-- Writes a session's record with epoch 1. Repeated by the same creator: the same answer.
-- ARGV: record, birth, owner, digest, ttl ms, tombstone ttl ms. Answers OK, EXISTS, EXPIRED or DELETED.
local record, birth, owner, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local session = load_session()
if session then
  local mine = session.birth == birth and session.owner == owner
  return answer(mine and OK or EXISTS, session)
end
local why = absence()
if why ~= UNKNOWN then return answer(why) end
redis.call('HSET', KEYS[1], 'record', record, 'format', FORMAT, 'birth', birth, 'epoch', 1, 'owner', owner,
  'length', 0, 'digest', digest, 'digest0', digest, 'finish', 0, 'usage', '', 'matched_stop', '', 'matched_token', '',
  'cancel', 0, 'ttl', ARGV[5], 'tombstone_ttl', ARGV[6])
session = load_session()
keep_alive(session, true)
return answer(OK, session)
