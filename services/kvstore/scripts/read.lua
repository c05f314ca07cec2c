#!lua flags=no-writes
-- Reads a session at one moment. ARGV: first offset, most chunks (0: none), '1' for the record.
-- Answers {state, record, chunk id, fields, chunk id, fields, ...}; the first chunk holds the offset.
local session = load_session()
if not session then return { answer(absence()), '' } end
local from, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local reply = { answer(OK, with_spent(session)), ARGV[3] == '1' and redis.call('HGET', KEYS[1], 'record') or '' }
if most == 0 or from >= session.length then return reply end
local first = redis.call('XREVRANGE', KEYS[2], (from + 1) .. '-0', '-', 'COUNT', 1)
local chunks = first[1] and redis.call('XRANGE', KEYS[2], first[1][1], '+', 'COUNT', most) or {}
for _, entry in ipairs(chunks) do
  reply[#reply + 1] = entry[1]
  reply[#reply + 1] = entry[2]
end
return reply
