"""Raw access to a Redis history for maintenance.

One script reads a session, so at one moment. A session is first written under temporary keys that expire by
themselves; then one script checks that the session to replace is unchanged and swaps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import msgspec

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store import _refusals
from pensieve.store._codec import StoredRecord
from pensieve.store._listing import mark_entries_of_log
from pensieve.store._raw import (
    Finding,
    Mode,
    Problem,
    Progress,
    RawSession,
    Remedy,
    make_finding,
    no_progress,
)
from pensieve.store._redis.link import MARKER, SCHEMA, RedisLink
from pensieve.store._redis.rows import (
    Fields,
    RedisIndex,
    as_fields,
    create_fields,
    index_key,
    parse_log,
    parse_row,
    parse_time,
    read_row,
    session_keys,
)
from pensieve.store._redis.scripts import PRELUDE
from pensieve.store._rules import CommittedRequest, Lease, Meta
from pensieve.store.contract import Key
from pensieve.store.records import SessionRow, State

STAGED_S: Final = 3600
"""Lifetime of a staged session that was never swapped in."""
BATCH = 256
BATCH_BYTES = 4 << 20
EXPIRY_SLACK_MS = 2000
NO_STAMP: Final = "||"

_STAMP: Final = """
local function stamp(m)
  local parts = redis.call('HMGET', m, 'state', 'revision', 'head_hash')
  return (parts[1] or '') .. '|' .. (parts[2] or '') .. '|' .. (parts[3] or '')
end
"""

# KEYS: as of every script (m, q, l). A key of a foreign type is read as if it were missing.
DUMP: Final = (
    _STAMP
    + """
local m, q, l = KEYS[1], KEYS[2], KEYS[3]
local kinds = {}
for i, key in ipairs(KEYS) do kinds[i] = redis.call('TYPE', key).ok end
local function if_kind(i, kind, read, ...)
  if kinds[i] == kind then return redis.call(read, KEYS[i], ...) end
  return {}
end
local mark = kinds[1] == 'hash' and stamp(m) or '||'
return {'OK', redis.call('TIME'), mark, kinds, {redis.call('PTTL', m), redis.call('PTTL', q), redis.call('PTTL', l)},
  if_kind(1, 'hash', 'HGETALL'), if_kind(2, 'hash', 'HGETALL'), if_kind(3, 'stream', 'XRANGE', '-', '+')}
"""
)

# KEYS: m, q, l, then their three replacements. ARGV: stamp of the session to replace, expire_ms (0: never).
PLACE: Final = (
    PRELUDE
    + _STAMP
    + """
int(ARGV[2])
if redis.call('TYPE', m).ok == 'hash' then
  if stamp(m) ~= ARGV[1] then return {'CHANGED'} end
  if lease_left() > 0 then return {'BUSY'} end
elseif ARGV[1] ~= '||' then
  return {'CHANGED'}
end
redis.call('DEL', m, q, l)
for i = 1, 3 do
  if redis.call('EXISTS', KEYS[i + 3]) == 1 then redis.call('RENAME', KEYS[i + 3], KEYS[i]) end
end
if get('state') ~= 'deleted' then seal() end
expire_at(int(ARGV[2]))
return ok()
"""
)


class RedisDump:
    """``RawStore`` over one Redis database."""

    kind = "redis"

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._index = RedisIndex(link)
        self.store_id = ""

    @property
    def is_exclusive(self) -> bool:
        """Never: Redis does not tell which programs use it."""
        return False

    async def open(self, mode: Mode) -> None:
        if mode is Mode.WRITE:
            await self._link.open()
            self.store_id = self._link.store_id
            return
        found = await self._link.command("HMGET", MARKER, "store_id", "schema")
        store_id, schema = (None if value is None else value.decode() for value in found)
        if schema is not None and (not schema.isdecimal() or int(schema) > SCHEMA):
            raise _refusals.newer_schema(schema, SCHEMA)
        if store_id is None and not await self.keys():
            raise FailedPrecondition(
                f"the Redis at {self._link.address} holds no history", reason="STORE_FOREIGN"
            )
        self.store_id = store_id or ""

    async def close(self) -> None:
        await self._link.close()

    async def now(self) -> int:
        return parse_time(await self._link.command("TIME"))

    async def keys(self) -> list[Key]:
        return await self._index.stored_keys()

    async def session(self, key: Key) -> RawSession | None:
        found = await self._read(key)
        if found is None or any(one.problem is Problem.LISTING for one in found.findings):
            # The listing was read separately: the session may have been deleted in between.
            found = await self._read(key)
        return found

    async def check_storage(self) -> list[Finding]:
        if self.store_id:
            return []
        detail = f"{MARKER} is missing: servers take this for another, empty store"
        return [make_finding(None, Problem.FILE, detail, Remedy.REBUILD)]

    async def repair_storage(self, progress: Progress = no_progress) -> None:
        """Create the marker if it is missing."""
        await self._link.open()

    async def put(self, session: RawSession, *, expected_stamp: str | None) -> bool:
        assert session.meta is not None, "only a session with a row can be written"
        row = session.meta.row
        present = session_keys(session.key)
        own = uuid4().hex  # another program may write the same session
        staged = [f"{name[:-1]}{own}:{name[-1]}" for name in present]
        if row.state is not State.DELETED:  # before the session exists, so that it is never hidden
            await self._link.command("ZADD", index_key(row.tenant), "GT", row.update_ms, row.session_id)
        for batch in _batches(_writes(session, staged)):
            await self._link.commands([*batch, *(("EXPIRE", name, STAGED_S) for name in staged)])
        replaced = (NO_STAMP if expected_stamp is None else expected_stamp).encode(errors="surrogateescape")
        args = [replaced, row.expire_ms]
        outcome, *values = await self._link.call_durably(PLACE, [*present, *staged], args)
        if outcome != b"OK":
            await self._link.commands([("DEL", *staged)])
            return False
        revision = 0 if row.state is State.DELETED else row.revision
        await self._link.confirm(present, revision, row.head_hash)
        if row.state is State.DELETED:
            await self._index.remove(session.key)
        else:
            await self._index.enter(row, as_fields(values[1]))
            await self._index.mark(session.key, mark_entries_of_log(session.log))
        return True

    async def flush(self) -> None:
        """Do nothing: each session is as durable as Redis is configured to be."""

    async def _read(self, key: Key) -> RawSession | None:
        names = session_keys(key)
        _, clock, stamp, kinds, lives, fields, asked, log = await self._link.call(DUMP, names, [])
        if all(kind == b"none" for kind in kinds):
            return None
        fields = as_fields(fields)
        requests, bad = _requests(key, as_fields(asked))
        found = [*bad, *_kind_findings(key, kinds)]
        records = tuple(_records(key, log, found))
        try:
            meta = _meta(key, fields)
        except (KeyError, ValueError, msgspec.MsgspecError) as error:
            what = "is missing" if not fields else f"cannot be read ({type(error).__name__}: {error})"
            found.append(make_finding(key, Problem.ROW, f"its row {what}", Remedy.REBUILD))
            return RawSession(
                key, None, records, requests, tuple(found), stamp.decode(errors="surrogateescape")
            )
        found += _expiry_findings(key, meta, parse_time(clock), kinds, lives)
        if meta.row.state is not State.DELETED:
            found += _seal_findings(key, fields)
            place = await self._link.command("ZSCORE", index_key(key.tenant), key.session_id)
            if place is None:
                found.append(make_finding(key, Problem.LISTING, "it is not in the listing", Remedy.REBUILD))
            if not await self._index.has_marks(key, mark_entries_of_log(records)):
                detail = "its turns are not found by their marks"
                found.append(make_finding(key, Problem.LISTING, detail, Remedy.REBUILD))
        return RawSession(key, meta, records, requests, tuple(found), stamp.decode(errors="surrogateescape"))


def _meta(key: Key, fields: Fields) -> Meta:
    if fields[b"state"] == b"deleted":
        row = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            state=State.DELETED,
            revision=int(fields[b"revision"]),
            update_ms=int(fields[b"update_ms"]),
            expire_ms=int(fields[b"expire_ms"]),
        )
        return Meta(row, "")
    row = msgspec.structs.replace(parse_row(key, fields, now=1 << 62), running=None)
    return Meta(row, fields[b"create_fp"].decode(), _lease(fields))


def _lease(fields: Fields) -> Lease | None:
    if b"run_req" not in fields:
        return None
    return Lease(
        request_id=fields[b"run_req"].decode(),
        fingerprint=fields[b"run_fp"].decode(),
        token=fields[b"run_token"].decode(),
        owner=fields[b"run_owner"].decode(),
        attempt=fields[b"run_attempt"].decode(),
        seed=int(fields[b"run_seed"]),
        start_ms=int(fields[b"run_start_ms"]),
        until_ms=int(fields[b"run_until_ms"]),
        called_off=b"run_off" in fields,
    )


def _row_fields(meta: Meta, size: int) -> list[Any]:
    row, lease = meta.row, meta.lease
    common = ["state", row.state.value, "revision", row.revision, "update_ms", row.update_ms]
    common += ["expire_ms", row.expire_ms]
    if row.state is State.DELETED:
        return common
    fields = [*create_fields(row), *common, "bytes", size]
    fields += ["head_hash", row.head_hash, "create_fp", meta.create_fingerprint, "create_ms", row.create_ms]
    if lease is not None:
        fields += ["run_req", lease.request_id, "run_fp", lease.fingerprint, "run_token", lease.token]
        fields += ["run_owner", lease.owner, "run_attempt", lease.attempt, "run_seed", lease.seed]
        fields += ["run_start_ms", lease.start_ms, "run_until_ms", lease.until_ms]
        fields += ["run_off", 1] if lease.called_off else []
    return fields


def _requests(key: Key, fields: Mapping[bytes, bytes]) -> tuple[dict[str, CommittedRequest], list[Finding]]:
    requests: dict[str, CommittedRequest] = {}
    for name, value in fields.items():
        revision, bar, fingerprint = value.decode("utf-8", errors="replace").partition("|")
        if bar and revision.isdecimal():
            requests[name.decode("utf-8", errors="replace")] = CommittedRequest(fingerprint, int(revision))
    bad = len(fields) - len(requests)
    unreadable = f"{bad} entries of its request ids cannot be read"
    return requests, [make_finding(key, Problem.REQUESTS, unreadable, Remedy.REBUILD)] if bad else []


def _records(key: Key, log: Iterable[Any], found: list[Finding]) -> Iterator[StoredRecord]:
    """Yield the stream's records; report and skip entries that no store wrote."""
    for entry in log:
        if entry[0].endswith(b"-0"):
            yield from parse_log([entry])
        else:
            detail = f"its log has an entry {entry[0].decode()} that is not a record"
            found.append(make_finding(key, Problem.LOG, detail, Remedy.REBUILD))


def _kind_findings(key: Key, kinds: list[bytes]) -> Iterator[Finding]:
    for name, kind, right in zip(
        ("row", "request ids", "log"), kinds, ("hash", "hash", "stream"), strict=True
    ):
        if kind.decode() not in ("none", right):
            yield make_finding(
                key, Problem.ROW, f"its {name} is a {kind.decode()}, not a {right}", Remedy.REBUILD
            )


def _seal_findings(key: Key, fields: Fields) -> Iterator[Finding]:
    """Report a row that another program than a store has changed."""
    try:
        read_row(key, fields, now=1 << 62)
    except DataLoss as error:
        detail = error.message.removeprefix(f"session {key.session_id!r}: ")
        yield make_finding(key, Problem.ROW, detail, Remedy.REBUILD)


def _expiry_findings(
    key: Key, meta: Meta, now: int, kinds: list[bytes], lives: list[int]
) -> Iterator[Finding]:
    until = meta.row.expire_ms
    for name, kind, life in zip(session_keys(key), kinds, lives, strict=True):
        if kind == b"none":
            continue
        right = life == -1 if until == 0 else life >= 0 and abs(now + life - until) <= EXPIRY_SLACK_MS
        if not right:
            says = "never" if until == 0 else f"in {until - now} ms"
            does = "never" if life == -1 else f"in {life} ms"
            detail = f"{name} expires {does}, its row says {says}"
            yield make_finding(key, Problem.EXPIRY, detail, Remedy.REBUILD)


def _writes(session: RawSession, staged: list[str]) -> Iterator[tuple[Any, ...]]:
    meta, requests, log = staged
    assert session.meta is not None
    yield ("HSET", meta, *_row_fields(session.meta, session.size))
    for name, known in session.requests.items():
        yield ("HSET", requests, name, f"{known.revision}|{known.fingerprint}")
    for entry in session.log:
        yield ("XADD", log, f"{entry.revision}-0", "d", entry.data, "c", entry.crc, "h", entry.head_hash)


def _batches(writes: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while batch := list(islice(writes, 1)):
        size = _size(batch[0])
        while len(batch) < BATCH and size < BATCH_BYTES and (more := next(writes, None)) is not None:
            batch.append(more)
            size += _size(more)
        yield batch


def _size(words: tuple[Any, ...]) -> int:
    return sum(len(word) for word in words if isinstance(word, str | bytes))
