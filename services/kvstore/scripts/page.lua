#!lua flags=no-writes
-- Members of an index up to now, by their times. KEYS: as in stamp. ARGV: time after which to begin, most members.
-- Answers {member, time, member, time, ...}. No two of a server's scripts run in one us, so a time tells where to go on.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], now, 'WITHSCORES', 'LIMIT', 0, ARGV[2])
