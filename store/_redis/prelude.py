"""The Lua that every script of ``redis_store`` begins with: what it knows of one session's keys, and how they change.

KEYS and fields are those of ``scripts``. ``replicas``, a local that the connection puts before it, is how many replicas
must hold a change before it is acknowledged.
"""

from __future__ import annotations

from typing import Final

SEALED: Final = (
    *("revision", "head_hash", "head_item", "item_count", "context_tokens", "config", "labels", "ttl_ms"),
    *("create_ms", "forked_from", "forked_from_item", "create_fp", "bytes"),
)
"""The fields of a row that only a record changes."""
MARK_MS: Final = 30 * 24 * 3600 * 1000
"""How long a server's mark outlives the last change that it numbered."""

_PRELUDE: Final = """
local m, q, l = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

local function int(text)
  if not text or not string.match(text, '^%-?%d+$') then error('not an integer: ' .. tostring(text)) end
  return tonumber(text)
end
local function digits(number) return string.format('%.0f', number) end
local function get(name) return redis.call('HGET', m, name) or '' end
local function num(name) return tonumber(get(name)) or 0 end
local function ok() return {'OK', digits(now), redis.call('HGETALL', m)} end
-- Number a change, in the same breath, on the mark KEYS[4] if there is one. The last of ARGV: the largest number that
-- was acknowledged. Replies the number, or "" where the mark is behind that: it is left so then. Nor where Redis takes
-- no writes: it may have been asked for what it has.
local function numbered()
  if not KEYS[4] then return '' end
  local mark = tonumber(redis.call('HGET', KEYS[4], 'number') or '0')
  if mark < int(ARGV[#ARGV]) then return '' end
  local written = redis.pcall('HSET', KEYS[4], 'number', digits(mark + 1))
  if type(written) == 'table' then return '' end
  redis.call('PEXPIREAT', KEYS[4], digits(now + @LIFE@))
  return digits(mark + 1)
end
local function changed() return {'OK', digits(now), redis.call('HGETALL', m), numbered()} end

local function expire_at(ms)
  redis.call('HSET', m, 'expire_ms', digits(ms))
  for _, key in ipairs({m, q, l}) do
    if ms > 0 then redis.call('PEXPIREAT', key, digits(ms)) else redis.call('PERSIST', key) end
  end
end
-- A session does not expire under a running turn: it is not idle.
local function keep_until(ms)
  local expire = num('expire_ms')
  if expire > 0 and expire < ms then expire_at(ms) end
end

-- Outcome that ends any operation on a session that is not there, or nil.
local function absent()
  local state = get('state')
  if state == 'deleted' then return {'DELETED'} end
  if state ~= '' then return end
  if redis.call('EXISTS', l) == 1 then return {'CORRUPT', '0', 'has no row'} end
  return {'NOT_FOUND', digits(now)}
end
-- A field of a stream's entry, or nil.
local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local SEALED = {@SEALED@}
local function seal_of(requests)
  local values = redis.call('HMGET', m, unpack(SEALED))
  for i = 1, #SEALED do values[i] = values[i] or '' end
  local count = digits(requests)
  return get('revision') .. '|' .. count .. '|' .. redis.sha1hex(count .. '\\0' .. table.concat(values, '\\0'))
end
local function seal() redis.call('HSET', m, 'seal', seal_of(redis.call('HLEN', q))) end
-- Whether the newest record was written by a program that seals.
local function is_sealed() return string.match(get('seal'), '^(%d+)|') == get('revision') end

-- What the newest record of a log of the right length has against the row, or nil. It copies that record.
local function not_newest()
  local last = redis.call('XREVRANGE', l, '+', '-', 'COUNT', 1)[1]
  if not last or last[1] ~= get('revision') .. '-0' then return 'is not the last of a whole log' end
  if field(last, 'h') ~= get('head_hash') then return "is not the one that the session's row names as newest" end
end
-- What the keys of a session that is there disagree in, or nil.
local function disagreement()
  if redis.call('XLEN', l) ~= num('revision') then return 'is not the last of a whole log' end
  if get('seal') == '' or string.match(get('seal'), '^%d+|') and not is_sealed() then return end
  local requests = redis.call('HLEN', q)
  if string.match(get('seal'), '^%d+|(%d+)|') ~= digits(requests) then return 'has lost or won request ids' end
  if get('seal') ~= seal_of(requests) then return "has a row that was altered" end
end
-- Outcome that ends whatever would build on a session whose keys disagree, or nil. ``begun``: this turn has looked at
-- the newest record when it began.
local function broken(begun)
  local problem = disagreement() or not begun and not_newest()
  if not problem then return end
  redis.pcall('HSET', m, 'state', 'damaged')
  return {'CORRUPT', get('revision'), problem}
end
-- A write where a change is found made already, for WAIT to wait for: it looks at the connection's own last write.
local function again()
  if replicas > 0 then redis.call('HSET', m, 'again_ms', digits(now)) end
end
-- How long the pending turn holds the session yet. A clock that was set back lengthens no lease.
local function lease_left()
  local left, lease = num('run_until_ms') - now, num('run_lease_ms')
  if lease == 0 or left <= lease then return left end
  redis.call('HSET', m, 'run_until_ms', digits(now + lease))
  return lease
end

local function damaged()
  if get('state') ~= 'active' then return {'DAMAGED'} end
end
-- Revision and fingerprint under which a request id was committed, or nil.
local function known(request_id)
  local entry = request_id ~= '' and redis.call('HGET', q, request_id)
  if entry then return string.match(entry, '^(%d+)|(.*)$') end
end
-- An id that a repair has found again has no fingerprint: what was committed under it is the answer.
local function reused(known_fp, fp) return known_fp ~= '' and known_fp ~= fp end
local function wrong_revision(expected)
  if expected ~= '' and int(expected) ~= num('revision') then return {'REVISION', get('revision')} end
end

local RUN = {'run_req', 'run_fp', 'run_token', 'run_owner', 'run_attempt', 'run_seed', 'run_start_ms',
  'run_lease_ms', 'run_until_ms', 'run_order', 'run_followed', 'run_off'}
local function end_turn() redis.call('HDEL', m, unpack(RUN)) end

-- The arguments of a record, by name, from ARGV[first] on; errors before anything is written.
local function append_args(first)
  local names = {'request_id', 'fp', 'revision', 'base_hash', 'data', 'crc', 'hash', 'head_item', 'item_count',
    'context_tokens', 'config', 'labels', 'ttl_ms'}
  local a = {}
  for i, name in ipairs(names) do
    a[name] = ARGV[first + i - 1]
    if a[name] == nil then error('argument is missing: ' .. name) end
  end
  for _, name in ipairs({'revision', 'crc', 'head_item', 'item_count', 'context_tokens', 'ttl_ms'}) do int(a[name]) end
  return a
end
-- Bytes of all records; counted where the last program did not keep the sum.
local function log_bytes()
  if is_sealed() then return num('bytes') end
  local sum = 0
  for _, entry in ipairs(redis.call('XRANGE', l, '-', '+')) do sum = sum + #(field(entry, 'd') or '') end
  return sum
end
-- Put what is left of erased records, by entry id, in their place: an entry cannot be changed, so that all are written
-- again. Replies by how many bytes the log has shrunk.
local function shrink(rests)
  local shrunk, entries = 0, redis.call('XRANGE', l, '-', '+')
  redis.call('DEL', l)
  for _, entry in ipairs(entries) do
    local rest = rests[entry[1]]
    if rest then
      shrunk = shrunk + #(field(entry, 'd') or '') - #rest.data
      redis.call('XADD', l, entry[1], 'd', rest.data, 'c', rest.crc, 'h', rest.hash)
    else
      redis.call('XADD', l, entry[1], unpack(entry[2]))
    end
  end
  return shrunk
end
-- Append one record and end the turn. ``rests``: for ``shrink``, or nil.
local function append(a, rests)
  local bytes = log_bytes() + #a.data
  redis.call('XADD', l, a.revision .. '-0', 'd', a.data, 'c', a.crc, 'h', a.hash)
  if rests then bytes = bytes - shrink(rests) end
  if a.request_id ~= '' then redis.call('HSET', q, a.request_id, a.revision .. '|' .. a.fp) end
  redis.call('HSET', m, 'revision', a.revision, 'head_hash', a.hash, 'head_item', a.head_item,
    'item_count', a.item_count, 'context_tokens', a.context_tokens, 'bytes', digits(bytes),
    'update_ms', digits(math.max(now, num('update_ms'))))
  if a.config ~= '' then redis.call('HSET', m, 'config', a.config, 'ttl_ms', a.ttl_ms) end
  if a.labels ~= '' then redis.call('HSET', m, 'labels', a.labels) end
  end_turn()
  seal()
  local ttl = num('ttl_ms')
  expire_at(ttl > 0 and now + ttl or 0)
end
"""
_NAMES: Final = ", ".join(f"'{name}'" for name in SEALED)
PRELUDE: Final = _PRELUDE.replace("@SEALED@", _NAMES).replace("@LIFE@", str(MARK_MS))
