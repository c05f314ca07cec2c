#!lua flags=allow-oom
-- Gives a lease up: the session's owner is nobody. Repeated by who did: the same answer. ARGV: epoch, owner, birth.
local epoch, owner, birth = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local session = load_session()
if session and session.birth == birth and session.epoch == epoch and session.owner == NOBODY then
  return answer(OK, session)
end
local refused = refusal(session, epoch, owner, birth)
if refused then return answer(refused, session) end
session.owner = NOBODY
redis.call('HSET', KEYS[1], 'owner', NOBODY)
return answer(OK, session)
