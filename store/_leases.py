"""The lease of a running turn: who may begin one, who is met at it, and what is left for its holder. Pure functions.

A session's lease and what changes it. The holder is the caller that has the token::

    state        by the holder                    by others
    none                                          begin → held
    held         renew → held                     begin: RunningElsewhere or busy → held
                 commit, abort → none             ask_to_end: an order is left → held
                 abort, called off → called off   apply, forget: busy → held
                                                  delete → none; its time passes → lapsed
    lapsed       renew → held                     begin → held by the new turn; the same request keeps its seed
                 commit, abort → none             apply → none
    called off                                    begin by a follower: CalledOff → called off
                                                  begin → held; apply → none

A store that one process owns ends every lease when it is opened: held → lapsed (``lapsed``). The Lua scripts of
``redis_store`` make the same transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pensieve.errors import PensieveError
from pensieve.store import _refusals
from pensieve.store._clock import Moment
from pensieve.store._rules import (
    CommittedRequest,
    Lease,
    Meta,
    check_revision,
    check_same_request,
    kept_until,
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
    """Outcome of ``begin`` and the metadata to store, None when nothing changes."""

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
    """Take the lease, or say why not. Order of checks: exists → state → request id known → went back → busy → revision.

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
        if lease.token == request.token:  # this very call, sent again
            return BeginDecision(Began(view(meta, now), lease.seed), None)
        if lease.until_ms > now.steady_ms:
            met = _met_running(meta, lease, request, now)
            if not request.follows or lease.followed:
                return BeginDecision(met, None)
            heard_of = msgspec.structs.replace(lease, followed=True)
            return BeginDecision(met, msgspec.structs.replace(meta, lease=heard_of))
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
    after = Meta(kept_until(meta.row, now.wall_ms + request.lease_ms), meta.create_fingerprint, taken)
    return BeginDecision(Began(view(after, now), seed), after)


def _met_running(meta: Meta, lease: Lease, request: BeginRequest, now: Moment) -> RunningElsewhere:
    left = lease.until_ms - now.steady_ms
    if lease.request_id != request.request_id:
        raise _refusals.busy(lease.request_id, left)
    if lease.fingerprint != request.fingerprint:
        raise _refusals.request_reused(request.request_id)
    return RunningElsewhere(view(meta, now), lease.owner, lease.attempt, left)


def renew(meta: Meta | None, token: str, lease_ms: int, now: Moment) -> tuple[Renewed, Meta]:
    """The news for the holder, and metadata with a longer lease. Raises TurnFenced when the token lost it."""
    meta = require_present(meta, now)
    lease = meta.lease
    if lease is None or lease.token != token:
        raise _refusals.fenced()
    after = msgspec.structs.replace(lease, until_ms=now.steady_ms + lease_ms, followed=False)
    news = Renewed(lease.order, lease.followed)
    return news, Meta(kept_until(meta.row, now.wall_ms + lease_ms), meta.create_fingerprint, after)


def single_answer(answers: Sequence[RenewalAnswer]) -> Renewed:
    """The answer of the one lease that was asked for. Raises the error that it may be."""
    (answer,) = answers
    if isinstance(answer, PensieveError):
        raise answer
    return answer


def ask_to_end(meta: Meta | None, request_id: str, order: EndOrder, now: Moment) -> Meta | None:
    """Metadata with the order, or with the one that came before it; None when no such turn runs."""
    meta = require_present(meta, now)
    lease = meta.lease
    if lease is None or lease.request_id != request_id or lease.until_ms <= now.steady_ms:
        return None
    return msgspec.structs.replace(meta, lease=msgspec.structs.replace(lease, order=lease.order or order))


def abort(meta: Meta | None, token: str, called_off: bool) -> Meta | None:
    """Metadata without the lease, or with its mark; None when the token does not hold it."""
    lease = None if meta is None else meta.lease
    if meta is None or lease is None or lease.token != token:
        return None
    mark = msgspec.structs.replace(lease, token="", until_ms=0, called_off=True) if called_off else None
    return msgspec.structs.replace(meta, lease=mark)


def expire_lease(meta: Meta) -> Meta:
    """``meta`` at the start of a process: the turn that held the lease is gone, its seed stays for a retry."""
    if meta.lease is None:
        return meta
    return msgspec.structs.replace(meta, lease=msgspec.structs.replace(meta.lease, until_ms=0))


def check_not_regressed(meta: Meta, request: BeginRequest, hash_there: str) -> None:
    """Raises DataLoss (HISTORY_REGRESSED) when the store no longer has what the caller knows it had."""
    row = meta.row
    if request.known_create_ms and request.known_create_ms != row.create_ms:
        return
    if request.known_revision > row.revision:
        raise _refusals.wrong_revision(row.revision, request.known_revision)
    there = row.head_hash if request.known_revision == row.revision else hash_there
    if request.known_head and there and request.known_head != there:
        raise _refusals.diverged(request.known_revision)
