#!lua flags=allow-oom
-- Writes the cancel mark. Answers OK, FINISHED, EXPIRED, DELETED or UNKNOWN.
local session = load_session()
if not session then return answer(absence()) end
if session.finish ~= 0 then return answer(FINISHED, session) end
session.cancel = 1
redis.call('HSET', KEYS[1], 'cancel', 1)
return answer(OK, session)
