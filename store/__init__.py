"""The history store: durable truth about every conversation. Imports without torch.

One interface (``contract``) over one kind of content (``records``); three implementations (``memory_store``,
``sqlite_store``, ``redis_store``); one behavioural test suite.

**Durability.** ``create``, ``commit``, ``apply`` and ``delete`` return only after the change survives what
``durability`` names. Every mutation is idempotent, because a client library may replay it: ``create`` by session,
``begin`` by token, ``commit`` and ``apply`` by request id.

**Exclusivity.** An idle session has no owner. ``begin`` gives one turn a lease under a random token; ``commit`` checks
that token in the same atomic operation that appends (fencing by equality), so a holder that was paused past its lease
can never append. Time is the store's own. In a store that one process owns, a step of a clock neither ends nor
prolongs a lease.

Methods raise ``pensieve.errors``: NotFound (SESSION_NOT_FOUND, SESSION_DELETED, SESSION_EXPIRED), AlreadyExists,
RevisionMismatch, TurnInProgress, TurnFenced, FailedPrecondition, DataLoss, Unavailable (STORE_UNAVAILABLE, STORE_FULL,
STORE_REPLACED). Expired sessions behave as absent. Another tenant's session is not among this tenant's keys.

May import: core, errors.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve.store._codec import head_hash_after
from pensieve.store.contract import (
    Began,
    BeginOutcome,
    BeginRequest,
    CalledOff,
    Counts,
    EndOrder,
    HeldLease,
    HistoryStore,
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

__all__ = [
    "Began",
    "BeginOutcome",
    "BeginRequest",
    "CalledOff",
    "Counts",
    "EndOrder",
    "HeldLease",
    "HistoryStore",
    "Key",
    "LogSlice",
    "LoggedRecord",
    "MarkedTurn",
    "Page",
    "RenewalAnswer",
    "Renewed",
    "Replay",
    "RunningElsewhere",
    "TenantUsage",
    "head_hash_after",
    "open_store",
]


def open_store(
    url: str,
    *,
    on_error: Callable[[], None] = lambda: None,
    on_regression: Callable[[], None] = lambda: None,
) -> HistoryStore:
    """Return the store that ``memory:``, ``sqlite:///PATH`` or ``redis://HOST:PORT/DB`` names, not yet opened.

    ``redis+sentinel://`` and ``redis+cluster://`` work too. ``on_error`` is called, from any thread, for each
    call but ``ping`` that the store could not serve (with Redis: for each call to Redis). ``on_regression``
    is called when Redis turns out to have lost changes that this store had acknowledged; a lost session is
    refused (HISTORY_REGRESSED). Raises ValueError, which lists the accepted forms, for any other URL.
    """
    scheme = url.split(":", 1)[0].partition("+")[0]
    if scheme == "memory":
        from pensieve.store.memory_store import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from pensieve.store.sqlite_store import SqliteStore

        return SqliteStore.from_url(url, on_error=on_error)
    if scheme in ("redis", "rediss"):
        from pensieve.store.redis_store import RedisStore

        return RedisStore.from_url(url, on_error=on_error, on_regression=on_regression)
    raise ValueError(f"unknown store {url!r}: use memory:, sqlite:///PATH or redis://HOST:PORT/DB")
