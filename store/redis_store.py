"""History in Redis, for any number of servers. As durable as Redis is configured to be.

Each operation is one Lua script over one session's keys (``_redis.scripts``), idempotent, so that the client
library may resend it when a reply was lost. A commit carries the chain hash it was computed on; the script
refuses it if the log has another head. Time is the Redis server's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

from redis.exceptions import ResponseError

from pensieve.errors import DataLoss, FailedPrecondition, NotFound, PensieveError, Unavailable
from pensieve.store import _refusals
from pensieve.store._codec import (
    SLICE_BYTES,
    make_erased_record,
    make_stored_record,
    marking_damage,
    read_all_slices,
    read_log,
)
from pensieve.store._listing import found_by, mark_entries, may_be_about
from pensieve.store._redis import scripts
from pensieve.store._redis.acknowledged import AcknowledgedChanges, DurableHeads
from pensieve.store._redis.clients import gather_all
from pensieve.store._redis.dump import RedisDump
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.rows import (
    BATCH,
    Fields,
    RedisIndex,
    append_args,
    as_fields,
    check_requests,
    create_fields,
    damaged_row,
    order_text,
    parse_log,
    parse_order,
    parse_row,
    read_row,
    session_keys,
)
from pensieve.store._rules import TOMBSTONE_MS, check_first, single_answer
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

RENEW_BATCH: Final = 500
"""Calls per round trip; other requests to that server wait some ms meanwhile."""
MAX_BEGUN: Final = 16_384
"""Turns whose base hash is remembered; others fetch it again when they commit."""


class RedisStore:
    """``HistoryStore`` over one Redis database."""

    def __init__(self, link: RedisLink, on_regression: Callable[[], None] = lambda: None) -> None:
        self._link = link
        self._acknowledged = AcknowledgedChanges(link, on_regression)
        self._index = RedisIndex(link)
        self._safe = DurableHeads(link)
        self._begun: OrderedDict[tuple[Key, str], str] = OrderedDict()
        """(session, token) → chain hash that the turn continues, so that a commit need not fetch the head. An
        append ends the lease, so the hash stays valid while the token holds it."""

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        on_error: Callable[[], None] = lambda: None,
        on_regression: Callable[[], None] = lambda: None,
    ) -> RedisStore:
        """Parse the forms of ``_redis.address.parse_address``. Raises ValueError on others."""
        return cls(RedisLink(url, on_error=on_error), on_regression)

    def dump(self) -> RedisDump:
        """Return raw access for maintenance, instead of ``open``."""
        return RedisDump(self._link)

    @property
    def durability(self) -> str:
        """``replicated(n)`` if the URL asks for replicas, else the weakest server's durability.

        ``fsync`` (AOF, always), ``local`` (AOF, every second), ``none`` (no AOF), or ``unknown`` if CONFIG or
        INFO is forbidden.
        """
        return self._link.durability

    @property
    def store_id(self) -> str:
        return self._link.store_id

    @property
    def remnants(self) -> str:
        return (
            f"the files of the Redis at {self._link.address} and of its replicas keep erased content until they are "
            "rewritten: BGREWRITEAOF for the append-only file, BGSAVE for the dump"
        )

    async def open(self) -> None:
        try:
            await self._link.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._link.close()

    async def ping(self) -> None:
        """Write a probe, so that a read-only Redis is noticed; also check for lost changes."""
        await self._link.ping()
        await self._acknowledged.check_for_regression(count_errors=False)

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        check_first(record)
        key = Key(row.tenant, row.session_id)
        await self._link.check_marker()
        await self._index.announce(key)
        stored = make_stored_record(record, "")
        args = [fingerprint, stored.data, stored.crc, stored.head_hash, *create_fields(row)]
        reply = await self._acknowledged.change(scripts.CREATE, key, args)
        return await self._finish_change(key, reply)

    async def load(self, key: Key, *, known_revision: int = 0) -> SessionRow:
        values = await self._call(scripts.LOAD, key, [known_revision])
        fields = as_fields(values[1])
        async with marking_damage(self, key):
            row = read_row(key, fields, int(values[0]))
        await self._safe.confirm_read(row, fields)
        return row

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page:
        await self._link.check_marker()
        return await self._index.page(tenant, limit=limit, cursor=cursor, labels=labels)

    async def find_subject(self, tenant: str, subject: str) -> list[SessionRow]:
        await self._link.check_marker()
        found, deleted = list[SessionRow](), list[Key]()
        keys = await self._index.stored_keys(tenant)
        for begin in range(0, len(keys), BATCH):
            some = keys[begin : begin + BATCH]
            replies = await self._link.commands([("HGETALL", session_keys(key)[0]) for key in some])
            for key, reply in zip(some, replies, strict=True):
                if _is_deleted(reply):
                    deleted.append(key)
                    continue
                row = await self._row_or_damaged(key, reply)
                if row is not None and may_be_about(row, subject):
                    found.append(row)
        # What waits for one deletion waits for all that were made before on its server.
        servers = await self._link.servers_of([session_keys(key)[0] for key in deleted])
        for key in dict(zip(servers, deleted, strict=True)).values():
            await self._safe.confirm_deletion(key)
        return found

    async def _row_or_damaged(self, key: Key, reply: Any) -> SessionRow | None:
        """Return the row in HGETALL's ``reply``; None for a session that is gone. Reads a dubious one again."""
        fields = {} if isinstance(reply, Exception) else as_fields(reply)
        try:
            return read_row(key, fields, 0) if fields else await self.load(key)
        except NotFound:
            return None
        except DataLoss:
            return damaged_row(key, 0)

    async def usage(self, tenant: str) -> TenantUsage:
        return await self._index.usage(tenant)

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        requests: Fields = {}
        known_to = 0

        async def fetch(after_revision: int, head_hash: str) -> LogSlice:
            nonlocal requests, known_to
            begins = after_revision == 0
            piece, asked = await self._read_slice(
                key, after_revision, head_hash, SLICE_RECORDS, requests=begins
            )
            if begins:
                requests, known_to = asked, piece.row.revision
            async with marking_damage(self, key):
                check_requests(
                    key, requests, (one for one in piece.records if one.record.revision <= known_to)
                )
            return piece

        return await read_all_slices(fetch, after_revision, head_hash)

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        piece, _ = await self._read_slice(key, after_revision, head_hash, limit, requests=False)
        return piece

    async def find_request(self, key: Key, request_id: str) -> int | None:
        primary = self._link.primary
        values = await self._call(scripts.FIND, key, [request_id])
        if not values[0] and await self._link.has_moved(primary):
            values = await self._call(scripts.FIND, key, [request_id])
        if not values[0]:
            return None
        await self._safe.confirm_request(key, int(values[0]), values[1], (int(values[2]), values[3].decode()))
        return int(values[0])

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        return await self._index.marked(tenant, found_by(mark, answer), limit)

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        expected_revision = request.expected_revision
        args = [
            *(request.request_id, request.fingerprint),
            "" if expected_revision is None else expected_revision,
            *(request.token, request.owner, request.attempt),
            *(request.lease_ms, request.seed, request.start_ms),
            *(request.known_revision, request.known_head, request.known_create_ms, int(request.follows)),
        ]
        outcome, *values = await self._ask(
            lambda: self._link.call(scripts.BEGIN, session_keys(key), args), expected_revision
        )
        if outcome not in (b"OK", b"REPLAY", b"ELSEWHERE", b"CALLED_OFF"):
            if outcome in (b"BEHIND", b"DIVERGED"):
                at = "is behind" if outcome == b"BEHIND" else "has another record at"
                log.error(
                    "%s %s revision %d, which this server or its client has seen there",
                    self._link.address,
                    at,
                    request.known_revision,
                )
            await self._raise_refusal(key, outcome, values, request.request_id, expected_revision)
        now, fields = int(values[0]), as_fields(values[1])
        row = parse_row(key, fields, now)
        if outcome == b"OK":
            self._begun[key, request.token] = row.head_hash
            if len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)
            return Began(row, int(fields[b"run_seed"]))
        if outcome == b"REPLAY":
            head = row.revision, row.head_hash
            await self._safe.confirm_request(key, int(values[2]), fields.get(b"sure", b""), head)
            return Replay(row, int(values[2]))
        if outcome == b"CALLED_OFF":
            return CalledOff(row)
        left = 0 if row.running is None else row.running.lease_ms_left
        return RunningElsewhere(row, fields[b"run_owner"].decode(), fields[b"run_attempt"].decode(), left)

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        return single_answer(await self.renew_leases([HeldLease(key, token)], lease_ms))

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        return await renew_all(self._link, leases, lease_ms)

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        args = [request_id, order_text(order), int(order.keep)]
        (waits,) = await self._call(scripts.ASK_TO_END, key, args)
        return bool(int(waits))

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        known = self._begun.get((key, token))
        args, _ = await gather_all(
            self._record_args(key, record, fingerprint, counts, known),
            self._index.mark(key, mark_entries(record)),
        )
        reply = await self._append(scripts.COMMIT, key, [token, *args])
        self._begun.pop((key, token), None)
        return await self._finish_change(key, reply, request_id=record.request_id, offered=record.revision)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        self._begun.pop((key, token), None)
        await self._link.call(scripts.ABORT, session_keys(key), [token, int(called_off)])

    async def apply(
        self,
        key: Key,
        fingerprint: str,
        record: Record,
        counts: Counts,
        *,
        expected_revision: int | None = None,
        erased_records: Sequence[Record] = (),
    ) -> SessionRow:
        args = await self._record_args(key, record, fingerprint, counts)
        head_hash = args[6]
        args.insert(0, "" if expected_revision is None else expected_revision)
        stored = [make_erased_record(one) for one in erased_records]
        reply = await self._append(
            *(scripts.APPLY, key, [*args, len(stored), *(word for one in stored for word in one)]),
            expected_revision,
        )
        row = await self._finish_change(
            key, reply, request_id=record.request_id, expected=expected_revision, offered=record.revision
        )
        # A request that is repeated after further turns names them as well, and erases nothing.
        if stored and row.head_hash == head_hash:
            try:
                await self._index.unmark(key, {one.revision for one in stored})
            except (Unavailable, DataLoss, FailedPrecondition) as error:
                # The entries are digests and only hints: ``find_marked``'s caller reads the record.
                log.warning("the marks of erased turns stay in the index: %s", error)
        return row

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        args = ["" if expected_revision is None else expected_revision, TOMBSTONE_MS]
        outcome, *values = await self._ask(
            lambda: self._acknowledged.change(scripts.DELETE, key, args), expected_revision
        )
        if outcome == b"NOT_FOUND" and allow_missing:
            await self._link.check_marker()
        elif outcome not in (b"OK", b"DELETED"):
            await self._raise_refusal(key, outcome, values, expected=expected_revision)
        else:
            await self._link.confirm(session_keys(key), 0, "")
        self._acknowledged.record_erasure(key, *(values if outcome == b"OK" else ()))
        await self._index.remove(key)

    async def forget(self, key: Key, head_hash: str) -> None:
        outcome, *values = await self._acknowledged.change(scripts.FORGET, key, [head_hash])
        if outcome == b"DELETED":
            await self._safe.confirm_deletion(key)
            return
        if outcome == b"NOT_FOUND":
            # An earlier attempt whose reply was lost may have removed it. Reading the listing corrects it.
            await self._link.check_marker()
            return
        if outcome != b"OK":
            await self._raise_refusal(key, outcome, values)
        now, number, update_ms = values
        await self._link.confirm(session_keys(key), 0, head_hash)
        self._acknowledged.record_erasure(key, now, number)
        await self._index.remove_old(key, int(update_ms))

    async def mark_damaged(self, key: Key) -> None:
        await self._call(scripts.DAMAGE, key, [])

    async def purge_expired(self) -> int:
        """Purge the listings; Redis itself expires the sessions."""
        return await self._index.purge()

    async def _call(self, script: str, key: Key, args: list[Any]) -> list[Any]:
        """Return the values of an "OK" reply; else raise the reply's error."""
        outcome, *values = await self._ask(lambda: self._link.call(script, session_keys(key), args))
        if outcome != b"OK":
            await self._raise_refusal(key, outcome, values)
        return values

    async def _ask(
        self, send: Callable[[], Awaitable[list[Any]]], expected_revision: int | None = None
    ) -> list[Any]:
        """Return a script's reply. If it contradicts what a client has seen, the Sentinels are asked for the primary.

        Until Sentinels demote a primary that they have replaced, it answers from a history that ends at the
        fail-over. Raises Unavailable while the replicas do not confirm which server is the primary.
        """
        primary = self._link.primary
        reply = await send()
        is_behind = _is_behind(reply, expected_revision)
        if not is_behind and reply[0] != b"NOT_FOUND":
            return reply
        if await self._link.has_moved(primary):
            reply = await send()
            is_behind = _is_behind(reply, expected_revision)
        if is_behind:
            await self._link.confirm_primary()
        return reply

    async def _read_slice(
        self, key: Key, after_revision: int, head_hash: str, limit: int, *, requests: bool
    ) -> tuple[LogSlice, Fields]:
        """Read a slice of the log, and on request the map of all request ids."""
        args = [after_revision, limit, SLICE_BYTES, int(requests)]
        values = await self._call(scripts.READ, key, args)
        fields = as_fields(values[1])
        async with marking_damage(self, key):
            row = read_row(key, fields, int(values[0]))
            logged = read_log(
                *(key, row, parse_log(values[2])),
                after_revision=after_revision,
                head_hash=head_hash,
                limit=limit,
            )
        await self._safe.confirm_read(row, fields)
        return LogSlice(row, tuple(logged)), as_fields(values[3])

    async def _record_args(
        self, key: Key, record: Record, fingerprint: str, counts: Counts, base: str | None = None
    ) -> list[Any]:
        """Encode ``record`` for the head ``base`` (None: the log's present head). The script checks the head."""
        if base is None:
            head = await self._link.command("HGET", session_keys(key)[0], "head_hash")
            base = "" if head is None else head.decode()
        return append_args(record, fingerprint, base, make_stored_record(record, base), counts)

    async def _append(
        self, script: Any, key: Key, args: list[Any], expected_revision: int | None = None
    ) -> list[Any]:
        try:
            return await self._ask(lambda: self._acknowledged.change(script, key, args), expected_revision)
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            await self.mark_damaged(key)  # the stream holds records that the row does not know
            raise DataLoss("the session's log is ahead of its row", reason="HISTORY_CORRUPT") from error

    async def _finish_change(
        self,
        key: Key,
        reply: list[Any],
        *,
        request_id: str = "",
        expected: int | None = None,
        offered: int = 0,
    ) -> SessionRow:
        """Return the row of an "OK" reply and enter it in the listing; else raise the reply's error."""
        outcome, *values = reply
        if outcome != b"OK":
            await self._raise_refusal(key, outcome, values, request_id, expected, offered)
        fields = as_fields(values[1])
        row = parse_row(key, fields, int(values[0]))
        await gather_all(self._safe.confirm_change(row), self._enter_in_listing(row, fields))
        self._acknowledged.record_change(row, *values[::2])
        return row

    async def _enter_in_listing(self, row: SessionRow, fields: Fields) -> None:
        try:
            await self._index.enter(row, fields)
        except (Unavailable, DataLoss, FailedPrecondition) as error:
            # The change is made; reading the listing corrects it.
            log.warning("the listing of sessions was not updated: %s", error)

    async def _raise_refusal(
        self,
        key: Key,
        outcome: bytes,
        values: list[Any],
        request_id: str = "",
        expected: int | None = None,
        offered: int = 0,
    ) -> NoReturn:
        if outcome == b"NOT_FOUND":
            await self._link.check_marker()
            if await self._acknowledged.is_lost(key, values[0]):
                raise _refusals.lost()
        if outcome == b"DELETED":
            await self._safe.confirm_deletion(key)
        raise error_from_outcome(key, outcome, values, request_id, expected, offered)


def _is_deleted(reply: Any) -> bool:
    """Whether HGETALL's reply is a tombstone."""
    return not isinstance(reply, Exception) and as_fields(reply).get(b"state") == b"deleted"


def _is_behind(reply: list[Any], expected_revision: int | None) -> bool:
    """Whether a script found that its store lacks a record that was seen."""
    if reply[0] == b"REVISION":
        return expected_revision is not None and int(reply[1]) < expected_revision
    return reply[0] in (b"BEHIND", b"DIVERGED")


async def renew_all(link: RedisLink, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
    """``HistoryStore.renew_leases``, one batch per server: a server that is down does not delay others."""
    keys = [session_keys(lease.key) for lease in leases]
    servers = await link.servers_of([some[0] for some in keys])
    by_server: defaultdict[str, list[int]] = defaultdict(list)
    for number, server in enumerate(servers):
        by_server[server].append(number)
    answers: dict[int, RenewalAnswer] = {}

    async def renew_at_one(numbers: list[int]) -> None:
        for first in range(0, len(numbers), RENEW_BATCH):
            some = numbers[first : first + RENEW_BATCH]
            try:
                replies = await link.calls(
                    scripts.RENEW, [(keys[number], [leases[number].token, lease_ms]) for number in some]
                )
            except Unavailable as error:
                answers.update(dict.fromkeys(numbers[first:], error))
                return
            for number, reply in zip(some, replies, strict=True):
                answers[number] = _renewal_answer(leases[number], reply)

    await gather_all(*map(renew_at_one, by_server.values()))
    if any(isinstance(answer, NotFound) for answer in answers.values()):
        await link.check_marker()  # an emptied store proves nothing about its sessions
    return [answers[number] for number in range(len(leases))]


def _renewal_answer(lease: HeldLease, reply: list[Any] | PensieveError) -> RenewalAnswer:
    if isinstance(reply, PensieveError):
        return reply
    outcome, *values = reply
    if outcome != b"OK":
        return error_from_outcome(lease.key, outcome, values)
    return Renewed(parse_order(values[0]), bool(values[1]))


def error_from_outcome(
    key: Key,
    outcome: bytes,
    values: list[Any],
    request_id: str = "",
    expected: int | None = None,
    offered: int = 0,
) -> PensieveError:
    """Return the error for a script's outcome. ``offered``: the revision that was to be appended."""
    match outcome:
        case b"NOT_FOUND":
            return _refusals.not_found()
        case b"DELETED":
            return _refusals.deleted()
        case b"EXISTS":
            return _refusals.session_exists(key)
        case b"DAMAGED":
            return _refusals.damaged()
        case b"REUSED":
            return _refusals.request_reused(request_id)
        case b"BUSY":
            return _refusals.busy(values[0].decode(), int(values[1]))
        case b"BEHIND":
            return _refusals.wrong_revision(*map(int, values))
        case b"REVISION":
            return _refusals.wrong_revision(int(values[0]), expected or 0)
        case b"CORRUPT":
            return _refusals.corrupt(key, int(values[0]), values[1].decode())
        case b"OTHER_HEAD":
            return _refusals.other_head(int(values[0]))
        case b"DIVERGED":
            return _refusals.diverged(int(values[0]))
        case b"NOT_NEXT":
            return _refusals.not_next(int(values[0]), offered)
        case b"FENCED":
            return _refusals.fenced()
    raise AssertionError(f"unknown script outcome {outcome!r}")
