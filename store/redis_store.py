"""History in Redis, for any number of servers. As durable as the Redis is configured to be.

Each operation is one Lua script over one session's keys (``_redis.scripts``), idempotent, so that the client library
may send it again when a reply was lost. A commit carries the chain hash it was computed on; the script refuses it
when the log has another head. Time is the Redis server's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from redis.exceptions import ResponseError

from pensieve.errors import DataLoss, Unavailable
from pensieve.store import _refusals
from pensieve.store._codec import SLICE_BYTES, marking_damage, read_log, store_record, store_rest
from pensieve.store._leases import only
from pensieve.store._marks import found_by, markings
from pensieve.store._reading import read_whole
from pensieve.store._redis import scripts
from pensieve.store._redis.acknowledged import Acknowledged
from pensieve.store._redis.dump import RedisDump
from pensieve.store._redis.index import RedisIndex
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.problems import refusal
from pensieve.store._redis.renewals import renew_all
from pensieve.store._redis.rows import (
    Fields,
    append_args,
    as_fields,
    check_requests,
    create_fields,
    order_text,
    parse_log,
    parse_row,
    read_row,
    session_keys,
)
from pensieve.store._redis.safe_heads import SafeHeads
from pensieve.store._redis.several import all_ended
from pensieve.store._rules import TOMBSTONE_MS, check_first
from pensieve.store.contract import (
    SLICE_RECORDS,
    Began,
    BeginOutcome,
    BeginRequest,
    CalledOff,
    Counts,
    EndOrder,
    HeldLease,
    Key,
    LoggedRecord,
    LogSlice,
    MarkedTurn,
    Page,
    RenewalAnswer,
    Renewed,
    Replay,
    RunningElsewhere,
    TenantUsage,
)
from pensieve.store.records import Record, SessionRow

log = logging.getLogger(__name__)


class RedisStore:
    """``HistoryStore`` over one Redis database."""

    def __init__(self, link: RedisLink, on_went_back: Callable[[], None] = lambda: None) -> None:
        self._link = link
        self._acknowledged = Acknowledged(link, on_went_back)
        self._index = RedisIndex(link)
        self._safe = SafeHeads(link)
        self._create = link.script(scripts.CREATE)
        self._load = link.script(scripts.LOAD)
        self._find = link.script(scripts.FIND)
        self._read = link.script(scripts.READ)
        self._begin = link.script(scripts.BEGIN)
        self._renew = link.script(scripts.RENEW)
        self._ask_to_end = link.script(scripts.ASK_TO_END)
        self._commit = link.script(scripts.COMMIT)
        self._apply = link.script(scripts.APPLY)
        self._abort = link.script(scripts.ABORT)
        self._delete = link.script(scripts.DELETE)
        self._forget = link.script(scripts.FORGET)
        self._damage = link.script(scripts.DAMAGE)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        on_error: Callable[[], None] = lambda: None,
        on_went_back: Callable[[], None] = lambda: None,
    ) -> RedisStore:
        """The forms are those of ``_redis.places.parse_place``. Raises ValueError on others."""
        return cls(RedisLink(url, on_error=on_error), on_went_back)

    def dump(self) -> RedisDump:
        """Access to all that is stored, for maintenance; in place of ``open``, not beside it."""
        return RedisDump(self._link)

    @property
    def durability(self) -> str:
        """``replicated(n)`` if the URL asks for replicas; else what the weakest server does: ``fsync`` (AOF, always),
        ``local`` (AOF, every second), ``none`` (no AOF), or ``unknown`` when CONFIG or INFO is forbidden.
        """
        return self._link.durability

    @property
    def store_id(self) -> str:
        return self._link.store_id

    async def open(self) -> None:
        try:
            await self._link.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._link.close()

    async def ping(self) -> None:
        """Writes, so that a Redis that only reads is noticed. Notices one that went back, too."""
        await self._link.ping()
        await self._acknowledged.look(counts=False)

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        check_first(record)
        key = Key(row.tenant, row.session_id)
        await self._link.check_marker()
        await self._index.announce(key)
        stored = store_record(record, "")
        args = [fingerprint, stored.data, stored.crc, stored.head_hash, *create_fields(row)]
        reply = await self._acknowledged.change(self._create, key, args)
        return await self._entered(key, reply)

    async def load(self, key: Key) -> SessionRow:
        outcome, *values = await self._link.call(self._load, session_keys(key), [])
        if outcome != b"OK":
            await self._refuse(key, outcome, values)
        fields = as_fields(values[1])
        async with marking_damage(self, key):
            row = read_row(key, fields, int(values[0]))
        await self._safe.shown(row, fields)
        return row

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page:
        await self._link.check_marker()
        return await self._index.page(tenant, limit=limit, cursor=cursor, labels=labels)

    async def usage(self, tenant: str) -> TenantUsage:
        return await self._index.usage(tenant)

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        requests: Fields = {}
        known_to = 0

        async def fetch(after_revision: int, head_hash: str) -> LogSlice:
            nonlocal requests, known_to
            begins = after_revision == 0
            piece, asked = await self._slice(key, after_revision, head_hash, SLICE_RECORDS, requests=begins)
            if begins:
                requests, known_to = asked, piece.row.revision
            async with marking_damage(self, key):
                check_requests(
                    key, requests, (one for one in piece.records if one.record.revision <= known_to)
                )
            return piece

        return await read_whole(fetch, after_revision, head_hash)

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        piece, _ = await self._slice(key, after_revision, head_hash, limit, requests=False)
        return piece

    async def find_request(self, key: Key, request_id: str) -> int | None:
        outcome, *values = await self._link.call(self._find, session_keys(key), [request_id])
        if outcome != b"OK":
            await self._refuse(key, outcome, values)
        if not values[0]:
            return None
        await self._safe.on_replicas(key, int(values[0]), values[1])
        await self._safe.in_file(key, int(values[2]), values[3].decode())
        return int(values[0])

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        return await self._index.marked(tenant, found_by(mark, answer), limit)

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        expected_revision = request.expected_revision
        args = [
            *(
                request.request_id,
                request.fingerprint,
                "" if expected_revision is None else expected_revision,
            ),
            *(
                request.token,
                request.owner,
                request.attempt,
                request.lease_ms,
                request.seed,
                request.start_ms,
            ),
            *(request.known_revision, request.known_head, request.known_create_ms, int(request.follows)),
        ]
        outcome, *values = await self._link.call(self._begin, session_keys(key), args)
        if outcome in (b"BEHIND", b"DIVERGED") and await self._link.look_again():
            outcome, *values = await self._link.call(self._begin, session_keys(key), args)
        if outcome not in (b"OK", b"REPLAY", b"ELSEWHERE", b"CALLED_OFF"):
            if outcome in (b"BEHIND", b"DIVERGED"):
                at = "is behind" if outcome == b"BEHIND" else "has another record at"
                log.error(
                    "%s %s revision %d, which was seen there", self._link.place, at, request.known_revision
                )
            if outcome == b"BEHIND":
                outcome, expected_revision = b"REVISION", request.known_revision
            await self._refuse(key, outcome, values, request.request_id, expected_revision)
        now, fields = int(values[0]), as_fields(values[1])
        row = parse_row(key, fields, now)
        if outcome == b"OK":
            return Began(row, int(fields[b"run_seed"]))
        if outcome == b"REPLAY":
            await self._safe.on_replicas(key, int(values[2]), fields.get(b"sure", b""))
            await self._safe.in_file(key, row.revision, row.head_hash)
            return Replay(row, int(values[2]))
        if outcome == b"CALLED_OFF":
            return CalledOff(row)
        left = 0 if row.running is None else row.running.lease_ms_left
        return RunningElsewhere(row, fields[b"run_owner"].decode(), fields[b"run_attempt"].decode(), left)

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        return only(await self.renew_leases([HeldLease(key, token)], lease_ms))

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        return await renew_all(self._link, self._renew, leases, lease_ms)

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        args = [request_id, order_text(order)]
        outcome, *values = await self._link.call(self._ask_to_end, session_keys(key), args)
        if outcome != b"OK":
            await self._refuse(key, outcome, values)
        return bool(int(values[0]))

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        args, _ = await all_ended(
            self._record_args(key, record, fingerprint, counts), self._index.mark(key, markings(record))
        )
        reply = await self._append(self._commit, key, [token, *args])
        return await self._entered(key, reply, request_id=record.request_id, offered=record.revision)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        await self._link.call(self._abort, session_keys(key), [token, int(called_off)])

    async def apply(
        self,
        key: Key,
        fingerprint: str,
        record: Record,
        counts: Counts,
        *,
        expected_revision: int | None = None,
        rests: Sequence[Record] = (),
    ) -> SessionRow:
        args = await self._record_args(key, record, fingerprint, counts)
        args.insert(0, "" if expected_revision is None else expected_revision)
        left = [store_rest(one) for one in rests]
        reply = await self._append(
            self._apply, key, [*args, len(left), *(word for one in left for word in one)]
        )
        row = await self._entered(
            key, reply, request_id=record.request_id, expected=expected_revision, offered=record.revision
        )
        if left:
            try:
                await self._index.unmark(key, {one.revision for one in left})
            except (Unavailable, DataLoss) as error:
                # They are digests, and hints: the turn is not shown to who finds it by them.
                log.warning("what erased turns were found by stays in the index: %s", error)
        return row

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        args = ["" if expected_revision is None else expected_revision, TOMBSTONE_MS]
        outcome, *values = await self._acknowledged.change(self._delete, key, args)
        if outcome == b"NOT_FOUND" and allow_missing:
            await self._link.check_marker()
        elif outcome not in (b"OK", b"DELETED"):
            await self._refuse(key, outcome, values, expected=expected_revision)
        else:
            await self._link.confirm(session_keys(key), 0, "")
        self._acknowledged.erased(key, *(values if outcome == b"OK" else ()))
        await self._index.remove(key)

    async def forget(self, key: Key, head_hash: str) -> None:
        outcome, *values = await self._acknowledged.change(self._forget, key, [head_hash])
        if outcome == b"DELETED":
            return
        if outcome == b"NOT_FOUND":
            # A try whose reply was lost may have removed it. The listing is corrected when it is read.
            await self._link.check_marker()
            return
        if outcome != b"OK":
            await self._refuse(key, outcome, values)
        now, number, update_ms = values
        await self._link.confirm(session_keys(key), 0, head_hash)
        self._acknowledged.erased(key, now, number)
        await self._index.remove_old(key, int(update_ms))

    async def mark_damaged(self, key: Key) -> None:
        outcome, *values = await self._link.call(self._damage, session_keys(key), [])
        if outcome != b"OK":
            await self._refuse(key, outcome, values)

    async def purge_expired(self) -> int:
        """Redis drops expired sessions by itself; this drops what is left of them in the listings."""
        return await self._index.purge()

    async def _slice(
        self, key: Key, after_revision: int, head_hash: str, limit: int, *, requests: bool
    ) -> tuple[LogSlice, Fields]:
        """A slice of the log, and the map of all request ids if it is asked for."""
        args = [after_revision, limit, SLICE_BYTES, int(requests)]
        outcome, *values = await self._link.call(self._read, session_keys(key), args)
        if outcome != b"OK":
            await self._refuse(key, outcome, values)
        fields = as_fields(values[1])
        async with marking_damage(self, key):
            row = read_row(key, fields, int(values[0]))
            logged = read_log(
                *(key, row, parse_log(values[2])),
                after_revision=after_revision,
                head_hash=head_hash,
                limit=limit,
            )
        await self._safe.shown(row, fields)
        return LogSlice(row, tuple(logged)), as_fields(values[3])

    async def _record_args(self, key: Key, record: Record, fingerprint: str, counts: Counts) -> list[Any]:
        """``record`` encoded on the head that the log has now; the script checks that it still has it."""
        head = await self._link.command("HGET", session_keys(key)[0], "head_hash")
        base = "" if head is None else head.decode()
        return append_args(record, fingerprint, base, store_record(record, base), counts)

    async def _append(self, script: Any, key: Key, args: list[Any]) -> list[Any]:
        try:
            return await self._acknowledged.change(script, key, args)
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            await self.mark_damaged(key)  # the stream holds records that the row does not know
            raise DataLoss("the session's log is ahead of its row", reason="HISTORY_CORRUPT") from error

    async def _entered(
        self,
        key: Key,
        reply: list[Any],
        *,
        request_id: str = "",
        expected: int | None = None,
        offered: int = 0,
    ) -> SessionRow:
        """The row of an "OK" reply, entered in the listing; else raises what the reply says."""
        outcome, *values = reply
        if outcome != b"OK":
            await self._refuse(key, outcome, values, request_id, expected, offered)
        fields = as_fields(values[1])
        row = parse_row(key, fields, int(values[0]))
        await all_ended(self._safe.made(row), self._list(row, fields))
        self._acknowledged.made(row, *values[::2])
        return row

    async def _list(self, row: SessionRow, fields: Fields) -> None:
        try:
            await self._index.enter(row, fields)
        except (Unavailable, DataLoss) as error:
            # The change is made; the listing is corrected when it is read.
            log.warning("the listing of sessions was not updated: %s", error)

    async def _refuse(
        self,
        key: Key,
        outcome: bytes,
        values: list[Any],
        request_id: str = "",
        expected: int | None = None,
        offered: int = 0,
    ) -> NoReturn:
        """Raise the error that a script's outcome stands for."""
        if outcome == b"NOT_FOUND":
            await self._link.check_marker()
            if await self._acknowledged.is_lost(key, values[0]):
                raise _refusals.lost()
        raise refusal(key, outcome, values, request_id, expected, offered)
