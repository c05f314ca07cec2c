#!lua
-- Appends one chunk to a session's log: lease, then offset, then tokens and digests, and only then any write.
-- ARGV[1]: one packed entry (services/kvstore/codec.py).
local epoch, offset, best_effort_from, finish, owner, birth, before, after, at =
  struct.unpack('<I8I4I4Bc16c16c16c16', ARGV[1])
local tokens, digests, usage, stop, token, view, spent = struct.unpack('<I4c0I4c0I4c0I4c0I4c0I4c0I4c0', ARGV[1], at)
local last = offset + #tokens / 4

local function chunk(entry)
  local start = tonumber(string.match(entry[1], '^%d+')) - 1
  local fields = entry[2]
  return { start = start, stop = start + #fields[2] / 4, tokens = fields[2], digest = fields[4] }
end

-- The chunk that holds the token at `position`; nil: the log is incomplete.
local function chunk_at(position)
  local found = redis.call('XREVRANGE', KEYS[2], (position + 1) .. '-0', '-', 'COUNT', 1)
  return found[1] and chunk(found[1])
end

local function stored_tokens(from, to)
  local first = chunk_at(from)
  if not first then error({ err = 'INCOMPLETE no chunk holds offset ' .. from }) end
  local parts = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], (first.start + 1) .. '-0', to .. '-0')) do
    parts[#parts + 1] = entry[2][2]
  end
  return string.sub(table.concat(parts), (from - first.start) * 4 + 1, (to - first.start) * 4)
end

-- The digest at `position`, where the store has it: at the ends of the log and at the borders of chunks.
local function stored_digest(session, position)
  if position == session.length then return session.digest end
  if position == 0 then return session.digest0 end
  local found = chunk_at(position - 1)
  if found and found.stop == position then return found.digest end
end

local function same(known, claimed)
  return known == nil or known == claimed
end

-- Whether what the caller says about committed tokens is what was committed.
local function disagreement(session)
  local length = session.length
  local overlap = math.min(length, last) - offset
  if overlap > 0 and stored_tokens(offset, offset + overlap) ~= string.sub(tokens, 1, overlap * 4) then
    return CONFLICT
  end
  if not same(stored_digest(session, offset), before) then return MISMATCH end
  if last <= length and not same(stored_digest(session, last), after) then return MISMATCH end
  if overlap > 0 and last > length and #digests > 0
    and string.sub(digests, overlap * 16 - 15, overlap * 16) ~= session.digest then
    return MISMATCH
  end
end

local function verdict(session)
  local length = session.length
  if offset > length then return session.finish ~= 0 and FINISHED or GAP end
  -- Where tokens are not exact, another one proves nothing: what is committed stays, and the caller goes on from there.
  local inexact = session.best_effort_from or best_effort_from ~= NOWHERE
  local wrong = disagreement(session)
  if wrong and inexact then return session.finish ~= 0 and FINISHED or GAP end
  if wrong then return wrong end
  if session.finish ~= 0 then
    local repeated = finish == session.finish or (finish == 0 and #tokens > 0)
    return last <= length and repeated and OK or FINISHED
  end
  -- A finish before committed tokens: of a caller that is behind, or of one that would have stopped earlier.
  if finish ~= 0 and last < length then return (inexact or #tokens == 0) and GAP or CONFLICT end
  return OK
end

local session = load_session()
local status = refusal(session, epoch, owner, birth) or verdict(session)
if status ~= OK then return answer(status, session) end
local before_length, runs = session.length, session.finish == 0
local changes = {}
if last > before_length then
  local chunk = { 'tokens', string.sub(tokens, (before_length - offset) * 4 + 1), 'digest', after }
  if #view > 0 then chunk[5], chunk[6] = 'view', view end
  redis.call('XADD', KEYS[2], (before_length + 1) .. '-0', unpack(chunk))
  session.length, session.digest = last, after
  changes = { 'length', last, 'digest', after }
  if #spent > 0 then changes[5], changes[6] = 'spent', spent end
end
if finish ~= 0 and runs then
  session.finish, session.usage, session.matched_stop, session.matched_token = finish, usage, stop, token
  for _, word in ipairs({ 'finish', finish, 'usage', usage, 'matched_stop', stop, 'matched_token', token }) do
    changes[#changes + 1] = word
  end
end
if runs and best_effort_from ~= NOWHERE and not session.best_effort_from then
  session.best_effort_from = best_effort_from
  changes[#changes + 1], changes[#changes + 2] = 'best_effort_from', string.format('%.0f', best_effort_from)
end
if #changes > 0 then redis.call('HSET', KEYS[1], unpack(changes)) end
keep_alive(session, before_length == 0)
return answer(OK, session)
