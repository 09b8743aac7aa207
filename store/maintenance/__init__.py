"""Maintenance of a history store for ``pensieve store``: check, repair, backup, restore, move, usage.

Works on the stored bytes (``store._raw``), not on a store's answers. Reading works beside a running server.

May import: store._codec, store._raw, store._refusals, store._rules, store.contract, store.records, store.redis_store,
store.sqlite_store.
"""

from __future__ import annotations

from pensieve.store._raw import Finding, Mode, Problem, Progress, RawSession, RawStore, Remedy
from pensieve.store.maintenance.archive import BadBackup, Totals
from pensieve.store.maintenance.copying import (
    CopyRefused,
    CopyResult,
    WholeBackup,
    backup,
    move,
    open_backup,
    restore,
)
from pensieve.store.maintenance.survey import (
    RepairResult,
    Survey,
    TenantTotal,
    check,
    iter_logs,
    repair,
    usage,
)

__all__ = [
    "BadBackup",
    "CopyResult",
    "Finding",
    "Mode",
    "Problem",
    "Progress",
    "RawSession",
    "RawStore",
    "CopyRefused",
    "Remedy",
    "RepairResult",
    "Survey",
    "TenantTotal",
    "Totals",
    "WholeBackup",
    "backup",
    "check",
    "iter_logs",
    "move",
    "open_backup",
    "open_raw",
    "repair",
    "restore",
    "usage",
]


def open_raw(url: str) -> RawStore:
    """Return raw access to a store, not yet opened. Raises ValueError for ``memory:`` and unknown URLs."""
    scheme = url.split(":", 1)[0]
    if scheme == "sqlite":
        from pensieve.store.sqlite_store import SqliteStore

        return SqliteStore.from_url(url).dump()
    if scheme.startswith("redis"):
        from pensieve.store.redis_store import RedisStore

        return RedisStore.from_url(url).dump()
    raise ValueError(f"{url!r} is not a store on a disk or in Redis")
