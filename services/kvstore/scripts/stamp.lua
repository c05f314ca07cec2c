#!lua flags=allow-oom
-- Puts a member into an index. KEYS: the index (sorted set; score: Unix time in us by this server's clock).
-- ARGV: member, its time in ms from now on, 'GT' to move a present member to later times only or '', ms that the index
-- lives on at least. Answers the member's time.
local time = redis.call('TIME')
local at = string.format('%.0f', time[1] * 1000000 + time[2] + ARGV[2] * 1000)
if ARGV[3] == 'GT' then
  redis.call('ZADD', KEYS[1], 'GT', at, ARGV[1])
else
  redis.call('ZADD', KEYS[1], at, ARGV[1])
end
local life = tonumber(ARGV[4])
if redis.call('PTTL', KEYS[1]) < life then redis.call('PEXPIRE', KEYS[1], life + math.ceil(life / 16)) end
return redis.call('ZSCORE', KEYS[1], ARGV[1])
