#!lua flags=allow-oom
-- Grants a lease: max(stored epoch, floor) + 1.
-- ARGV: owner, floor, birth ('': any), expected epoch ('': any). Answers OK, GONE, RACED, EXPIRED, DELETED or UNKNOWN.
local owner, floor, birth, expected = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local session = load_session()
if not session then return answer(absence()) end
if birth ~= '' and birth ~= session.birth then
  if outdated(session, floor) then return answer(UNKNOWN) end
  return answer(GONE, session)
end
if expected and expected ~= session.epoch then return answer(RACED, session) end
session.epoch, session.owner = math.max(session.epoch, floor) + 1, owner
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', session.epoch), 'owner', owner)
keep_alive(session)
return answer(OK, with_spent(session))
