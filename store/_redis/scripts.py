"""The Lua scripts of ``redis_store``: each is one atomic operation on the keys of one session.

KEYS of every script, all in one hash slot (``k`` = ``pv1:{<tenant>/<session id>}``)::

    1  k:m  HASH    state, revision, head_item, head_hash, item_count, context_tokens, config, labels (both JSON),
                    ttl_ms, create_ms, update_ms, expire_ms, forked_from, forked_from_item, create_fp, bytes (of all
                    records), seal, sure; while a turn is pending also run_req, run_fp, run_token, run_owner,
                    run_attempt, run_seed, run_start_ms, run_lease_ms and run_until_ms, and if they apply run_order
                    (JSON: how to end), run_followed (another server waits for it) and run_off (it was called off)
    2  k:q  HASH    request id → "<revision>|<fingerprint>"
    3  k:l  STREAM  id <revision>-0; d = record bytes, c = crc32 (decimal), h = chain hash (hex)

``RedisLink`` puts a local ``replicas`` before each script: how many replicas must hold a change before it is
acknowledged.

A tombstone is k:m alone, with state "deleted". ``sure`` is the largest revision that the required replicas, and the
server's own append-only file, are known to have. Replies are lists: an outcome name, then its values; "OK" carries the
server's time in ms and all of k:m. CREATE, COMMIT, APPLY, DELETE and FORGET take a fourth key and one more argument,
and reply a number: see ``numbered``. Times come from the server (``TIME``) only.

The three keys verify each other. k:l must end with the row's revision and hash. ``seal`` is "<revision>|<number of
request ids>|<sha1>", where the hash covers that number and every field that only a record changes. A seal of an earlier
revision proves nothing: a program without seals wrote last. Every operation that builds on a session checks first, and
if the keys disagree it writes only the state "damaged". A log without its k:m is damage too, because the keys of one
session expire in the same millisecond.

Redis does not roll back a script that fails half-way. So every script first converts its numbers and decides, and its
first write is the one that can fail on existing data (``XADD`` refuses an id that is not larger than the last).
"""

from __future__ import annotations

from typing import Final

SEALED: Final = (
    *("revision", "head_hash", "head_item", "item_count", "context_tokens", "config", "labels", "ttl_ms"),
    *("create_ms", "forked_from", "forked_from_item", "create_fp", "bytes"),
)
"""The fields of a row that only a record changes."""
MARK_MS: Final = 30 * 24 * 3600 * 1000
"""How long a server's mark outlives its last numbered change."""

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
local function behind(known)
  if int(known) > num('revision') then return {'BEHIND', get('revision'), known} end
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


# ARGV: fingerprint, data, crc, chain hash, then the fields of k:m that the caller fills: field, value, …
# (with ttl_ms).
CREATE: Final = (
    PRELUDE
    + """
local fp, data, crc, hash = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
int(crc)
local ttl
for i = 5, #ARGV - 1, 2 do
  if ARGV[i + 1] == nil then error('odd number of fields') end
  if ARGV[i] == 'ttl_ms' then ttl = int(ARGV[i + 1]) end
end
if not ttl then error('ttl_ms is missing') end
local missing = absent()
if missing and missing[1] ~= 'NOT_FOUND' then return missing end
if not missing then
  if reused(get('create_fp'), fp) then return {'EXISTS'} end
  again()
  return changed()
end
redis.call('DEL', q, l)
redis.call('XADD', l, '1-0', 'd', data, 'c', crc, 'h', hash)
redis.call('HSET', m, unpack(ARGV, 5, #ARGV - 1))
redis.call('HSET', m, 'state', 'active', 'revision', '1', 'head_hash', hash, 'create_fp', fp,
  'bytes', digits(#data), 'create_ms', digits(now), 'update_ms', digits(now))
seal()
expire_at(ttl > 0 and now + ttl or 0)
return changed()
"""
)

# ARGV: the revision that the caller knows (0: none).
LOAD: Final = (
    PRELUDE
    + """
return absent() or behind(ARGV[1]) or ok()
"""
)

# Replies the revision that the WAIT after it covers, and its chain hash; "DELETED" if it covers the deletion.
AGAIN: Final = (
    PRELUDE
    + """
local refused = absent()
if refused and refused[1] ~= 'DELETED' then return refused end
again()
return refused or {'OK', get('revision'), get('head_hash')}
"""
)

# ARGV: request id. Replies the revision that committed it or "", the sure revision, the newest revision and
# its hash.
FIND: Final = (
    PRELUDE
    + """
local refused = absent()
if refused then return refused end
return {'OK', known(ARGV[1]) or '', get('sure'), digits(num('revision')), get('head_hash')}
"""
)

# ARGV: known revision (0: none), most records to return after it, most bytes, "1" for all request ids too.
# Reads the row and that part of its log at one moment; the known record comes first. The record that exceeds
# the bytes is the last one.
READ: Final = (
    PRELUDE
    + """
local known_revision, most, bytes = int(ARGV[1]), int(ARGV[2]), int(ARGV[3])
local refused = absent()
if refused then return refused end
local entries, number, size = {}, 0, 0
local from = math.max(known_revision, 1)
while number < most and size < bytes do
  local part = redis.call('XRANGE', l, digits(from) .. '-0', '+', 'COUNT', 8)
  if #part == 0 then break end
  for _, entry in ipairs(part) do
    local at = tonumber(string.match(entry[1], '^%d+'))
    if at > known_revision then
      if number >= most or size >= bytes then break end
      number = number + 1
      size = size + #(field(entry, 'd') or '')
    end
    entries[#entries + 1] = entry
    from = at + 1
  end
end
return {'OK', digits(now), redis.call('HGETALL', m), entries, ARGV[4] == '1' and redis.call('HGETALL', q) or {}}
"""
)

# ARGV: request id, fingerprint, expected revision or "", token, owner, attempt, lease ms, seed, start ms; the
# revision that the caller knows (0: none), its chain hash and the session's create_ms ("" and 0: not known);
# "1" to follow the turn.
BEGIN: Final = (
    PRELUDE
    + """
local req, fp, expected, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease = int(ARGV[7])
int(ARGV[8]); int(ARGV[9])
local known_revision, known_head, known_create = int(ARGV[10]), ARGV[11], int(ARGV[12])
local refused = absent() or damaged() or broken()
if refused then return refused end
local revision, known_fp = known(req)
if revision then
  if reused(known_fp, fp) then return {'REUSED'} end
  return {'REPLAY', digits(now), redis.call('HGETALL', m), revision}
end
if known_revision > 0 and (known_create == 0 or known_create == num('create_ms')) then
  local refused = behind(ARGV[10])
  if refused then return refused end
  local there = redis.call('XRANGE', l, ARGV[10] .. '-0', ARGV[10] .. '-0')[1]
  if known_head ~= '' and there and field(there, 'h') ~= known_head then return {'DIVERGED', ARGV[10]} end
end
if get('run_token') == token then return ok() end
local left = lease_left()
if left > 0 then
  if get('run_req') ~= req then return {'BUSY', get('run_req'), digits(left)} end
  if get('run_fp') ~= fp then return {'REUSED'} end
  if ARGV[13] == '1' then redis.call('HSET', m, 'run_followed', '1') end
  return {'ELSEWHERE', digits(now), redis.call('HGETALL', m)}
end
if ARGV[13] == '1' and get('run_off') == '1' and get('run_req') == req then
  return {'CALLED_OFF', digits(now), redis.call('HGETALL', m)}
end
refused = wrong_revision(expected)
if refused then return refused end
local seed = ARGV[8]
if get('run_req') == req and get('run_fp') == fp then seed = get('run_seed') end
redis.call('HSET', m, 'run_req', req, 'run_fp', fp, 'run_token', token, 'run_owner', ARGV[5], 'run_attempt', ARGV[6],
  'run_seed', seed, 'run_start_ms', ARGV[9], 'run_lease_ms', digits(lease), 'run_until_ms', digits(now + lease))
redis.call('HDEL', m, 'run_order', 'run_followed', 'run_off')
keep_until(now + lease)
return ok()
"""
)

# ARGV: token, lease ms.
RENEW: Final = (
    PRELUDE
    + """
local lease = int(ARGV[2])
local refused = absent()
if refused then return refused end
if get('run_token') ~= ARGV[1] then return {'FENCED'} end
redis.call('HSET', m, 'run_lease_ms', digits(lease), 'run_until_ms', digits(now + lease))
keep_until(now + lease)
local followed = get('run_followed')
if followed ~= '' then redis.call('HDEL', m, 'run_followed') end
return {'OK', get('run_order'), followed}
"""
)

# ARGV: request id, order (JSON), "1" if it keeps output. Replies "1" if the order, or an earlier one, waits for the
# holder.
ASK_TO_END: Final = (
    PRELUDE
    + """
local refused = absent()
if refused then return refused end
if get('run_req') ~= ARGV[1] then return {'OK', '0'} end
if num('run_until_ms') <= now then
  redis.call('HSET', m, 'run_token', '', 'run_until_ms', '0')
  if ARGV[3] ~= '1' then redis.call('HSET', m, 'run_off', '1') end
  return {'OK', '0'}
end
if get('run_order') == '' then redis.call('HSET', m, 'run_order', ARGV[2]) end
return {'OK', '1'}
"""
)

# ARGV: token, then request id, fingerprint, revision, base hash, data, crc, chain hash, head item, item
# count, context tokens, config, labels (both "": unchanged), ttl ms.
COMMIT: Final = (
    PRELUDE
    + """
local token, a = ARGV[1], append_args(2)
local refused = absent()
if refused then return refused end
local revision, known_fp = known(a.request_id)
if revision then
  if reused(known_fp, a.fp) then return {'REUSED'} end
  again()
  return changed()
end
refused = damaged() or broken(true)
if refused then return refused end
if token == '' or get('run_token') ~= token or num('revision') + 1 ~= int(a.revision)
    or get('head_hash') ~= a.base_hash then
  return {'FENCED'}
end
append(a)
return changed()
"""
)

# ARGV: expected revision or "", then as COMMIT from the request id on; then the number of erased records, and
# for each its revision, data, crc and chain hash.
APPLY: Final = (
    PRELUDE
    + """
local expected, a = ARGV[1], append_args(2)
local erased, rests = int(ARGV[15]), nil
for i = 16, 15 + 4 * erased, 4 do
  int(ARGV[i]); int(ARGV[i + 2])
  if not ARGV[i + 3] then error('argument is missing') end
  rests = rests or {}
  rests[ARGV[i] .. '-0'] = {data = ARGV[i + 1], crc = ARGV[i + 2], hash = ARGV[i + 3]}
end
local refused = absent() or damaged() or broken()
if refused then return refused end
local revision, known_fp = known(a.request_id)
if revision then
  if reused(known_fp, a.fp) then return {'REUSED'} end
  again()
  return changed()
end
local left = lease_left()
if left > 0 then return {'BUSY', get('run_req'), digits(left)} end
refused = wrong_revision(expected)
if refused then return refused end
if num('revision') + 1 ~= int(a.revision) or get('head_hash') ~= a.base_hash then
  return {'NOT_NEXT', get('revision')}
end
for id, rest in pairs(rests or {}) do
  local entry = redis.call('XRANGE', l, id, id)[1]
  if not entry or field(entry, 'h') ~= rest.hash then return {'NOT_NEXT', get('revision')} end
end
append(a, rests)
return changed()
"""
)

# ARGV: token, "1" if the turn was called off.
ABORT: Final = (
    PRELUDE
    + """
if ARGV[1] ~= '' and get('run_token') == ARGV[1] then
  if ARGV[2] == '1' then
    redis.call('HSET', m, 'run_token', '', 'run_until_ms', '0', 'run_off', '1')
  else
    end_turn()
  end
end
return {'OK'}
"""
)

# ARGV: expected revision or "", lifetime of the tombstone in ms.
DELETE: Final = (
    PRELUDE
    + """
local life = int(ARGV[2])
local missing = absent()
if missing and missing[1] == 'DELETED' then again() end
if missing and missing[1] ~= 'CORRUPT' then return missing end
local refused = not missing and wrong_revision(ARGV[1])
if refused then return refused end
local revision = digits(num('revision'))
redis.call('DEL', m, q, l)
redis.call('HSET', m, 'state', 'deleted', 'revision', revision, 'update_ms', digits(now))
expire_at(now + life)
return {'OK', digits(now), numbered()}
"""
)

# ARGV: chain hash of the newest record. Also replies the update time, which the listing needs.
FORGET: Final = (
    PRELUDE
    + """
local refused = absent() or damaged() or broken()
if refused then return refused end
local left = lease_left()
if left > 0 then return {'BUSY', get('run_req'), digits(left)} end
if get('head_hash') ~= ARGV[1] then return {'OTHER_HEAD', get('revision')} end
local update = digits(num('update_ms'))
redis.call('DEL', m, q, l)
return {'OK', digits(now), numbered(), update}
"""
)

DAMAGE: Final = (
    PRELUDE
    + """
local refused = absent()
if refused then return refused end
redis.call('HSET', m, 'state', 'damaged')
return {'OK'}
"""
)

_WRITTEN: Final = """
local function written(there, none, reading)
  if reading ~= '1' then redis.call('DEL', none) end
  local info = redis.pcall('INFO', 'persistence')
  local function told(name) return type(info) == 'string' and string.match(info, name .. ':(%w+)') or '0' end
  local failing = told('aof_last_write_status') == 'err'
  return {there and '1' or '0', told('aof_buffer_length'), told('aof_pending_bio_fsync'), failing and '1' or '0'}
end
"""

# KEYS: a fourth, which never exists. ARGV: a revision and its chain hash, or 0 for the deletion, or 0 and the
# chain hash of a session that was removed without a trace; "1" to write nothing, so that a full disk refuses
# nothing; "1" if the revision is in the file. With replicas, which have the revision, it is ``sure`` once it is in the
# file. Replies "1" if the session still has the revision (or was deleted since), the bytes for the
# append-only file in Redis' memory, the number of file flushes under way, and "1" if the file could not be
# written: all before this command, "0" without such a file or without permission for INFO.
BUFFERED: Final = (
    PRELUDE
    + _WRITTEN
    + """
local revision, hash = ARGV[1], ARGV[2]
local function has_it()
  if get('state') == 'deleted' then return true end
  if revision == '0' and hash ~= '' then return get('head_hash') ~= hash end
  if revision == '0' or num('revision') < int(revision) then return false end
  if revision == get('revision') then return get('head_hash') == hash end
  local entry = redis.call('XRANGE', l, revision .. '-0', revision .. '-0')[1]
  return not entry or field(entry, 'h') == hash
end
local there, reading = has_it(), ARGV[3] == '1'
local reply = written(there, KEYS[4], ARGV[3])
local kept = there and not reading and (reply[2] == '0' or ARGV[4] == '1')
if replicas > 0 and kept and get('state') ~= 'deleted' and num('sure') < int(revision) then
  redis.call('HSET', m, 'sure', revision)
end
return reply
"""
)

# KEYS: the marker, and one that never exists; perhaps one of another slot. ARGV: the store's id. Replies as BUFFERED.
MARKED: Final = (
    _WRITTEN
    + """
return written(redis.call('HGET', KEYS[1], 'store_id') == ARGV[1], KEYS[2], '')
"""
)

# KEYS: three that belong to no session; perhaps one of another slot. Writes as a turn does, so Redis refuses here what
# it would refuse there.
TRIAL: Final = (
    PRELUDE
    + """
absent()
-- First what a full memory refuses: after its first write a script may do anything.
redis.call('HSET', m, 'state', 'active', 'revision', '0', 'ttl_ms', '60000')
redis.call('DEL', q, l)
append({request_id = 'trial', fp = '', revision = '1', data = '', crc = '0', hash = '', head_item = '0',
  item_count = '0', context_tokens = '0', config = '', labels = '', ttl_ms = ''})
if broken() then error('what was just written is not there') end
return ok()
"""
)
