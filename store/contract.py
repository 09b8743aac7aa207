"""What every history store promises: the protocol ``HistoryStore`` and the values it takes and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pensieve.errors import PensieveError
from pensieve.store.records import Record, SessionRow

SLICE_RECORDS: Final = 256
"""Number of records that ``read_slice`` reads unless it is told another."""


@dataclass(frozen=True, slots=True)
class Key:
    """One session of one tenant."""

    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What the row says of the history after a record; the writer knows it, the store only keeps it."""

    head_item: int
    item_count: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """A record as read back: its checksum was verified and its chain hash continues the one before."""

    record: Record
    head_hash: str


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Some records of a log that follow one another, and the session's row of the same moment."""

    row: SessionRow
    records: tuple[LoggedRecord, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, newest update first. ``cursor`` is "" at the end; it is not a credential."""

    rows: tuple[SessionRow, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class MarkedTurn:
    """Where a turn that was looked for by its mark lies."""

    session_id: str
    revision: int
    """Of its record."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant's sessions take of a store; neither deleted nor expired ones count."""

    sessions: int
    bytes: int
    """Of all their records as they are stored, superseded ones included; rows, request ids and indexes come on top."""


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """What ``begin`` needs to know of a turn."""

    request_id: str
    fingerprint: str
    """Hash over the fields of the turn's specification."""
    token: str
    """128 random bits, hex, made once per call of ``begin`` and reused when that call is repeated."""
    owner: str
    """Replica id, for messages and for routing a re-attach."""
    attempt: str
    lease_ms: int
    seed: int
    """Kept with the pending turn; an earlier attempt's seed wins, so that a retry samples alike."""
    expected_revision: int | None = None
    start_ms: int = 0
    known_revision: int = 0
    """Newest revision that the caller itself has seen confirmed or has read; 0: none. A store that is behind it, or had
    another history there, has lost what it had acknowledged."""
    known_head: str = ""
    """Chain hash (hex) at ``known_revision``; "" if not known."""
    known_create_ms: int = 0
    """``create_ms`` of the session that was known; 0 if not known. A session that was made anew under the id of one
    that has expired has gone nowhere: what was known of the old one is not held against it."""
    follows: bool = False
    """The caller waits for this very turn, begun under another token. While that runs its holder hears that somebody
    does; if it was called off, it is not begun again."""


@dataclass(frozen=True, slots=True)
class EndOrder:
    """How a running turn is to end early: left in the store by any server, for the one that holds the lease."""

    keep: bool
    """Commit what there is; else discard it."""
    keep_tokens: int | None = None
    """Only so many tokens of the output; None: all there are."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease holds, and what was left for its holder meanwhile."""

    order: EndOrder | None = None
    followed: bool = False
    """Somebody has begun to wait for this turn at another server, or still does."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as its holder names it."""

    key: Key
    token: str
    """Of the ``BeginRequest`` that took it."""


RenewalAnswer = Renewed | PensieveError
"""What became of one of several leases: it holds, or what ``renew`` would raise for it."""


@dataclass(frozen=True, slots=True)
class Began:
    """The turn holds the lease."""

    row: SessionRow
    seed: int


@dataclass(frozen=True, slots=True)
class Replay:
    """This request id was committed before, at ``revision``; nothing was begun."""

    row: SessionRow
    revision: int


@dataclass(frozen=True, slots=True)
class RunningElsewhere:
    """This request id holds the lease already, under another token (maybe in this very process)."""

    row: SessionRow
    owner: str
    attempt: str
    lease_ms_left: int


@dataclass(frozen=True, slots=True)
class CalledOff:
    """The turn that the caller follows was discarded because somebody asked for that; nothing was begun."""

    row: SessionRow


BeginOutcome = Began | Replay | RunningElsewhere | CalledOff


class HistoryStore(Protocol):
    """What every store can do; the docstring of ``pensieve.store`` says what all methods promise."""

    @property
    def durability(self) -> str:
        """``none``, ``fsync``, ``local``, ``replicated(n)`` or ``unknown``: shown in GetServerInfo's features."""
        ...

    @property
    def store_id(self) -> str:
        """Names these data, to everybody who shares them; random, known once open, and not for callers to see."""
        ...

    async def open(self) -> None:
        """Connect, create or check the schema and the store id. Raises Unavailable or FailedPrecondition."""
        ...

    async def close(self) -> None: ...

    async def ping(self) -> None:
        """Raises Unavailable when the store cannot serve."""
        ...

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        """Make a session with its first record (revision 1). Same fingerprint again: the existing row.

        Raises AlreadyExists (SESSION_EXISTS) on another fingerprint, NotFound (SESSION_DELETED) on a tombstone.
        """
        ...

    async def load(self, key: Key) -> SessionRow: ...

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page: ...

    async def usage(self, tenant: str) -> TenantUsage:
        """What the tenant's sessions take; cheap enough to ask before each change."""
        ...

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        """Records with a larger revision, oldest first, checksum and chain verified up to the row's head.

        ``head_hash``: chain hash at ``after_revision`` as the caller knows it. Raises DataLoss (HISTORY_CORRUPT) on a
        bad checksum, a gap, or a chain that does not continue; the session is then DAMAGED: readable, not writable.
        Raises DataLoss (HISTORY_REGRESSED), and damages nothing, when the store's log is sound but is behind
        ``after_revision`` or had another hash there: the caller's copy is the wrong one, or a fail-over lost records.

        The log is read slice by slice, so that a long one holds up no other reader.
        """
        ...

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        """The first records after ``after_revision``, at most ``limit``, and fewer when they are large.

        At least one, unless ``after_revision`` is the row's. They are verified as by ``read``, but that the chain leads
        to the row's head is proven only by a slice that reaches it. Raises as ``read`` does.
        """
        ...

    async def find_request(self, key: Key, request_id: str) -> int | None:
        """Revision that committed this request id, if any."""
        ...

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        """Turns of the tenant with this mark, and this answer unless it is None, newest first.

        A hint: one that was never committed, or whose session is gone, may be among them, so the record is to be read.
        None that was acknowledged is left out.
        """
        ...

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        """Take the lease. Order of checks: exists → state → request id known → went back → busy → revision.

        Raises AlreadyExists (REQUEST_ID_REUSED), TurnInProgress (metadata active_request_id, retry_after_s),
        RevisionMismatch (metadata current_revision), DataLoss (HISTORY_REGRESSED) when the store is behind
        ``expected_revision`` or ``known_revision``, or had another hash than ``known_head`` there. A store that is
        ahead of ``known_revision`` may leave the hash to ``read``.
        """
        ...

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        """Hold the lease for longer. Raises TurnFenced when the token lost it."""
        ...

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        """``renew`` for each of them, in as few round trips and changes as the store can; answers in their order.

        One that is lost, or whose session cannot be read, changes nothing for the others. Raises Unavailable when no
        lease could be renewed; a store on several servers answers Unavailable for those of a server that is away.
        """
        ...

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        """Leave an order for whoever holds the lease of this turn; it learns of it when it renews. The first counts.

        False: no such turn holds a lease that has not lapsed, and nothing was left.
        """
        ...

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        """Append ``record`` (kind TURN, revision = base + 1), remember its request id, release the lease.

        A repeated commit of the same request id and fingerprint returns the row. Raises TurnFenced.
        """
        ...

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        """Release the lease; nothing of the turn is in history. A token that no longer holds it is not an error.

        ``called_off``: somebody wanted it discarded, so ``begin`` by those who only follow it answers CalledOff.
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

        ``record.revision`` must be the current revision + 1, else RevisionMismatch. TurnInProgress while a turn runs.
        ``rests``: what is left of the records that this one erases. In the same change each takes the place of the
        whole one, and what its turn was found by goes with the content; RevisionMismatch where the log has another
        record in that place. The request ids stay known. As with ``delete``, nothing of the content stays in the
        store's own files; the change is acknowledged after that.
        """
        ...

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        """Erase content at once; a tombstone (id and time) stays for the life of the store's retention."""
        ...

    async def forget(self, key: Key, head_hash: str) -> None:
        """Remove a session and every trace of it: its id is free again. For one that has never had a turn.

        ``head_hash``: chain hash of the newest record that the caller has read, and found to be no turn. A session that
        is not there, or was deleted, is no error. Order of checks: state → busy → head. Raises TurnInProgress,
        RevisionMismatch when the newest record is another one, FailedPrecondition (SESSION_DAMAGED).
        """
        ...

    async def mark_damaged(self, key: Key) -> None:
        """No more writes to this session; reads and deletion go on."""
        ...

    async def purge_expired(self) -> int:
        """Remove what is left of expired sessions and of tombstones past their time; returns how many."""
        ...
