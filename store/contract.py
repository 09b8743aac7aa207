"""The contract of every history store: the protocol ``HistoryStore`` and its argument and result types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pensieve.errors import PensieveError
from pensieve.store.records import Record, SessionRow

SLICE_RECORDS: Final = 256
"""Default number of records that ``read_slice`` reads."""


@dataclass(frozen=True, slots=True)
class Key:
    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Counts:
    """The row's counts after a record, computed by the writer."""

    head_item: int
    item_count: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """A record as read back, its checksum and place in the hash chain verified."""

    record: Record
    head_hash: str


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Consecutive records of a log, and the session's row at the same moment."""

    row: SessionRow
    records: tuple[LoggedRecord, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, newest update first. ``cursor`` is "" at the end; it is not a credential."""

    rows: tuple[SessionRow, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class MarkedTurn:
    session_id: str
    revision: int
    """Revision of the turn's record."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant's use of a store, without deleted and expired sessions."""

    sessions: int
    bytes: int
    """Stored bytes of all records, superseded ones included, without rows, request ids and indexes."""


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """The arguments of ``HistoryStore.begin``."""

    request_id: str
    fingerprint: str
    """Hash over the fields of the turn's specification."""
    token: str
    """128 random bits (hex), made once per call of ``begin`` and reused when that call is repeated."""
    owner: str
    """Replica id, for messages and for routing a re-attach."""
    attempt: str
    lease_ms: int
    seed: int
    """Kept with the pending turn. An earlier attempt's seed wins, so that a retry samples alike."""
    expected_revision: int | None = None
    start_ms: int = 0
    known_revision: int = 0
    """Newest revision that the caller has read or seen confirmed; 0: none. HISTORY_REGRESSED if the store is
    behind it."""
    known_head: str = ""
    """Chain hash (hex) at ``known_revision``; "" if not known."""
    known_create_ms: int = 0
    """``create_ms`` of the known session; 0: not known. If it differs, the session was created anew and is
    not compared."""
    follows: bool = False
    """The caller only waits for this turn, begun under another token: tell its holder, and do not begin it
    again if it was called off."""


@dataclass(frozen=True, slots=True)
class EndOrder:
    """An order to end a running turn early, stored by any server for the holder of the lease."""

    keep: bool
    """Commit the output so far; else discard it."""
    keep_tokens: int | None = None
    """Keep this many output tokens; None: all."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease holds. Carries the messages that were stored for its holder."""

    order: EndOrder | None = None
    followed: bool = False
    """A caller at another server has waited for this turn since the last renewal."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    key: Key
    token: str
    """The token of the ``BeginRequest`` that took it."""


RenewalAnswer = Renewed | PensieveError
"""The answer for one of several leases: it holds, or the error that ``renew`` would raise."""


@dataclass(frozen=True, slots=True)
class Began:
    row: SessionRow
    seed: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The request id was committed before, at ``revision``; nothing was begun."""

    row: SessionRow
    revision: int


@dataclass(frozen=True, slots=True)
class RunningElsewhere:
    """The request id holds the lease under another token (possibly in this process)."""

    row: SessionRow
    owner: str
    attempt: str
    lease_ms_left: int


@dataclass(frozen=True, slots=True)
class CalledOff:
    """The turn that the caller follows was discarded on request; nothing was begun."""

    row: SessionRow


BeginOutcome = Began | Replay | RunningElsewhere | CalledOff


class HistoryStore(Protocol):
    """The operations of every store; ``pensieve.store``'s docstring says what all methods promise."""

    @property
    def durability(self) -> str:
        """``none``, ``fsync``, ``local``, ``replicated(n)`` or ``unknown``; shown in GetServerInfo's features."""
        ...

    @property
    def store_id(self) -> str:
        """Random name of the data, the same on every server. Known once open; not shown to clients."""
        ...

    @property
    def remnants(self) -> str:
        """Where files of the store may still hold erased content, and what removes it; "" if they hold none."""
        ...

    async def open(self) -> None:
        """Connect; create or check the schema. Raises Unavailable or FailedPrecondition."""
        ...

    async def close(self) -> None: ...

    async def ping(self) -> None:
        """Raise Unavailable if the store cannot serve."""
        ...

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        """Create a session with its first record (revision 1). Same fingerprint again: return the existing row.

        Raises AlreadyExists (SESSION_EXISTS) on another fingerprint, NotFound (SESSION_DELETED) on a
        tombstone.
        """
        ...

    async def load(self, key: Key, *, known_revision: int = 0) -> SessionRow:
        """Raises DataLoss (HISTORY_REGRESSED) if the session has not reached ``known_revision``."""
        ...

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page: ...

    async def find_subject(self, tenant: str, subject: str) -> list[SessionRow]:
        """Return the tenant's sessions about ``subject``, and its damaged sessions whose subject is unknown.

        Reads the row of every session and trusts no index: each session that exists from the call to the answer is
        considered. Takes time in proportion to the store, and delays no commit.
        """
        ...

    async def usage(self, tenant: str) -> TenantUsage:
        """Return what the tenant's sessions take; cheap enough to call before each change."""
        ...

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        """Return records with a larger revision, oldest first, verified up to the row's head.

        ``head_hash``: the caller's chain hash at ``after_revision``. Raises DataLoss (HISTORY_CORRUPT) on a
        bad checksum, a gap, or a broken chain; the session is then DAMAGED: readable, not writable. Raises
        DataLoss (HISTORY_REGRESSED), and damages nothing, if the log is sound but is behind
        ``after_revision`` or had another hash there. A long log is read slice by slice and does not block
        other readers.
        """
        ...

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        """Return the first records after ``after_revision``: at most ``limit``, fewer if large, at least one if any.

        Verified as by ``read``, but only a slice that reaches the row's head proves that the chain leads
        there.
        """
        ...

    async def find_request(self, key: Key, request_id: str) -> int | None:
        """Return the revision that committed this request id."""
        ...

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        """Return the tenant's turns with this mark (and this answer), newest first.

        A hint: the caller must read each record, because uncommitted turns and turns of deleted sessions may
        be among them. No acknowledged turn is missing.
        """
        ...

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        """Take the lease. Order of checks: exists → state → request id known → regressed → busy → revision.

        Raises AlreadyExists (REQUEST_ID_REUSED), TurnInProgress (metadata active_request_id, retry_after_s),
        RevisionMismatch (metadata current_revision), and DataLoss (HISTORY_REGRESSED) if the store is behind
        ``expected_revision`` or ``known_revision``, or had another hash there. A store that is ahead of
        ``known_revision`` may leave the hash check to ``read``.
        """
        ...

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        """Extend the lease. Raises TurnFenced if the token lost it."""
        ...

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        """Call ``renew`` for each lease, in few round trips; answers in the same order.

        A lost lease or unreadable session does not affect the others. Raises Unavailable if no lease could be
        renewed; a store on several servers answers Unavailable for the leases of a server that is down.
        """
        ...

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        """Store an order for the lease's holder, delivered at its next renewal. The first order wins.

        Returns False if no such turn holds an unexpired lease. If its lease has lapsed, the holder cannot commit it
        any more; ``begin`` answers its followers with CalledOff, unless the order keeps output.
        """
        ...

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        """Append ``record`` (kind TURN, revision = base + 1) and release the lease. Raises TurnFenced.

        Repeating a commit with the same request id and fingerprint returns the row.
        """
        ...

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        """Release the lease and discard the turn. A token that lost the lease is not an error.

        ``called_off``: the turn was discarded on request, so ``begin`` answers its followers with CalledOff.
        """
        ...

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
        """Append a REWIND or UPDATE record. Idempotent by its request id (when not empty).

        ``record.revision`` must be the current revision + 1, else RevisionMismatch. TurnInProgress while a
        turn runs. ``erased_records``: erased forms of earlier records. Each replaces its record in the same
        change and removes its turn's marks; RevisionMismatch if the log has another record in that place.
        Acknowledged only when the store's own files hold none of the erased content, as for ``delete``.
        """
        ...

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        """Erase content at once. A tombstone (id and time) stays for ``TOMBSTONE_MS``."""
        ...

    async def forget(self, key: Key, head_hash: str) -> None:
        """Remove a session that never had a turn, with every trace; its id is free again.

        ``head_hash``: chain hash of the newest record that the caller has read. A missing or deleted session
        is no error. Order of checks: state → busy → head. Raises TurnInProgress, RevisionMismatch if the
        newest record is another one, FailedPrecondition (SESSION_DAMAGED).
        """
        ...

    async def mark_damaged(self, key: Key) -> None:
        """Refuse further writes to this session. Reading and deleting it still work."""
        ...

    async def purge_expired(self) -> int:
        """Remove expired sessions and tombstones; return how many."""
        ...
