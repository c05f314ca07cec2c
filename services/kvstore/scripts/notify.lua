#!lua flags=allow-oom
-- Tells an owner that one of its sessions carries a cancel mark. KEYS: the set of those.
-- ARGV: session, ms that the set lives on, channel, message.
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('PUBLISH', ARGV[3], ARGV[4])
