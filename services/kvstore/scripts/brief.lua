#!lua flags=no-writes
-- What a sweep wants to know of a session. Answers {state, detach, deadline}; records of before have neither, and are
-- answered with {state, '', '', record}.
local session = load_session()
if not session then return { answer(absence()), '', '' } end
local v = redis.call('HMGET', KEYS[1], 'detach', 'deadline')
if v[1] and v[2] then return { answer(OK, session), v[1], v[2] } end
return { answer(OK, session), '', '', redis.call('HGET', KEYS[1], 'record') }
