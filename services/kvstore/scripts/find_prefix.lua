#!lua flags=no-writes
-- The verifiers that hold one prefix block now. KEYS: as in put_prefix.
local time = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), '+inf')
