#!lua flags=allow-oom
-- Keeps an owner alive. KEYS: alive (string), cancelled (set of its sessions that carry a cancel mark), sessions (index
-- of its sessions). ARGV: ms that it lives on, ms that the index lives on at least. Answers the cancelled ones.
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
local life, left = tonumber(ARGV[2]), redis.call('PTTL', KEYS[3])
if left >= 0 and left < life then redis.call('PEXPIRE', KEYS[3], life + math.ceil(life / 16)) end
return redis.call('SMEMBERS', KEYS[2])
