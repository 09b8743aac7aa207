"""The Lua scripts of ``redis_store``: each is one atomic operation on the keys of one session.

KEYS of every script, all in one hash slot (``k`` = ``pv1:{<tenant>/<session id>}``)::

    1  k:m  HASH    state, revision, head_item, head_hash, item_count, context_tokens, config, labels (both JSON),
                    ttl_ms, create_ms, update_ms, expire_ms, forked_from, forked_from_item, create_fp; while a turn
                    is pending also run_req, run_fp, run_token, run_owner, run_attempt, run_seed, run_start_ms,
                    run_until_ms, and where they apply run_order (JSON: how to end), run_followed (somebody waits for it
                    elsewhere) and run_off (it was called off)
    2  k:q  HASH    request id → "<revision>|<fingerprint>"
    3  k:l  STREAM  id <revision>-0; d = record bytes, c = crc32 (decimal), h = chain hash (hex)

A tombstone is k:m alone, with state "deleted". Replies are lists: an outcome name, then its values; "OK" carries the
server's time in ms and all of k:m. Times come from the server (``TIME``) only.

Redis does not roll back a script that fails half-way. So every script converts its numbers and decides first, and its
first write is the one that can fail on existing data (``XADD`` refuses an id that is not larger than the last).
"""

from __future__ import annotations

from typing import Final

_PRELUDE: Final = """
local m, q, l = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

local function int(text)
  if not text or not string.match(text, '^%-?%d+$') then error('not an integer: ' .. tostring(text)) end
  return tonumber(text)
end
local function digits(number) return string.format('%.0f', number) end
local function get(field) return redis.call('HGET', m, field) or '' end
local function num(field) return tonumber(get(field)) or 0 end
local function ok() return {'OK', digits(now), redis.call('HGETALL', m)} end

local function expire_at(ms)
  redis.call('HSET', m, 'expire_ms', digits(ms))
  for _, key in ipairs(KEYS) do
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
  if state == '' then return {'NOT_FOUND'} end
  if state == 'deleted' then return {'DELETED'} end
end
local function damaged()
  if get('state') ~= 'active' then return {'DAMAGED'} end
end
-- Revision and fingerprint under which a request id was committed, or nil.
local function known(request_id)
  local entry = request_id ~= '' and redis.call('HGET', q, request_id)
  if entry then return string.match(entry, '^(%d+)|(.*)$') end
end
local function wrong_revision(expected)
  if expected ~= '' and int(expected) ~= num('revision') then return {'REVISION', get('revision')} end
end

local RUN = {'run_req', 'run_fp', 'run_token', 'run_owner', 'run_attempt', 'run_seed', 'run_start_ms', 'run_until_ms',
  'run_order', 'run_followed', 'run_off'}
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
-- Append one record and end the turn.
local function append(a)
  redis.call('XADD', l, a.revision .. '-0', 'd', a.data, 'c', a.crc, 'h', a.hash)
  if a.request_id ~= '' then redis.call('HSET', q, a.request_id, a.revision .. '|' .. a.fp) end
  redis.call('HSET', m, 'revision', a.revision, 'head_hash', a.hash, 'head_item', a.head_item,
    'item_count', a.item_count, 'context_tokens', a.context_tokens,
    'update_ms', digits(math.max(now, num('update_ms'))))
  if a.config ~= '' then redis.call('HSET', m, 'config', a.config, 'ttl_ms', a.ttl_ms) end
  if a.labels ~= '' then redis.call('HSET', m, 'labels', a.labels) end
  end_turn()
  local ttl = num('ttl_ms')
  expire_at(ttl > 0 and now + ttl or 0)
end
"""

# ARGV: fingerprint, data, crc, chain hash, then field, value, … of k:m as the caller fills it (ttl_ms included).
CREATE: Final = (
    _PRELUDE
    + """
local fp, data, crc, hash = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
int(crc)
local ttl
for i = 5, #ARGV, 2 do
  if ARGV[i + 1] == nil then error('odd number of fields') end
  if ARGV[i] == 'ttl_ms' then ttl = int(ARGV[i + 1]) end
end
if not ttl then error('ttl_ms is missing') end
local state = get('state')
if state == 'deleted' then return {'DELETED'} end
if state ~= '' then
  if get('create_fp') ~= fp then return {'EXISTS'} end
  return ok()
end
redis.call('DEL', q, l)
redis.call('XADD', l, '1-0', 'd', data, 'c', crc, 'h', hash)
redis.call('HSET', m, unpack(ARGV, 5))
redis.call('HSET', m, 'state', 'active', 'revision', '1', 'head_hash', hash, 'create_fp', fp,
  'create_ms', digits(now), 'update_ms', digits(now))
expire_at(ttl > 0 and now + ttl or 0)
return ok()
"""
)

# ARGV: first revision to return. The row and its log at one moment.
READ: Final = (
    _PRELUDE
    + """
int(ARGV[1])
local refused = absent()
if refused then return refused end
return {'OK', digits(now), redis.call('HGETALL', m), redis.call('XRANGE', l, ARGV[1] .. '-0', '+')}
"""
)

# ARGV: request id, fingerprint, expected revision or "", token, owner, attempt, lease ms, seed, start ms, "1" for one
# that only follows the turn.
BEGIN: Final = (
    _PRELUDE
    + """
local req, fp, expected, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease = int(ARGV[7])
int(ARGV[8]); int(ARGV[9])
local refused = absent() or damaged()
if refused then return refused end
local revision, known_fp = known(req)
if revision then
  if known_fp ~= fp then return {'REUSED'} end
  return {'REPLAY', digits(now), redis.call('HGETALL', m), revision}
end
if get('run_token') == token then return ok() end
local left = num('run_until_ms') - now
if left > 0 then
  if get('run_req') ~= req then return {'BUSY', get('run_req'), digits(left)} end
  if get('run_fp') ~= fp then return {'REUSED'} end
  if ARGV[10] == '1' then redis.call('HSET', m, 'run_followed', '1') end
  return {'ELSEWHERE', digits(now), redis.call('HGETALL', m)}
end
if ARGV[10] == '1' and get('run_off') == '1' and get('run_req') == req then
  return {'CALLED_OFF', digits(now), redis.call('HGETALL', m)}
end
refused = wrong_revision(expected)
if refused then return refused end
local seed = ARGV[8]
if get('run_req') == req and get('run_fp') == fp then seed = get('run_seed') end
redis.call('HSET', m, 'run_req', req, 'run_fp', fp, 'run_token', token, 'run_owner', ARGV[5], 'run_attempt', ARGV[6],
  'run_seed', seed, 'run_start_ms', ARGV[9], 'run_until_ms', digits(now + lease))
redis.call('HDEL', m, 'run_order', 'run_followed', 'run_off')
keep_until(now + lease)
return ok()
"""
)

# ARGV: token, lease ms.
RENEW: Final = (
    _PRELUDE
    + """
local lease = int(ARGV[2])
local refused = absent()
if refused then return refused end
if get('run_token') ~= ARGV[1] then return {'FENCED'} end
redis.call('HSET', m, 'run_until_ms', digits(now + lease))
keep_until(now + lease)
local followed = get('run_followed')
if followed ~= '' then redis.call('HDEL', m, 'run_followed') end
return {'OK', get('run_order'), followed}
"""
)

# ARGV: request id, order (JSON). Replies "1" when the order, or one before it, waits for the holder.
ASK_TO_END: Final = (
    _PRELUDE
    + """
local refused = absent()
if refused then return refused end
if num('run_until_ms') <= now or get('run_req') ~= ARGV[1] then return {'OK', '0'} end
if get('run_order') == '' then redis.call('HSET', m, 'run_order', ARGV[2]) end
return {'OK', '1'}
"""
)

# ARGV: token, then request id, fingerprint, revision, base hash, data, crc, chain hash, head item, item count,
# context tokens, config, labels ("" each: unchanged), ttl ms.
COMMIT: Final = (
    _PRELUDE
    + """
local token, a = ARGV[1], append_args(2)
local refused = absent()
if refused then return refused end
local revision, known_fp = known(a.request_id)
if revision then
  if known_fp ~= a.fp then return {'REUSED'} end
  return ok()
end
refused = damaged()
if refused then return refused end
if token == '' or get('run_token') ~= token or num('revision') + 1 ~= int(a.revision)
    or get('head_hash') ~= a.base_hash then
  return {'FENCED'}
end
append(a)
return ok()
"""
)

# ARGV: expected revision or "", then as COMMIT from the request id on.
APPLY: Final = (
    _PRELUDE
    + """
local expected, a = ARGV[1], append_args(2)
local refused = absent() or damaged()
if refused then return refused end
local revision, known_fp = known(a.request_id)
if revision then
  if known_fp ~= a.fp then return {'REUSED'} end
  return ok()
end
local left = num('run_until_ms') - now
if left > 0 then return {'BUSY', get('run_req'), digits(left)} end
refused = wrong_revision(expected)
if refused then return refused end
if num('revision') + 1 ~= int(a.revision) or get('head_hash') ~= a.base_hash then
  return {'NOT_NEXT', get('revision')}
end
append(a)
return ok()
"""
)

# ARGV: token, "1" when the turn was called off.
ABORT: Final = (
    _PRELUDE
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

# ARGV: expected revision or "", life of the tombstone in ms.
DELETE: Final = (
    _PRELUDE
    + """
local life = int(ARGV[2])
local refused = absent()
if refused then return refused end
refused = wrong_revision(ARGV[1])
if refused then return refused end
local revision = get('revision')
redis.call('DEL', m, q, l)
redis.call('HSET', m, 'state', 'deleted', 'revision', revision, 'update_ms', digits(now))
expire_at(now + life)
return {'OK'}
"""
)

DAMAGE: Final = (
    _PRELUDE
    + """
local refused = absent()
if refused then return refused end
redis.call('HSET', m, 'state', 'damaged')
return {'OK'}
"""
)
