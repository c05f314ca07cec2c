#!lua flags=allow-oom
-- Removes prompt and tokens and leaves the mark. ARGV: the mark's ttl ms where nothing here tells it, birth ('': any).
-- Where there is neither record nor mark there was nothing, and nothing is left: marks of made-up ids would fill a Redis
-- that evicts none. A create that is under way meanwhile runs before this script, and is removed and marked; or after
-- it, and is a session of its own, for this caller was told that there was none. It never finds half: a mark is written
-- with its record, and what has a mark is not created again, so the repeat of a creation that took effect before finds
-- this one's mark.
-- Who names the birth knows the session, as its owner does: a store forgot it, and what the owner would write again
-- stays deleted.
local session, birth = load_session(), ARGV[2]
local why = not session and absence()
if why == UNKNOWN and birth == '' then return answer(UNKNOWN) end
redis.call('DEL', KEYS[1], KEYS[2])
if session then
  redis.call('SET', KEYS[3], 'deleted', 'PX', session.ttl + session.tombstone_ttl)
elseif why == UNKNOWN then
  redis.call('SET', KEYS[3], 'deleted', 'PX', ARGV[1])
else
  redis.call('SET', KEYS[3], 'deleted', 'KEEPTTL') -- it has outlived its record; nothing prolongs it
end
return answer(session and OK or UNKNOWN, session)
