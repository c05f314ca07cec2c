-- What every script of a session shares. It is put between a script's first line and the rest of it.
--
-- KEYS, all of one hash tag:
--   1  record  hash: what load_session reads, and `record`, the part that never changes; `detach` and `deadline` are
--              its, for brief.lua; `spent` is its usage so far. Integers are decimal text, ids and digests 16 raw
--              bytes. A field that came later may be missing.
--   2  log     stream: one entry a chunk, its id is "<offset + 1>-0", so a chunk is found by any offset in it.
--              tokens (uint32, little-endian), digest (after them), view (what the client asked to see; also of tokens
--              before these, where an append was repeated together with a later one)
--   3  mark    "live" or "deleted"; it outlives the record, so a missing record with a live mark has expired, and one
--              with no mark was never there or was lost.
local OK, FENCED, GAP, MISMATCH, CONFLICT, FINISHED, GONE, FORGOTTEN = 1, 2, 3, 4, 5, 6, 8, 9
local EXISTS, EXPIRED, DELETED, UNKNOWN, RACED = 101, 102, 103, 104, 105
local FAILED = 6 -- the finish reason ERROR
local FORMAT = '1'
local NOBODY = string.rep('\0', 16) -- the owner of a session whose lease was given up
local NOWHERE = 2 ^ 32 - 1 -- an offset that is not set

local function load_session()
  local v = redis.call('HMGET', KEYS[1], 'format', 'birth', 'epoch', 'owner', 'length', 'digest', 'digest0', 'finish',
    'usage', 'matched_stop', 'matched_token', 'cancel', 'ttl', 'tombstone_ttl', 'best_effort_from')
  if not v[1] then return nil end
  if v[1] ~= FORMAT then error({ err = 'FORMAT ' .. v[1] .. ' is not ' .. FORMAT }) end
  return { birth = v[2], epoch = tonumber(v[3]), owner = v[4], length = tonumber(v[5]), digest = v[6], digest0 = v[7],
    finish = tonumber(v[8]), usage = v[9], matched_stop = v[10], matched_token = v[11], cancel = tonumber(v[12]),
    ttl = tonumber(v[13]), tombstone_ttl = tonumber(v[14]), best_effort_from = tonumber(v[15]) }
end

-- Why there is no record.
local function absence()
  local mark = redis.call('GET', KEYS[3])
  if not mark then return UNKNOWN end
  return mark == 'deleted' and DELETED or EXPIRED
end

-- Whether a session failed before its first token, so that another one of the same key may take its place.
local function has_failed(session)
  return session.finish == FAILED and session.length == 0
end

-- Whether this is a failed one whose place was taken, under a higher epoch, by one that the store has lost since.
local function outdated(session, epoch)
  return has_failed(session) and session.epoch < epoch
end

-- Why this lease may not change this session; nil: it may.
local function refusal(session, epoch, owner, birth)
  if not session then return absence() == UNKNOWN and FORGOTTEN or GONE end
  if session.birth ~= birth then return outdated(session, epoch) and FORGOTTEN or GONE end
  if epoch < session.epoch then return FENCED end
  if epoch > session.epoch then return FORGOTTEN end
  if owner ~= session.owner then return FENCED end
end

-- A life of at least `ttl` from now on. It is lengthened by a sixteenth more, so that not every append has to.
local function keep_alive(session, is_new)
  if not is_new and redis.call('PTTL', KEYS[1]) >= session.ttl then return end
  local life = session.ttl + math.ceil(session.ttl / 16)
  redis.call('PEXPIRE', KEYS[1], life)
  redis.call('PEXPIRE', KEYS[2], life)
  redis.call('SET', KEYS[3], 'live', 'PX', life + session.tombstone_ttl)
end

-- One string an answer: parsing ten small replies a session costs the caller several times as much.
local function answer(status, session)
  local s = session
  if not s then return struct.pack('B', status) .. string.rep('\0', 62) end
  return struct.pack('<BI8I4BBc16c16I4I4I4I4', status, s.epoch, s.length, s.finish, s.cancel, s.owner, s.digest,
    s.best_effort_from or NOWHERE, #s.usage, #s.matched_stop, #s.matched_token)
    .. s.usage .. s.matched_stop .. s.matched_token
end

-- With what it has cost so far, for whoever reads it or goes on with it. Appends do not ask: it would be in every answer.
local function with_spent(session)
  if session.finish == 0 then session.usage = redis.call('HGET', KEYS[1], 'spent') or '' end
  return session
end
