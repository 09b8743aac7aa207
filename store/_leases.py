"""The lease of a running turn: taking, renewing, following and ending it. Pure functions.

The states of a session's lease. The holder is the caller that has the token::

    state        by the holder                    by others
    none                                          begin → held
    held         renew → held                     begin: RunningElsewhere or busy → held
                 commit, abort → none             ask_to_end: order stored → held
                 abort, called off → called off   apply, forget: busy → held
                                                  delete → none; time runs out → lapsed
    lapsed       renew → held                     begin → held by the new turn; a retry keeps its seed
                 commit, abort → none             apply → none
    called off                                    begin that follows: CalledOff → called off
                                                  begin → held; apply → none

A store that one process owns expires every lease when it is opened (``expire_lease``). The Lua scripts of
``redis_store`` make the same transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pensieve.errors import PensieveError
from pensieve.store import _refusals
from pensieve.store._rules import (
    CommittedRequest,
    Lease,
    Meta,
    Moment,
    check_reached,
    check_revision,
    check_same_request,
    extend_expiry,
    require_present,
    view,
)
from pensieve.store.contract import (
    Began,
    BeginOutcome,
    BeginRequest,
    CalledOff,
    EndOrder,
    RenewalAnswer,
    Renewed,
    Replay,
    RunningElsewhere,
)
from pensieve.store.records import State


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


def ask_to_end(meta: Meta | None, request_id: str, order: EndOrder, now: Moment) -> Meta | None:
    """Return metadata with the order, or with an earlier one; None if no such turn runs."""
    meta = require_present(meta, now)
    lease = meta.lease
    if lease is None or lease.request_id != request_id or lease.until_ms <= now.steady_ms:
        return None
    return msgspec.structs.replace(meta, lease=msgspec.structs.replace(lease, order=lease.order or order))


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
