#!lua flags=allow-oom
-- Takes a member out of an index, unless somebody has put it there again. KEYS: as in stamp.
-- ARGV: member, its time as the caller saw it ('': any), ms by which that must have passed. Answers how many went.
local at = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not at or (ARGV[2] ~= '' and ARGV[2] ~= at) then return 0 end
local time = redis.call('TIME')
if ARGV[2] ~= '' and time[1] * 1000000 + time[2] - tonumber(at) < ARGV[3] * 1000 then return 0 end
return redis.call('ZREM', KEYS[1], ARGV[1])
