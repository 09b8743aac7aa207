"""A session as it is stored, unverified, and raw access to a whole store for maintenance.

Stores refuse what is not sound. Maintenance must see what is really there, keep its bytes (the chain hash is
over them), and write back whole sessions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pensieve.store._codec import StoredRecord
from pensieve.store._rules import CommittedRequest, Lease, Meta
from pensieve.store.contract import Key


class Problem(enum.StrEnum):
    ROW = "row"
    """The session's row is missing or unreadable."""
    LOG = "log"
    """The records are not the whole, unchanged log that the row names."""
    COUNTS = "counts"
    """The row's item numbers do not match its records."""
    REQUESTS = "requests"
    """The map from request ids to revisions does not match the records."""
    LISTING = "listing"
    """The session would be missing or misplaced in a listing, or found although it should not be."""
    EXPIRY = "expiry"
    """The session's keys do not expire when its row says."""
    MARKED = "marked"
    """The session is marked as damaged, but its log is sound."""
    FILE = "file"
    """The file or its indexes are damaged."""


class Remedy(enum.StrEnum):
    REBUILD = "rebuild"
    """Rebuild it from what is proven."""
    MARK = "mark"
    """Mark the session as damaged, or on demand cut it after its last sound record."""
    NONE = "none"
    """None: only a backup has the missing data."""


class Finding(msgspec.Struct, frozen=True):
    """One fault. ``session`` and ``tenant`` are "" if it concerns the store."""

    tenant: str
    session: str
    problem: Problem
    detail: str
    remedy: Remedy


def make_finding(key: Key | None, problem: Problem, detail: str, remedy: Remedy) -> Finding:
    tenant, session = ("", "") if key is None else (key.tenant, key.session_id)
    return Finding(tenant, session, problem, detail, remedy)


@dataclass(frozen=True, slots=True)
class RawSession:
    """All that is stored of one session, read at one moment."""

    key: Key
    meta: Meta | None
    """None: missing or unreadable."""
    log: tuple[StoredRecord, ...] = ()
    requests: Mapping[str, CommittedRequest] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    """Faults that the storage itself reports: indexes, expiry, unreadable parts."""
    stamp: str = ""
    """Changes whenever the session does; opaque outside the storage that made it."""
    claimed: tuple[int, str] | None = None
    """Newest revision and chain hash according to a row that failed its checksum."""

    @property
    def size(self) -> int:
        return sum(len(entry.data) for entry in self.log)


Progress = Callable[[str, int, int | None], None]
"""Called with the step's name, the parts done, and the number of parts (None: unknown)."""


def no_progress(_what: str, _done: int, _of: int | None) -> None:
    """Report no progress."""


class Mode(enum.Enum):
    """How a store is opened. All modes but WRITE need an existing store and do not change it."""

    READ = enum.auto()
    """Each session is read at one moment. Never disturbs a server."""
    SNAPSHOT = enum.auto()
    """All sessions are read at one moment, if the storage supports that."""
    EXCLUSIVE = enum.auto()
    """As READ, and no server may use the store, if the storage can tell."""
    WRITE = enum.auto()
    """As EXCLUSIVE; an empty store is created if there is none."""


class RawStore(Protocol):
    """Raw access to a whole store, for one caller. Raises the store's errors."""

    @property
    def kind(self) -> str:
        """``sqlite`` or ``redis``."""
        ...

    @property
    def store_id(self) -> str:
        """Known once open; "" if lost."""
        ...

    @property
    def is_exclusive(self) -> bool:
        """Whether no other program can use the store while it is open, so that every lease in it is void."""
        ...

    async def open(self, mode: Mode) -> None:
        """Raise FailedPrecondition: STORE_FOREIGN if there is no history, STORE_LOCKED if a server holds it."""
        ...

    async def close(self) -> None:
        """Close the store. Writes since the last ``flush`` may be undone."""
        ...

    async def now(self) -> int:
        """Ms since the epoch."""
        ...

    async def keys(self) -> list[Key]:
        """Return all sessions and tombstones, by tenant and session id."""
        ...

    async def session(self, key: Key) -> RawSession | None: ...

    async def check_storage(self) -> list[Finding]:
        """Find faults of the storage apart from single sessions. May take long."""
        ...

    async def repair_storage(self, progress: Progress = no_progress) -> None:
        """Repair the faults of ``check_storage`` whose remedy is ``REBUILD``."""
        ...

    async def put(self, session: RawSession, *, expected_stamp: str | None) -> bool:
        """Replace the session with exactly this one; indexes and expiry follow from it.

        ``expected_stamp``: the stamp of the session to replace, None if there is none. Returns False, and
        writes nothing, if another version is stored or a turn runs in it.
        """
        ...

    async def flush(self) -> None:
        """Make all writes durable, together if the storage supports that."""
        ...


def without_lease_holder(meta: Meta) -> Meta:
    """Return ``meta`` for a copy: a pending turn keeps its seed for a retry, but its lease has no holder.

    Messages for the holder are dropped. A called-off mark stays, for the turn's followers.
    """
    lease = meta.lease
    row = msgspec.structs.replace(meta.row, running=None)
    if lease is None:
        return Meta(row, meta.create_fingerprint)
    rest: Lease = msgspec.structs.replace(lease, token="", until_ms=0, order=None, followed=False)
    return Meta(row, meta.create_fingerprint, rest)


def has_expired(meta: Meta | None, now: int) -> bool:
    """Whether the session or tombstone has expired."""
    return meta is not None and 0 < meta.row.expire_ms <= now


def has_running_turn(meta: Meta | None, now: int) -> bool:
    """Whether a turn holds the session's lease."""
    return meta is not None and meta.lease is not None and meta.lease.until_ms > now


def sort_keys(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key.tenant, key.session_id))
