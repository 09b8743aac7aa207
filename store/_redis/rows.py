"""How ``redis_store`` keeps sessions: key names, the fields of a session's hash, entries of its stream, and the index.

The index is the listing of sessions and their sizes, per tenant.
KEYS of its scripts, in one hash slot (``t`` = ``{<tenant>}``)::

    1  pv1:i:t  ZSET  session id by update time
    2  pv1:u:t  HASH  session id → "<update time>|<bytes of its records>"
    3  pv1:e:t  ZSET  session id by expiry time, without sessions that never expire
    4  pv1:b:t  the sum of all bytes
    5  pv1:k:t  ZSET  the mark index: two members per entry, "m:…" to find turns and "s:…" to remove a session's
                entries (``_mark_members``), all of score 0

The keys lie in another slot than the sessions, so one script cannot change both. They are written around every change
and repaired when they are read: an entry of a missing session is removed, a wrong one corrected. A session is entered
before it is created, so a crash in between leaves a superfluous entry, never a hidden session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from pensieve.errors import DataLoss
from pensieve.store import _refusals
from pensieve.store._codec import StoredRecord
from pensieve.store._listing import MarkEntry, Position, decode_cursor, encode_cursor, has_labels, position_of
from pensieve.store._raw import sort_keys
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.scripts import SEALED
from pensieve.store._refusals import corrupt
from pensieve.store._rules import ttl_ms
from pensieve.store.contract import Counts, EndOrder, Key, LoggedRecord, MarkedTurn, Page, TenantUsage
from pensieve.store.records import Record, RecordKind, RunningTurn, SessionConfig, SessionRow, State

Fields = Mapping[bytes, bytes]

NO_LEASE = b"%d" % (1 << 60)
"""For a turn begun by an older program, which did not store the lease's length."""

_json = msgspec.json.Encoder()
_config_decoder = msgspec.json.Decoder(SessionConfig)
_order_decoder = msgspec.json.Decoder(EndOrder)
_labels_decoder = msgspec.json.Decoder(dict[str, str])


def session_keys(key: Key) -> list[str]:
    """Return the KEYS of every script. Names are quoted, so none can lead to another session's keys."""
    base = f"pv1:{{{quote(key.tenant, safe='')}/{quote(key.session_id, safe='')}}}"
    return [f"{base}:m", f"{base}:q", f"{base}:l"]


def key_of_name(name: bytes) -> Key | None:
    """Return the session that a key belongs to, or None."""
    text = name.decode("utf-8", errors="replace")
    inside, end, part = text.removeprefix("pv1:{").rpartition("}:")
    tenant, slash, session_id = inside.partition("/")
    if not (end and slash and part in ("m", "q", "l")):
        return None
    return Key(unquote(tenant), unquote(session_id))


def index_key(tenant: str) -> str:
    return tenant_keys(tenant)[0]


def tenant_keys(tenant: str) -> list[str]:
    """KEYS of the listing's scripts, in one hash slot. Empty braces define no slot, so "" becomes ``%``."""
    tag = quote(tenant, safe="") or "%"
    return [f"pv1:{letter}:{{{tag}}}" for letter in "iuebk"]


def indexed_tenant(name: bytes) -> str:
    tag = name.decode().removeprefix("pv1:i:{").removesuffix("}")
    return unquote(tag) if tag != "%" else ""


def create_fields(row: SessionRow) -> list[Any]:
    """Return the fields of a new session that the caller decides, as field, value, field, value, …"""
    return [
        *("head_item", row.head_item, "item_count", row.item_count, "context_tokens", row.context_tokens),
        *("config", _json.encode(row.config), "ttl_ms", ttl_ms(row.config)),
        *("labels", _json.encode(row.labels)),
        *("forked_from", row.forked_from, "forked_from_item", row.forked_from_item),
    ]


def append_args(
    record: Record, fingerprint: str, base_hash: str, stored: StoredRecord, counts: Counts
) -> list[Any]:
    """Return the arguments (ARGV) of COMMIT and APPLY, from the request id on."""
    return [
        *(record.request_id, fingerprint, record.revision, base_hash),
        *(stored.data, stored.crc, stored.head_hash),
        *(counts.head_item, counts.item_count, counts.context_tokens),
        b"" if record.config is None else _json.encode(record.config),
        b"" if record.labels is None else _json.encode(record.labels),
        0 if record.config is None else ttl_ms(record.config),
    ]


def order_text(order: EndOrder) -> bytes:
    return _json.encode(order)


def parse_order(text: bytes) -> EndOrder | None:
    return _order_decoder.decode(text) if text else None


def parse_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """Parse all fields of a session's hash; ``now``: server time in ms."""
    return SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        state=State(fields[b"state"].decode()),
        revision=int(fields[b"revision"]),
        head_item=int(fields[b"head_item"]),
        head_hash=fields[b"head_hash"].decode(),
        item_count=int(fields[b"item_count"]),
        context_tokens=int(fields[b"context_tokens"]),
        config=_config_decoder.decode(fields[b"config"]),
        labels=_labels_decoder.decode(fields[b"labels"]),
        create_ms=int(fields[b"create_ms"]),
        update_ms=int(fields[b"update_ms"]),
        expire_ms=int(fields[b"expire_ms"]),
        forked_from=fields[b"forked_from"].decode(),
        forked_from_item=int(fields[b"forked_from_item"]),
        running=_running(fields, now),
    )


def read_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """As ``parse_row``, for fields that may have been altered. Raises DataLoss (HISTORY_CORRUPT)."""
    try:
        row = parse_row(key, fields, now)
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise corrupt(key, 0, f"has a row that cannot be read ({type(error).__name__})") from error
    if row.state is State.ACTIVE and not _seal_holds(fields):
        raise corrupt(key, row.revision, "has a row that was altered")
    return row


def damaged_row(key: Key, update_ms: int) -> SessionRow:
    return SessionRow(tenant=key.tenant, session_id=key.session_id, state=State.DAMAGED, update_ms=update_ms)


def is_sealed(fields: Fields) -> bool:
    """Whether the newest record was written by a program that seals (see ``scripts``' docstring)."""
    return fields.get(b"seal", b"").partition(b"|")[0] == fields[b"revision"]


def _seal_holds(fields: Fields) -> bool:
    if not is_sealed(fields):
        return True
    _, requests, digest = fields[b"seal"].split(b"|")
    content = b"\0".join([requests, *(fields.get(name.encode(), b"") for name in SEALED)])
    return hashlib.sha1(content, usedforsecurity=False).hexdigest().encode() == digest


def check_requests(key: Key, requests: Fields, logged: Iterable[LoggedRecord]) -> None:
    """Raise DataLoss unless ``requests`` has all request ids of a whole log, except the creation's."""
    for one in logged:
        name, revision = one.record.request_id, one.record.revision
        if (
            name
            and one.record.kind is not RecordKind.CREATE
            and not requests.get(name.encode(), b"").startswith(b"%d|" % revision)
        ):
            raise corrupt(key, revision, "has lost its request id")


def _running(fields: Fields, now: int) -> RunningTurn | None:
    until = min(int(fields.get(b"run_until_ms", b"0")), now + int(fields.get(b"run_lease_ms", NO_LEASE)))
    if until <= now:
        return None
    return RunningTurn(
        request_id=fields[b"run_req"].decode(),
        owner=fields[b"run_owner"].decode(),
        attempt=fields[b"run_attempt"].decode(),
        lease_ms_left=until - now,
        start_ms=int(fields[b"run_start_ms"]),
    )


def as_fields(reply: Any) -> Fields:
    """Return HGETALL's reply as a map: a script gives a flat list."""
    if isinstance(reply, Mapping):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True))


def parse_time(reply: Any) -> int:
    """Return TIME's reply (seconds, microseconds) in ms."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def parse_log(entries: Iterable[Any]) -> list[StoredRecord]:
    """Parse XRANGE's reply. A malformed entry becomes a record that no check accepts."""
    return [_parse_entry(entry_id, as_fields(fields)) for entry_id, fields in entries]


def log_bytes(entries: Iterable[Any]) -> int:
    return sum(len(stored.data) for stored in parse_log(entries))


def _parse_entry(entry_id: bytes, fields: Fields) -> StoredRecord:
    revision = int(entry_id.partition(b"-")[0])
    crc = fields.get(b"c", b"")
    chain = fields.get(b"h", b"").decode("ascii", errors="replace")
    return StoredRecord(revision, fields.get(b"d", b""), int(crc) if crc.isdigit() else -1, chain)


BATCH = 64
GRACE_MS = 60_000
"""An entry this young may belong to a session that is being created."""

_PRELUDE: Final = """
local index, usage, ends, total, marks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function kept(session)
  local update, bytes = string.match(redis.call('HGET', usage, session) or '', '^(%d+)|(%d+)$')
  return tonumber(update or 0), tonumber(bytes or 0)
end
"""

# ARGV: session id, update ms, bytes, expire ms (0: never). If two writers finish out of order, the later
# update stays.
_ENTER: Final = (
    _PRELUDE
    + """
local session, update, bytes, expire = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZADD', index, 'GT', ARGV[2], session)
local kept_update, kept_bytes = kept(session)
if update < kept_update then return end
redis.call('HSET', usage, session, ARGV[2] .. '|' .. ARGV[3])
redis.call('INCRBY', total, string.format('%.0f', bytes - kept_bytes))
if expire > 0 then redis.call('ZADD', ends, ARGV[4], session) else redis.call('ZREM', ends, session) end
"""
)

# ARGV: session id, and the time (ms) of its last change: another session may since have the same id.
_REMOVE_OLD: Final = (
    _PRELUDE
    + """
local session, most = ARGV[1], tonumber(ARGV[2])
local place = redis.call('ZSCORE', index, session)
if place and tonumber(place) <= most then redis.call('ZREM', index, session) end
local update, bytes = kept(session)
if update > most or redis.call('HDEL', usage, session) == 0 then return end
redis.call('ZREM', ends, session)
redis.call('INCRBY', total, string.format('%.0f', -bytes))
"""
)

# ARGV: session id, and the prefix of its members in `marks`.
_REMOVE: Final = (
    _PRELUDE
    + """
redis.call('ZREM', index, ARGV[1])
redis.call('ZREM', ends, ARGV[1])
local _, bytes = kept(ARGV[1])
if redis.call('HDEL', usage, ARGV[1]) == 1 then redis.call('INCRBY', total, string.format('%.0f', -bytes)) end
for _, member in ipairs(redis.call('ZRANGE', marks, '[' .. ARGV[2], '(' .. ARGV[2] .. '\\255', 'BYLEX')) do
  redis.call('ZREM', marks, member, 'm:' .. string.sub(member, #ARGV[2] + 1) .. ':' .. string.sub(ARGV[2], 3, -2))
end
"""
)

# Returns sessions and bytes, without sessions that expired since the last repair; those are not removed.
_USAGE: Final = (
    _PRELUDE
    + """
local sessions = redis.call('HLEN', usage)
local sum = tonumber(redis.call('GET', total) or 0)
local clock = redis.call('TIME')
local now = string.format('%.0f', tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000))
for _, session in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now)) do
  local _, bytes = kept(session)
  sessions, sum = sessions - 1, sum - bytes
end
return {sessions, sum}
"""
)


class ListedSession(NamedTuple):
    """A session of the listing and its position in the index, which may be behind the row."""

    place: Position
    row: SessionRow
    unentered: Fields | None = None
    """The session's hash if the index disagrees with it, for ``RedisIndex.enter``."""


class RedisIndex:
    """Listing and usage of sessions, eventually consistent."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def announce(self, key: Key) -> None:
        now = parse_time(await self._link.command("TIME"))
        await self._link.command("ZADD", index_key(key.tenant), "GT", now, key.session_id)

    async def enter(self, row: SessionRow, fields: Fields) -> None:
        """Add or update one session. ``fields``: all fields of its hash."""
        size = int(fields[b"bytes"]) if is_sealed(fields) else await self._log_size(row)
        await self._link.call(
            _ENTER, tenant_keys(row.tenant), [row.session_id, row.update_ms, size, row.expire_ms]
        )

    async def remove(self, key: Key) -> None:
        prefix = f"s:{quote(key.session_id, safe='')}:"
        await self._link.call(_REMOVE, tenant_keys(key.tenant), [key.session_id, prefix])

    async def remove_old(self, key: Key, until_ms: int) -> None:
        """Remove a session without marked turns; later entries are of a new session with its id."""
        await self._link.call(_REMOVE_OLD, tenant_keys(key.tenant), [key.session_id, until_ms])

    async def mark(self, key: Key, entries: Iterable[MarkEntry]) -> None:
        """Add the mark entries of turns that are about to be appended."""
        members = [member for one in entries for member in _mark_members(key, one)]
        if members:
            name = tenant_keys(key.tenant)[4]
            await self._link.command("ZADD", name, *(word for member in members for word in (0, member)))

    async def unmark(self, key: Key, revisions: Collection[int]) -> None:
        name, session_id = tenant_keys(key.tenant)[4], quote(key.session_id, safe="")
        prefix = f"s:{session_id}:"
        found = await self._link.command("ZRANGE", name, f"[{prefix}", f"({prefix}\xff", "BYLEX")
        turns = [member.decode().removeprefix(prefix) for member in found]
        gone = [turn for turn in turns if int(turn.rpartition(":")[2]) in revisions]
        if gone:
            members = (member for turn in gone for member in (f"m:{turn}:{session_id}", prefix + turn))
            await self._link.command("ZREM", name, *members)

    async def has_marks(self, key: Key, entries: Iterable[MarkEntry]) -> bool:
        members = [member for one in entries for member in _mark_members(key, one)]
        name = tenant_keys(key.tenant)[4]
        return not members or None not in await self._link.command("ZMSCORE", name, *members)

    async def marked(self, tenant: str, name: str, limit: int) -> list[MarkedTurn]:
        """Return the turns with digest ``name``, newest first."""
        members = await self._link.command(
            *("ZRANGE", tenant_keys(tenant)[4], f"(m:{name};", f"[m:{name}:", "BYLEX", "REV"),
            *("LIMIT", 0, limit),
        )
        parts = [member.decode().split(":") for member in members]
        return [MarkedTurn(unquote(session_id), int(revision)) for *_, revision, session_id in parts]

    async def usage(self, tenant: str) -> TenantUsage:
        sessions, size = await self._link.call(_USAGE, tenant_keys(tenant), [])
        if not sessions:
            await self._link.check_marker()
        return TenantUsage(int(sessions), int(size))

    async def page(self, tenant: str, *, limit: int, cursor: str, labels: dict[str, str] | None) -> Page:
        place = decode_cursor(cursor)
        found, seen = list[ListedSession](), list[ListedSession]()
        while len(found) <= limit:
            batch = await self._entries_after(tenant, place)
            if not batch:
                break
            entries = await self._live_sessions(tenant, batch)
            seen += entries
            found += [entry for entry in entries if has_labels(entry.row, labels)]
            place = batch[-1]
        page, later = found[:limit], {entry.place for entry in found[limit:]}
        # What a later page is to have keeps its place until then: entered anew, it would be before this one.
        await self._correct(entry for entry in seen if entry.place not in later)
        rows = sorted((entry.row for entry in page), key=position_of, reverse=True)
        return Page(tuple(rows), encode_cursor(page[-1].place) if len(found) > limit else "")

    async def stored_keys(self, tenant: str | None = None) -> list[Key]:
        """Return the sessions and tombstones that have keys of their own (None: of all tenants), listed or not."""
        prefix = "pv1:{" if tenant is None else f"pv1:{{{quote(tenant, safe='')}/"
        found: set[Key] = set()
        for kind in ("hash", "stream"):
            names = await self._link.names(f"{prefix}*", kind)
            found.update(key for name in names if (key := key_of_name(name)) is not None)
        return sort_keys(found)

    async def purge(self) -> int:
        """Remove entries of missing sessions of all tenants; return how many."""
        return sum([await self._purge_one(name) for name in await self._link.names("pv1:i:*", "zset")])

    async def _purge_one(self, name: bytes) -> int:
        tenant = indexed_tenant(name)
        before = await self._link.command("ZCARD", name)
        place = decode_cursor("")
        while batch := await self._entries_after(tenant, place):
            await self._correct(await self._live_sessions(tenant, batch))
            place = batch[-1]
        return int(before) - int(await self._link.command("ZCARD", name))

    async def _entries_after(self, tenant: str, place: Position) -> list[Position]:
        """Return up to BATCH entries after ``place``. Redis pages by time, so some come again and are skipped."""
        offset = 0
        while True:
            reply = await self._link.command(
                *("ZRANGE", index_key(tenant), place.update_ms, "-inf", "BYSCORE", "REV"),
                *("LIMIT", offset, BATCH, "WITHSCORES"),
            )
            entries = [Position(int(float(score)), member.decode()) for member, score in reply]
            batch = [entry for entry in entries if entry < place]
            if batch or len(entries) < BATCH:
                return batch
            offset += len(entries)

    async def _live_sessions(self, tenant: str, batch: list[Position]) -> list[ListedSession]:
        """Return the live sessions of ``batch``, and remove entries of missing ones."""
        keys = [Key(tenant, entry.session_id) for entry in batch]
        now = parse_time(await self._link.command("TIME"))
        reads = [("HGETALL", session_keys(key)[0]) for key in keys]
        names = [entry.session_id for entry in batch]
        *hashes, entered = await self._link.commands([*reads, ("HMGET", tenant_keys(tenant)[1], *names)])
        live: list[ListedSession] = []
        if isinstance(entered, Exception):
            raise _refusals.unavailable(f"the listing's key holds another type: {entered}")
        for key, entry, reply, kept in zip(keys, batch, hashes, entered, strict=True):
            if isinstance(reply, Exception):
                live.append(ListedSession(entry, damaged_row(key, entry.update_ms)))
                continue
            fields = as_fields(reply)
            if fields.get(b"state", b"deleted") == b"deleted":
                if fields or now - entry.update_ms > GRACE_MS:
                    await self.remove(key)
                continue
            try:
                row = read_row(key, fields, now)
            except DataLoss:  # a corrupt session must not hide the others; loading it raises the error
                live.append(ListedSession(entry, damaged_row(key, entry.update_ms)))
                continue
            is_right = row.update_ms <= entry.update_ms and _is_entered(row, fields, kept)
            live.append(ListedSession(entry, row, None if is_right else fields))
        return live

    async def _correct(self, entries: Iterable[ListedSession]) -> None:
        for entry in entries:
            if entry.unentered is not None:
                await self.enter(entry.row, entry.unentered)

    async def _log_size(self, row: SessionRow) -> int:
        """Sum up a log, for a session last written by a program that did not keep its size."""
        stream = session_keys(Key(row.tenant, row.session_id))[2]
        return log_bytes(await self._link.command("XRANGE", stream, "-", "+"))


def _mark_members(key: Key, one: MarkEntry) -> tuple[str, str]:
    session_id = quote(key.session_id, safe="")
    turn = f"{one.found_by}:{one.time_ms:015d}:{one.revision:010d}"
    return f"m:{turn}:{session_id}", f"s:{session_id}:{turn}"


def _is_entered(row: SessionRow, fields: Fields, kept: bytes | None) -> bool:
    update, _, size = (kept or b"-1|").partition(b"|")
    return int(update) > row.update_ms or (int(update) == row.update_ms and size == fields.get(b"bytes"))
