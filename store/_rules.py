"""The decision of each operation, as pure functions over a session's metadata.

``memory_store`` and ``sqlite_store`` run these inside a transaction; the Lua scripts of ``redis_store`` state
the same order of checks, and one test suite covers all three. Expiry uses the wall clock, leases the
monotonic clock: one process owns such a store and expires its predecessor's leases when it starts.

A lapsed lease is not removed. Until another turn takes it, its holder may still commit, because nothing can
have been appended in between; and its seed serves a retry of the same request. It ends when a caller asks for the
turn's end: that caller takes the turn for gone.

The states of a session's lease. The holder is the caller that has the token::

    state        by the holder                    by others
    none                                          begin → held
    held         renew → held                     begin: RunningElsewhere or busy → held
                 commit, abort → none             ask_to_end: order stored → held
                 abort, called off → called off   apply, forget: busy → held
                                                  delete → none; time runs out → lapsed
    lapsed       renew → held                     begin → held by the new turn; a retry keeps its seed
                 commit, abort → none             apply → none
                                                  ask_to_end → called off; to keep output: void
    void                                          as lapsed; no caller has its token
    called off                                    begin that follows: CalledOff → called off
                                                  begin → held; apply → none

A store that one process owns expires every lease when it is opened (``expire_lease``). The Lua scripts of
``redis_store`` make the same transitions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pensieve.errors import PensieveError
from pensieve.store import _refusals
from pensieve.store._codec import StoredRecord
from pensieve.store.contract import (
    Began,
    BeginOutcome,
    BeginRequest,
    CalledOff,
    Counts,
    EndOrder,
    Key,
    RenewalAnswer,
    Renewed,
    Replay,
    RunningElsewhere,
)
from pensieve.store.records import Record, RecordKind, RunningTurn, SessionConfig, SessionRow, State


class Moment(NamedTuple):
    wall_ms: int
    """Since the epoch, for times that outlive the process: changes and expiry."""
    steady_ms: int
    """This process's monotonic clock, for leases: a step of the wall clock must not end or prolong them."""


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_clock_ms() -> int:
    """Return ms since some moment before this process. Never steps; means nothing to another process."""
    return time.monotonic_ns() // 1_000_000


TOMBSTONE_MS = 30 * 24 * 3600 * 1000
"""How long a deleted session's id answers SESSION_DELETED and cannot be reused."""


class Lease(msgspec.Struct, frozen=True):
    """The turn that was begun last and is neither committed nor aborted."""

    request_id: str
    fingerprint: str
    token: str
    owner: str
    attempt: str
    seed: int
    start_ms: int
    until_ms: int
    """Ms on the monotonic clock of the process that owns the store; 0: lapsed."""
    order: EndOrder | None = None
    """Left by another server for the holder."""
    followed: bool = False
    """A caller at another server waits for the turn; the holder has not learned of it yet."""
    called_off: bool = False
    """The turn was discarded on request; the lease has lapsed."""


class Meta(msgspec.Struct, frozen=True):
    """All that is stored of a session besides its log and request ids."""

    row: SessionRow
    """``running`` is None here; ``view`` derives it from the lease."""
    create_fingerprint: str
    lease: Lease | None = None


class CommittedRequest(NamedTuple):
    """A request id that was committed."""

    fingerprint: str
    revision: int


def view(meta: Meta, now: Moment) -> SessionRow:
    """Return the row as callers see it: a lapsed lease is not a running turn."""
    lease = meta.lease
    if lease is None or lease.until_ms <= now.steady_ms:
        return meta.row
    running = RunningTurn(
        request_id=lease.request_id,
        owner=lease.owner,
        attempt=lease.attempt,
        lease_ms_left=lease.until_ms - now.steady_ms,
        start_ms=lease.start_ms,
    )
    return msgspec.structs.replace(meta.row, running=running)


def is_gone(meta: Meta | None, now: Moment) -> bool:
    """Whether session and tombstone have expired. A session whose lease is held is not idle, so it never has."""
    if meta is None:
        return True
    if meta.lease is not None and meta.lease.until_ms > now.steady_ms:
        return False
    return 0 < meta.row.expire_ms <= now.wall_ms


def require_present(meta: Meta | None, now: Moment) -> Meta:
    """Raise NotFound unless the session exists."""
    if meta is None:
        raise _refusals.not_found()
    if is_gone(meta, now):
        raise _refusals.expired()
    if meta.row.state is State.DELETED:
        raise _refusals.deleted()
    return meta


def ttl_ms(config: SessionConfig) -> int:
    """0: never expires."""
    return round(config.ttl_s * 1000)


def expiry(config: SessionConfig, now: Moment) -> int:
    """Ms; 0: never."""
    ttl = ttl_ms(config)
    return now.wall_ms + ttl if ttl else 0


def create(
    meta: Meta | None, key: Key, row: SessionRow, record: Record, fingerprint: str, now: Moment
) -> Meta | None:
    """Return the new session's metadata without ``head_hash``, or None if the same request created it before."""
    check_first(record)
    if meta is not None and not is_gone(meta, now):
        if meta.row.state is State.DELETED:
            raise _refusals.deleted()
        if meta.create_fingerprint not in ("", fingerprint):  # "": lost with a damaged row
            raise _refusals.session_exists(key)
        return None
    fresh = msgspec.structs.replace(
        row,
        tenant=key.tenant,
        session_id=key.session_id,
        state=State.ACTIVE,
        revision=1,
        head_hash="",
        create_ms=now.wall_ms,
        update_ms=now.wall_ms,
        expire_ms=expiry(row.config, now),
        running=None,
    )
    return Meta(fresh, fingerprint)


def check_commit(
    meta: Meta | None,
    known: CommittedRequest | None,
    token: str,
    fingerprint: str,
    record: Record,
    now: Moment,
) -> bool:
    """Whether ``record`` is to be appended: its request id was not committed before. Raises as ``commit`` does."""
    meta = require_present(meta, now)
    if known is not None:
        check_same_request(known, record.request_id, fingerprint)
        return False
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if (
        not token
        or meta.lease is None
        or meta.lease.token != token
        or record.revision != meta.row.revision + 1
    ):
        raise _refusals.fenced()
    return True


def check_apply(
    meta: Meta | None,
    known: CommittedRequest | None,
    fingerprint: str,
    record: Record,
    expected_revision: int | None,
    now: Moment,
) -> bool:
    """Like ``check_commit``, without a lease. The order of checks is that of ``begin``."""
    meta = require_present(meta, now)
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if known is not None:
        check_same_request(known, record.request_id, fingerprint)
        return False
    if meta.lease is not None and meta.lease.until_ms > now.steady_ms:
        raise _refusals.busy(meta.lease.request_id, meta.lease.until_ms - now.steady_ms)
    check_revision(meta, expected_revision)
    if record.revision != meta.row.revision + 1:
        raise _refusals.not_next(meta.row.revision, record.revision)
    return True


def check_replaces(rest: StoredRecord, head_hash: str, meta: Meta) -> None:
    """Raise RevisionMismatch unless ``rest`` is the erased form of the record stored in its place."""
    if rest.head_hash != head_hash:
        raise _refusals.not_next(meta.row.revision, meta.row.revision)


def delete(
    meta: Meta | None, key: Key, expected_revision: int | None, allow_missing: bool, now: Moment
) -> Meta | None:
    """Return the tombstone, or None if there is nothing to do. A running turn loses its session."""
    if meta is not None and not is_gone(meta, now):
        if meta.row.state is State.DELETED:
            return None
        check_revision(meta, expected_revision)
        tombstone = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            state=State.DELETED,
            revision=meta.row.revision,
            update_ms=now.wall_ms,
            expire_ms=now.wall_ms + TOMBSTONE_MS,
        )
        return Meta(tombstone, "")
    if allow_missing:
        return None
    raise _refusals.not_found() if meta is None else _refusals.expired()


def check_forget(meta: Meta | None, head_hash: str, now: Moment) -> bool:
    """Whether there is a session to remove without a trace. Raises as ``HistoryStore.forget``."""
    if meta is None or is_gone(meta, now) or meta.row.state is State.DELETED:
        return False
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if meta.lease is not None and meta.lease.until_ms > now.steady_ms:
        raise _refusals.busy(meta.lease.request_id, meta.lease.until_ms - now.steady_ms)
    if meta.row.head_hash != head_hash:
        raise _refusals.other_head(meta.row.revision)
    return True


def check_first(record: Record) -> None:
    """Raise ValueError unless ``record`` can start a session."""
    if record.revision != 1 or record.kind is not RecordKind.CREATE:
        raise ValueError("a session starts with a CREATE record of revision 1")


def check_same_request(known: CommittedRequest, request_id: str, fingerprint: str) -> None:
    """Raise AlreadyExists (REQUEST_ID_REUSED) if the id was used for another request.

    A repaired id has no fingerprint: its committed turn answers any request.
    """
    if known.fingerprint not in ("", fingerprint):
        raise _refusals.request_reused(request_id)


def check_revision(meta: Meta, expected: int | None) -> None:
    """Raise RevisionMismatch, or DataLoss if the store is behind."""
    if expected is not None and expected != meta.row.revision:
        raise _refusals.wrong_revision(meta.row.revision, expected)


def check_reached(row: SessionRow, known_revision: int) -> None:
    """Raise DataLoss (HISTORY_REGRESSED) if the session has not reached a revision that was seen."""
    if known_revision > row.revision:
        raise _refusals.wrong_revision(row.revision, known_revision)


def extend_expiry(row: SessionRow, until_ms: int) -> SessionRow:
    """Extend the row's expiry: a session does not expire while a turn runs."""
    if 0 < row.expire_ms < until_ms:
        return msgspec.structs.replace(row, expire_ms=until_ms)
    return row


def after_append(meta: Meta, record: Record, counts: Counts, now: Moment) -> Meta:
    """Return the metadata after ``record``, without its ``head_hash``."""
    row = meta.row
    config = record.config if record.config is not None else row.config
    after = msgspec.structs.replace(
        row,
        revision=record.revision,
        head_item=counts.head_item,
        item_count=counts.item_count,
        context_tokens=counts.context_tokens,
        config=config,
        labels=record.labels if record.labels is not None else row.labels,
        update_ms=max(now.wall_ms, row.update_ms),
        expire_ms=expiry(config, now),
    )
    return Meta(after, meta.create_fingerprint, None)


def with_head_hash(meta: Meta, head_hash: str) -> Meta:
    """Return ``meta`` with the chain hash of its newest record, which only the log's writer knows."""
    return msgspec.structs.replace(meta, row=msgspec.structs.replace(meta.row, head_hash=head_hash))


def with_damaged_state(meta: Meta) -> Meta:
    return msgspec.structs.replace(meta, row=msgspec.structs.replace(meta.row, state=State.DAMAGED))


class BeginDecision(NamedTuple):
    """The outcome of ``begin`` and the metadata to store, or None if nothing changes."""

    outcome: BeginOutcome
    meta: Meta | None


def begin(
    meta: Meta | None,
    known: CommittedRequest | None,
    request: BeginRequest,
    now: Moment,
    *,
    hash_there: str = "",
) -> BeginDecision:
    """Take the lease or explain the refusal. Order of checks: see ``HistoryStore.begin``.

    ``hash_there``: the log's chain hash at the request's ``known_revision``, "" if it was not looked up.
    """
    meta = require_present(meta, now)
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if known is not None:
        check_same_request(known, request.request_id, request.fingerprint)
        return BeginDecision(Replay(view(meta, now), known.revision), None)
    check_not_regressed(meta, request, hash_there)
    lease = meta.lease
    if lease is not None:
        if lease.token == request.token:  # the same call, repeated
            return BeginDecision(Began(view(meta, now), lease.seed), None)
        if lease.until_ms > now.steady_ms:
            answer = _answer_running_turn(meta, lease, request, now)
            if not request.follows or lease.followed:
                return BeginDecision(answer, None)
            followed = msgspec.structs.replace(lease, followed=True)
            return BeginDecision(answer, msgspec.structs.replace(meta, lease=followed))
        if request.follows and lease.called_off and lease.request_id == request.request_id:
            return BeginDecision(CalledOff(view(meta, now)), None)
    check_revision(meta, request.expected_revision)
    seed = request.seed
    if lease is not None and (lease.request_id, lease.fingerprint) == (
        request.request_id,
        request.fingerprint,
    ):
        seed = lease.seed
    taken = Lease(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        token=request.token,
        owner=request.owner,
        attempt=request.attempt,
        seed=seed,
        start_ms=request.start_ms,
        until_ms=now.steady_ms + request.lease_ms,
    )
    after = Meta(extend_expiry(meta.row, now.wall_ms + request.lease_ms), meta.create_fingerprint, taken)
    return BeginDecision(Began(view(after, now), seed), after)


def _answer_running_turn(meta: Meta, lease: Lease, request: BeginRequest, now: Moment) -> RunningElsewhere:
    remaining_ms = lease.until_ms - now.steady_ms
    if lease.request_id != request.request_id:
        raise _refusals.busy(lease.request_id, remaining_ms)
    if lease.fingerprint != request.fingerprint:
        raise _refusals.request_reused(request.request_id)
    return RunningElsewhere(view(meta, now), lease.owner, lease.attempt, remaining_ms)


def renew(meta: Meta | None, token: str, lease_ms: int, now: Moment) -> tuple[Renewed, Meta]:
    """Return the holder's messages and metadata with a longer lease. Raises TurnFenced."""
    meta = require_present(meta, now)
    lease = meta.lease
    if lease is None or lease.token != token:
        raise _refusals.fenced()
    after = msgspec.structs.replace(lease, until_ms=now.steady_ms + lease_ms, followed=False)
    renewed = Renewed(lease.order, lease.followed)
    return renewed, Meta(extend_expiry(meta.row, now.wall_ms + lease_ms), meta.create_fingerprint, after)


def single_answer(answers: Sequence[RenewalAnswer]) -> Renewed:
    """Return the only answer, or raise it."""
    (answer,) = answers
    if isinstance(answer, PensieveError):
        raise answer
    return answer


def ask_to_end(meta: Meta | None, request_id: str, order: EndOrder, now: Moment) -> tuple[bool, Meta | None]:
    """Return whether the order, or an earlier one, waits for the holder, and the metadata to store, if any."""
    meta = require_present(meta, now)
    lease = meta.lease
    if lease is None or lease.request_id != request_id:
        return False, None
    if lease.until_ms > now.steady_ms:
        after = msgspec.structs.replace(lease, order=lease.order or order)
    else:
        off = lease.called_off or not order.keep
        after = msgspec.structs.replace(lease, token="", until_ms=0, called_off=off)
    return lease.until_ms > now.steady_ms, msgspec.structs.replace(meta, lease=after)


def abort(meta: Meta | None, token: str, called_off: bool) -> Meta | None:
    """Return metadata with the lease removed or marked as called off; None if ``token`` does not hold it."""
    lease = None if meta is None else meta.lease
    if meta is None or lease is None or lease.token != token:
        return None
    mark = msgspec.structs.replace(lease, token="", until_ms=0, called_off=True) if called_off else None
    return msgspec.structs.replace(meta, lease=mark)


def expire_lease(meta: Meta) -> Meta:
    """Expire the lease of a turn that died with the previous process. Its seed stays for a retry."""
    if meta.lease is None:
        return meta
    return msgspec.structs.replace(meta, lease=msgspec.structs.replace(meta.lease, until_ms=0))


def check_not_regressed(meta: Meta, request: BeginRequest, hash_there: str) -> None:
    """Raise DataLoss (HISTORY_REGRESSED) if the store lacks what the caller has seen."""
    row = meta.row
    if request.known_create_ms and request.known_create_ms != row.create_ms:
        return
    check_reached(row, request.known_revision)
    there = row.head_hash if request.known_revision == row.revision else hash_there
    if request.known_head and there and request.known_head != there:
        raise _refusals.diverged(request.known_revision)
