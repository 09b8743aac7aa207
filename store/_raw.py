"""A session as a store holds it, not believed yet, and the access to all of them that maintenance needs.

The stores themselves answer callers and refuse what is not sound. Checking, repairing, copying and restoring have to
see what is really there, keep its bytes (the chain hash is over them), and write a session back as a whole.
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
    """What can be wrong with stored data."""

    ROW = "row"
    """The session's row is missing or cannot be read."""
    LOG = "log"
    """The records are not the whole, unchanged log that the row names."""
    COUNTS = "counts"
    """The row's item numbers are not what the records add up to."""
    REQUESTS = "requests"
    """The map from request ids to revisions is not what the records say."""
    LISTING = "listing"
    """The session would be missing or out of place in a listing, or found when it should not be."""
    EXPIRY = "expiry"
    """The session's keys do not expire when its row says."""
    MARKED = "marked"
    """The session is marked as damaged, and its log is sound."""
    FILE = "file"
    """The file or its indexes are damaged."""


class Remedy(enum.StrEnum):
    """What ``repair`` does about it."""

    REBUILD = "rebuild"
    """It is made again from what is proven."""
    MARK = "mark"
    """The session is marked as damaged, or, on demand, cut behind its last sound record."""
    NONE = "none"
    """Nothing: only a backup has what is missing."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. ``session`` and ``tenant`` are "" where it is about the store."""

    tenant: str
    session: str
    problem: Problem
    detail: str
    remedy: Remedy


def make_finding(key: Key | None, problem: Problem, detail: str, remedy: Remedy) -> Finding:
    """``key``: None where it is about the store."""
    tenant, session = ("", "") if key is None else (key.tenant, key.session_id)
    return Finding(tenant, session, problem, detail, remedy)


@dataclass(frozen=True, slots=True)
class RawSession:
    """All that is stored of one session, read at one moment."""

    key: Key
    meta: Meta | None
    """None: it is missing or cannot be read."""
    log: tuple[StoredRecord, ...] = ()
    requests: Mapping[str, CommittedRequest] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    """What the storage itself saw around it: indexes, expiry, unreadable parts."""
    stamp: str = ""
    """Changes with the session; only the storage that made it knows how."""
    claimed: tuple[int, str] | None = None
    """Revision and chain hash of the newest record as a row names them that failed its checksum."""

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(len(entry.data) for entry in self.log)


Progress = Callable[[str, int, int | None], None]
"""Called with the name of the step, the number of parts done, and the number of all parts (None: unknown)."""


def no_progress(_what: str, _done: int, _of: int | None) -> None:
    """Report no progress."""


class Mode(enum.Enum):
    """What a store is opened for. All but WRITE need one that is there, and change nothing in it."""

    READ = enum.auto()
    """Each session as of one moment. Never disturbs a server."""
    SNAPSHOT = enum.auto()
    """All sessions as of one moment, where the storage can do that."""
    EXCLUSIVE = enum.auto()
    """As READ, and no server may be at work, where the storage can tell."""
    WRITE = enum.auto()
    """As ALONE; an empty store is made where there is none."""


class RawStore(Protocol):
    """Everything in one store, for one caller. Raises the store's errors."""

    @property
    def kind(self) -> str:
        """``sqlite`` or ``redis``."""
        ...

    @property
    def store_id(self) -> str:
        """Known once open; "" if the store has lost it."""
        ...

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else can be at work in it while it is open, so that every lease in it is void."""
        ...

    async def open(self, mode: Mode) -> None:
        """Raises FailedPrecondition: STORE_FOREIGN where there is no history, STORE_LOCKED where a server has it."""
        ...

    async def close(self) -> None:
        """Give the store back; what was written since the last ``flush`` may be undone."""
        ...

    async def now(self) -> int:
        """The store's time, in ms since the epoch."""
        ...

    async def keys(self) -> list[Key]:
        """Every session and tombstone, in order of tenant and session id."""
        ...

    async def session(self, key: Key) -> RawSession | None:
        """None: there is nothing under this key."""
        ...

    async def check_storage(self) -> list[Finding]:
        """What is wrong with the storage apart from single sessions. May take long."""
        ...

    async def repair_storage(self, progress: Progress = no_progress) -> None:
        """Repair what ``about_store`` finds and calls ``REBUILD``."""
        ...

    async def put(self, session: RawSession, *, expected_stamp: str | None) -> bool:
        """Make the session exactly this one; its indexes and expiry follow from it.

        ``over``: the stamp of what is replaced, None where nothing is. False, and nothing is written, when something
        else is there or a turn runs in it.
        """
        ...

    async def flush(self) -> None:
        """Make durable what was written, all of it together where the storage can do that."""
        ...


def without_lease_holder(meta: Meta) -> Meta:
    """``meta`` as it is copied: a pending turn keeps its seed for a retry, and nobody holds its lease any more.

    What was left for the holder goes with it; that the turn was called off stays, for those who follow it.
    """
    lease = meta.lease
    row = msgspec.structs.replace(meta.row, running=None)
    if lease is None:
        return Meta(row, meta.create_fingerprint)
    rest: Lease = msgspec.structs.replace(lease, token="", until_ms=0, order=None, followed=False)
    return Meta(row, meta.create_fingerprint, rest)


def is_over(meta: Meta | None, now: int) -> bool:
    """Whether the session's, or its tombstone's, time has passed."""
    return meta is not None and 0 < meta.row.expire_ms <= now


def is_running(meta: Meta | None, now: int) -> bool:
    """Whether a turn holds the session's lease."""
    return meta is not None and meta.lease is not None and meta.lease.until_ms > now


def in_order(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key.tenant, key.session_id))
