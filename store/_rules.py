"""What each operation decides, as pure functions over a session's metadata; storage is someone else's.

``memory_store`` and ``sqlite_store`` run these inside their own transaction, so the order of checks exists once for
both; the Lua scripts of ``redis_store`` state the same order for Redis, and one test suite holds all three together.
``now`` is always the store's two clocks: expiry goes by the time of day, leases by the monotonic clock. One process
owns such a store, and at its start it ends the leases of the process before it (``_leases.lapsed``).

A lease whose time is over is not removed: until someone else takes it, its holder may still commit (nothing can
have come in between), and its seed is there for a retry of the same request.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pensieve.store import _refusals
from pensieve.store._clock import Moment
from pensieve.store._codec import StoredRecord
from pensieve.store.contract import (
    Counts,
    EndOrder,
    Key,
)
from pensieve.store.records import Record, RecordKind, RunningTurn, SessionConfig, SessionRow, State

TOMBSTONE_MS = 30 * 24 * 3600 * 1000
"""How long a deleted session's id answers SESSION_DELETED and cannot be used again."""


class Lease(msgspec.Struct, frozen=True):
    """The turn that was begun last and is not yet committed or aborted."""

    request_id: str
    fingerprint: str
    token: str
    owner: str
    attempt: str
    seed: int
    start_ms: int
    until_ms: int
    """On the monotonic clock of the process that owns the store; 0: it has lapsed."""
    order: EndOrder | None = None
    """Left for the holder by another server."""
    followed: bool = False
    """Somebody waits for the turn at another server, which the holder has not heard yet."""
    called_off: bool = False
    """The turn was discarded because somebody asked for that; the lease has lapsed."""


class Meta(msgspec.Struct, frozen=True):
    """All that is stored of a session beside its log and its request ids."""

    row: SessionRow
    """``running`` is None here; ``view`` derives it from the lease."""
    create_fingerprint: str
    lease: Lease | None = None


class CommittedRequest(NamedTuple):
    """A request id that was committed before."""

    fingerprint: str
    revision: int


def view(meta: Meta, now: Moment) -> SessionRow:
    """The row as callers see it: a lapsed lease is not a running turn."""
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
    """Whether nothing is left of the session, not even a tombstone that still counts.

    While a turn holds the lease the session is not idle, whatever the time of day has become meanwhile.
    """
    if meta is None:
        return True
    if meta.lease is not None and meta.lease.until_ms > now.steady_ms:
        return False
    return 0 < meta.row.expire_ms <= now.wall_ms


def require_present(meta: Meta | None, now: Moment) -> Meta:
    """The metadata of a session that exists. Raises NotFound."""
    if meta is None:
        raise _refusals.not_found()
    if is_gone(meta, now):
        raise _refusals.expired()
    if meta.row.state is State.DELETED:
        raise _refusals.deleted()
    return meta


def ttl_ms(config: SessionConfig) -> int:
    """Idle lifetime of a session; 0 = it never expires."""
    return round(config.ttl_s * 1000)


def expiry(config: SessionConfig, now: Moment) -> int:
    """When a session idle since ``now`` expires; ms, 0 = never."""
    ttl = ttl_ms(config)
    return now.wall_ms + ttl if ttl else 0


def create(
    meta: Meta | None, key: Key, row: SessionRow, record: Record, fingerprint: str, now: Moment
) -> Meta | None:
    """Metadata of the new session without its ``head_hash``; None when it exists and was created by this call."""
    check_first(record)
    if meta is not None and not is_gone(meta, now):
        if meta.row.state is State.DELETED:
            raise _refusals.deleted()
        if meta.create_fingerprint not in ("", fingerprint):  # "": lost with a row that was damaged
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


def commit(
    meta: Meta | None,
    known: CommittedRequest | None,
    token: str,
    fingerprint: str,
    record: Record,
    counts: Counts,
    now: Moment,
) -> Meta | None:
    """Metadata after the record, without its ``head_hash``; None when this request id was committed before."""
    meta = require_present(meta, now)
    if known is not None:
        check_same_request(known, record.request_id, fingerprint)
        return None
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if (
        not token
        or meta.lease is None
        or meta.lease.token != token
        or record.revision != meta.row.revision + 1
    ):
        raise _refusals.fenced()
    return _appended(meta, record, counts, now)


def apply(
    meta: Meta | None,
    known: CommittedRequest | None,
    fingerprint: str,
    record: Record,
    counts: Counts,
    expected_revision: int | None,
    now: Moment,
) -> Meta | None:
    """Like ``commit``, for a change that takes no lease. The order of checks is that of ``begin``."""
    meta = require_present(meta, now)
    if meta.row.state is State.DAMAGED:
        raise _refusals.damaged()
    if known is not None:
        check_same_request(known, record.request_id, fingerprint)
        return None
    if meta.lease is not None and meta.lease.until_ms > now.steady_ms:
        raise _refusals.busy(meta.lease.request_id, meta.lease.until_ms - now.steady_ms)
    check_revision(meta, expected_revision)
    if record.revision != meta.row.revision + 1:
        raise _refusals.not_next(meta.row.revision, record.revision)
    return _appended(meta, record, counts, now)


def check_place(rest: StoredRecord, head_hash: str, meta: Meta) -> None:
    """Raises RevisionMismatch unless ``rest`` is left of the record whose chain hash is stored in its place."""
    if rest.head_hash != head_hash:
        raise _refusals.not_next(meta.row.revision, meta.row.revision)


def delete(
    meta: Meta | None, key: Key, expected_revision: int | None, allow_missing: bool, now: Moment
) -> Meta | None:
    """The tombstone; None when there is nothing to do. A running turn does not stop it: that turn loses its session."""
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
    """Whether there is a session to remove without a trace. Raises what ``HistoryStore.forget`` does."""
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
    """Raises ValueError unless ``record`` can start a session: the caller's mistake, not the client's."""
    if record.revision != 1 or record.kind is not RecordKind.CREATE:
        raise ValueError("a session starts with a CREATE record of revision 1")


def check_same_request(known: CommittedRequest, request_id: str, fingerprint: str) -> None:
    """Raises AlreadyExists (REQUEST_ID_REUSED) when the id was used for something else.

    An id that a repair has found again has no fingerprint: what was committed under it is the answer to anything.
    """
    if known.fingerprint not in ("", fingerprint):
        raise _refusals.request_reused(request_id)


def check_revision(meta: Meta, expected: int | None) -> None:
    """Raises RevisionMismatch, or DataLoss when the store is behind."""
    if expected is not None and expected != meta.row.revision:
        raise _refusals.wrong_revision(meta.row.revision, expected)


def kept_until(row: SessionRow, until_ms: int) -> SessionRow:
    """A session does not expire under a running turn: it is not idle."""
    if 0 < row.expire_ms < until_ms:
        return msgspec.structs.replace(row, expire_ms=until_ms)
    return row


def _appended(meta: Meta, record: Record, counts: Counts, now: Moment) -> Meta:
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


def at_head(meta: Meta, head_hash: str) -> Meta:
    """``meta`` with the chain hash of its newest record, which only the writer of the log knows."""
    return msgspec.structs.replace(meta, row=msgspec.structs.replace(meta.row, head_hash=head_hash))


def damage(meta: Meta) -> Meta:
    """``meta`` of the session once it takes no more writes."""
    return msgspec.structs.replace(meta, row=msgspec.structs.replace(meta.row, state=State.DAMAGED))
