"""A spike: the rules of `store/_rules.py` and `store/_leases.py` decide for Redis, too, for begin and commit alone.

LOOK reads a session's row, and what the decision needs of its log and request ids. Python decides. WRITE changes the
row unless what was read has changed meanwhile; then all is done again. With ``--keep`` a commit does not look again: it
writes on what begin has written.

python bench/stores/redis_rules.py redis://127.0.0.1:6379/0 --connections 8 --keep
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from typing import Any, NamedTuple
from uuid import uuid4

import click

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.store import BeginOutcome, BeginRequest, Counts, Key, _leases, _refusals, _rules
from pensieve.store._clock import Moment
from pensieve.store._codec import store_record
from pensieve.store._marks import markings
from pensieve.store._redis.clients import all_ended
from pensieve.store._redis.rows import as_fields, parse_order, parse_row, session_keys
from pensieve.store._redis.scripts import SEALED
from pensieve.store._rules import Known, Lease, Meta
from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, TurnResult
from pensieve.store.redis_store import RedisStore

BURST = 48
READ = (
    *("state", "seal", "head_hash", "revision", "expire_ms", "update_ms", "run_token", "run_until_ms"),
    *("run_lease_ms", "run_order", "run_followed", "run_off", "run_req", "run_fp"),
)
"""The fields that a decision is made from, by the name under which Redis has them."""
RUN = (
    *("run_req", "run_fp", "run_token", "run_owner", "run_attempt", "run_seed", "run_start_ms"),
    *("run_lease_ms", "run_until_ms", "run_order", "run_followed", "run_off"),
)
_HEAD = (
    """
local m, q, l = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local function digits(number) return string.format('%.0f', number) end
local function looked(req)
  local values = redis.call('HMGET', m, @READ@)
  for i = 1, #values do values[i] = values[i] or '' end
  local entry = redis.call('HGET', q, req) or ''
  return redis.sha1hex(table.concat(values, '\\0') .. '\\0' .. digits(redis.call('XLEN', l)) .. '|'
    .. digits(redis.call('HLEN', q)) .. '|' .. entry), entry
end
"""
).replace("@READ@", ", ".join(f"'{name}'" for name in READ))
# ARGV: request id, revision that the caller knows, "1" to read the newest record's chain hash.
LOOK = (
    _HEAD
    + """
local sum, entry = looked(ARGV[1])
local function hash_at(id)
  local found = redis.call('XRANGE', l, id, id)[1]
  for i = 1, found and #found[2] or 0, 2 do if found[2][i] == 'h' then return found[2][i + 1] end end
  return ''
end
local last, there = '', ''
local head = ARGV[3] == '1' and redis.call('HGET', m, 'revision')
if head then
  last = hash_at(head .. '-0')
  if ARGV[2] ~= '0' then there = ARGV[2] == head and last or hash_at(ARGV[2] .. '-0') end
end
return {'OK', digits(now), sum, redis.call('HGETALL', m), redis.call('XLEN', l), redis.call('HLEN', q), entry, last,
  there}
"""
)
# ARGV: what was read, request id, then three lists with their lengths: fields to set, a record, fields to remove; when
# the session expires ("": as before), what the request id stands for, the largest number that was acknowledged.
WRITE = (
    _HEAD
    + """
if looked(ARGV[2]) ~= ARGV[1] then return {'CHANGED'} end
local at = 3
local function list()
  local from = at + 1
  at = from + tonumber(ARGV[at])
  return from, at - 1
end
local set, set_to = list()
local record, record_to = list()
local gone, gone_to = list()
local expire, known, kept = ARGV[at], ARGV[at + 1], ARGV[at + 2]
if record <= record_to then redis.call('XADD', l, unpack(ARGV, record, record_to)) end
redis.call('HSET', m, unpack(ARGV, set, set_to))
if known ~= '' then redis.call('HSET', q, ARGV[2], known) end
if gone <= gone_to then redis.call('HDEL', m, unpack(ARGV, gone, gone_to)) end
for _, key in ipairs(expire ~= '' and {m, q, l} or {}) do
  if expire ~= '0' then redis.call('PEXPIREAT', key, expire) else redis.call('PERSIST', key) end
end
local mark = KEYS[4] and tonumber(redis.call('HGET', KEYS[4], 'number') or '0')
if not mark or mark < tonumber(kept) then return {'OK', digits(now), ''} end
redis.call('HSET', KEYS[4], 'number', digits(mark + 1))
redis.call('PEXPIREAT', KEYS[4], digits(now + 2592000000))
return {'OK', digits(now), digits(mark + 1)}
"""
)


class Looked(NamedTuple):
    """A session as it was read or written."""

    now: int
    digest: str | bytes
    fields: dict[bytes, bytes]
    request_ids: int
    meta: Meta
    known: Known | None
    hash_there: str


class OneRuleStore(RedisStore):
    """``RedisStore`` with another begin and commit."""

    keep = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: dict[tuple[Key, str], Looked] = {}

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        while True:
            seen = await self._look(key, request.request_id, request.known_revision, newest=True)
            moment = Moment(seen.now, seen.now)
            begun = _leases.begin(seen.meta, seen.known, request, moment, hash_there=seen.hash_there)
            if begun.meta is None or begun.meta.lease is None:
                return begun.outcome
            lease, after = begun.meta.lease, dict(seen.fields)
            values = (
                *(lease.request_id, lease.fingerprint, lease.token, lease.owner, lease.attempt),
                *(lease.seed, lease.start_ms, request.lease_ms, lease.until_ms),
            )
            after.update(
                {name.encode(): str(value).encode() for name, value in zip(RUN, values, strict=False)}
            )
            for name in (b"run_order", b"run_followed", b"run_off"):
                after.pop(name, None)
            expire = begun.meta.row.expire_ms
            after[b"expire_ms"] = b"%d" % expire
            changed = "" if expire == seen.meta.row.expire_ms else expire
            reply = await self._link.call(
                WRITE, session_keys(key), _changes(seen, request.request_id, after, [], changed)
            )
            if reply[0] == b"OK":
                if self.keep:
                    digest = _digest(after, seen.meta.row.revision, seen.request_ids)
                    self._kept[key, request.token] = seen._replace(
                        digest=digest, fields=after, meta=begun.meta
                    )
                return begun.outcome

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        while True:
            kept = self._kept.pop((key, token), None)
            seen, _ = await all_ended(
                self._at_hand(kept) if kept is not None else self._look(key, record.request_id),
                self._index.mark(key, markings(record)),
            )
            moment = Moment(seen.now, seen.now)
            meta = _rules.commit(seen.meta, seen.known, token, fingerprint, record, counts, moment)
            if meta is None:
                return _rules.view(seen.meta, moment)
            stored = store_record(record, seen.meta.row.head_hash)
            row = _rules.at_head(meta, stored.head_hash).row
            size = int(seen.fields[b"bytes"]) + len(stored.data)
            after = {name: value for name, value in seen.fields.items() if name.decode() not in RUN}
            numbers = ("revision", "head_item", "item_count", "context_tokens", "update_ms", "expire_ms")
            after.update({name.encode(): b"%d" % getattr(row, name) for name in numbers})
            after.update({b"head_hash": row.head_hash.encode(), b"bytes": b"%d" % size})
            after[b"seal"] = _seal(after, seen.request_ids + 1)
            entry = [f"{row.revision}-0", "d", stored.data, "c", stored.crc, "h", stored.head_hash]
            known = f"{row.revision}|{fingerprint}"
            args = _changes(seen, record.request_id, after, entry, row.expire_ms, known)
            reply = await self._acknowledged.change(WRITE, key, args[:-1])
            if reply[0] == b"OK":
                await all_ended(self._safe.made(row), self._list(row, after))
                self._acknowledged.made(row, *reply[1:])
                return row

    async def _look(
        self, key: Key, request_id: str, known_revision: int = 0, *, newest: bool = False
    ) -> Looked:
        args = [request_id, known_revision, int(newest)]
        _, clock, digest, reply, records, ids, entry, last, there = await self._link.call(
            LOOK, session_keys(key), args
        )
        now, fields = int(clock), dict(as_fields(reply))
        if not fields:
            raise _refusals.not_found()
        row = parse_row(key, fields, 0)
        if (
            records != row.revision
            or fields[b"seal"] != _seal(fields, ids)
            or (newest and last != fields[b"head_hash"])
        ):
            raise _refusals.corrupt(key, row.revision, "is not the one that the session's row names")
        revision, _, known_fingerprint = entry.partition(b"|")
        known = Known(known_fingerprint.decode(), int(revision)) if entry else None
        meta = Meta(row, fields[b"create_fp"].decode(), _lease(fields, now))
        return Looked(now, digest, fields, ids, meta, known, there.decode())

    async def _at_hand(self, kept: Looked) -> Looked:
        return kept


def _changes(
    seen: Looked, request_id: str, after: dict[bytes, bytes], record: list[Any], expire: Any, known: str = ""
) -> list[Any]:
    """The arguments of WRITE."""
    put = [word for item in after.items() if seen.fields.get(item[0]) != item[1] for word in item]
    gone = [name for name in seen.fields if name not in after]
    return [seen.digest, request_id, len(put), *put, len(record), *record, len(gone), *gone, expire, known, 0]


def _lease(fields: dict[bytes, bytes], now: int) -> Lease | None:
    if b"run_req" not in fields:
        return None
    texts = [
        fields[name].decode() for name in (b"run_req", b"run_fp", b"run_token", b"run_owner", b"run_attempt")
    ]
    until = min(int(fields[b"run_until_ms"]), now + int(fields[b"run_lease_ms"]))
    return Lease(
        *texts,
        *(int(fields[b"run_seed"]), int(fields[b"run_start_ms"]), until),
        *(parse_order(fields.get(b"run_order", b"")), b"run_followed" in fields, b"run_off" in fields),
    )


def _seal(fields: dict[bytes, bytes], requests: int) -> bytes:
    content = b"\0".join([b"%d" % requests, *(fields.get(name.encode(), b"") for name in SEALED)])
    digest = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return b"%s|%d|%s" % (fields[b"revision"], requests, digest.encode())


def _digest(fields: dict[bytes, bytes], records: int, requests: int) -> str:
    """What LOOK would say."""
    text = b"\0".join(fields.get(name.encode(), b"") for name in READ) + b"\0%d|%d|" % (records, requests)
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


async def _measure(url: str, connections: int, bursts: int, keep: bool) -> None:
    stores: dict[str, RedisStore] = {
        "as it is": RedisStore.from_url(url),
        "one place": OneRuleStore.from_url(url),
    }
    OneRuleStore.keep = keep
    found: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name in stores}
    rows: dict[str, list[SessionRow]] = {}
    for name, store in stores.items():
        await store.open()
        first = Record(revision=1, kind=RecordKind.CREATE, time_ms=1, config=SessionConfig(model="tiny"))
        rows[name] = [
            await store.create(SessionRow(tenant="t", session_id=uuid4().hex), first, "fp")
            for _ in range(connections)
        ]
    for _ in range(bursts):
        for name, store in stores.items():
            latency: list[float] = []
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.gather(*(_turns(store, rows[name], at, latency) for at in range(connections)))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            found[name].append((cpu / len(latency) * 1e3, len(latency) / wall, latency))
    for name, store in stores.items():
        await store.close()
        cpus, rates = ([one[at] for one in found[name][2:]] for at in (0, 1))
        ms = sorted(value for one in found[name][2:] for value in one[2])
        print(
            f"{name}: CPU {statistics.median(cpus):.2f} ms a turn, {statistics.median(rates):.0f} turns/s,"
            f" p50 {ms[len(ms) // 2]:.1f} ms, p99 {ms[len(ms) * 99 // 100]:.1f} ms"
        )


async def _turns(store: RedisStore, rows: list[SessionRow], at: int, latency: list[float]) -> None:
    for _ in range(BURST // len(rows)):
        row, base = rows[at], rows[at].revision
        key, request_id, token = Key(row.tenant, row.session_id), f"r{base}", uuid4().hex
        items = (
            Item(2 * base, Role.USER, "hello " * 60, pack_tokens(range(60)), request_id),
            Item(2 * base + 1, Role.ASSISTANT, "hello " * 60, pack_tokens(range(60))),
        )
        result = TurnResult(base_revision=base, finish_reason=FinishReason.EOS, input_items=1)
        record = Record(base + 1, RecordKind.TURN, 2, request_id, items=items, turn=result)
        request = BeginRequest(
            *(request_id, "fp", token, "bench", token, 60_000, 1),
            known_revision=base,
            known_head=row.head_hash,
            known_create_ms=row.create_ms,
        )
        began = time.perf_counter()
        await store.begin(key, request)
        rows[at] = await store.commit(key, token, "fp", record, Counts(2 * base + 1, 2 * base, 120 * base))
        latency.append((time.perf_counter() - began) * 1e3)


@click.command(help=__doc__)
@click.argument("url")
@click.option("--connections", default=1, show_default=True)
@click.option("--bursts", default=40, show_default=True)
@click.option("--keep", is_flag=True, help="A commit writes on what begin has written.")
def main(url: str, connections: int, bursts: int, keep: bool) -> None:
    asyncio.run(_measure(url, connections, bursts, keep))


if __name__ == "__main__":
    main()
