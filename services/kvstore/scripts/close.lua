#!lua flags=allow-oom
-- Ends a session; an earlier finish wins. ARGV: epoch, owner, birth, finish, usage.
local session = load_session()
local refused = refusal(session, tonumber(ARGV[1]), ARGV[2], ARGV[3])
if refused then return answer(refused, session) end
if session.finish == 0 then
  session.finish, session.usage = tonumber(ARGV[4]), ARGV[5]
  redis.call('HSET', KEYS[1], 'finish', session.finish, 'usage', session.usage)
  keep_alive(session)
end
return answer(OK, session)
