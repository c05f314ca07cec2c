#!lua flags=no-writes
-- Members of an index, the latest first. KEYS: as in stamp. ARGV: time before which to begin ('': now), most members.
-- Answers {member, time, member, time, ...}.
local from = ARGV[1] == '' and '+inf' or '(' .. ARGV[1]
return redis.call('ZRANGE', KEYS[1], from, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, ARGV[2], 'WITHSCORES')
