#!lua flags=allow-oom
-- Removes prompt and tokens and leaves the mark. ARGV: the mark's ttl ms where no record tells it.
-- Also without a record: what a store forgot and its owner would write again stays deleted.
local session = load_session()
local ttl = session and session.ttl + session.tombstone_ttl or tonumber(ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SET', KEYS[3], 'deleted', 'PX', ttl)
return answer(session and OK or UNKNOWN, session)
