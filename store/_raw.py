"""A session as it is stored, unverified; raw access to a whole store for maintenance; the examination of a session.

Stores refuse what is not sound. Maintenance must see what is really there, keep its bytes (the chain hash is
over them), and write back whole sessions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store._codec import StoredRecord, decode_record, verify_next
from pensieve.store._rules import CommittedRequest, Lease, Meta, ttl_ms
from pensieve.store.contract import Key, LoggedRecord
from pensieve.store.records import History, SessionRow, State


class Problem(enum.StrEnum):
    """A kind of damage that a check finds in a session, or in the storage around it."""

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


@dataclass(frozen=True, slots=True)
class Examination:
    """A session and the result of every check."""

    session: RawSession
    findings: tuple[Finding, ...]
    sound: tuple[LoggedRecord, ...]
    """The records before the first that is not proven."""
    history: History

    @property
    def is_sound(self) -> bool:
        return not self.findings

    @property
    def is_broken(self) -> bool:
        """Whether records are lost or changed, or the session cannot be read at all."""
        return any(one.remedy is not Remedy.REBUILD for one in self.findings)

    @property
    def is_ahead(self) -> bool:
        """Whether the log is whole and continues past the row's head."""
        row = self.session.meta.row if self.session.meta is not None else None
        if row is None or len(self.sound) != len(self.session.log) or row.state is State.DELETED:
            return False
        return 0 < row.revision < len(self.sound) and self.sound[row.revision - 1].head_hash == row.head_hash

    def request_ids(self) -> dict[str, int]:
        """Map the request id of each sound record to its revision. Stores do not keep the creation's id."""
        return {one.record.request_id: one.record.revision for one in self.sound[1:] if one.record.request_id}


def examine(session: RawSession) -> Examination:
    """Check a session in all respects. Raises FailedPrecondition on a newer program's records."""
    meta = session.meta
    if meta is not None and meta.row.state is State.DELETED:
        found = list(session.findings)
        if session.log or session.requests:
            detail = f"{len(session.log)} records of the deleted session remain"
            found.append(make_finding(session.key, Problem.LOG, detail, Remedy.REBUILD))
        return Examination(session, tuple(found), (), History())
    sound, history, problem = _sound_part(session)
    so_far = Examination(session, session.findings, sound, history)
    so_far = replace(so_far, findings=(*session.findings, *_log_findings(so_far, problem)))
    found = [*so_far.findings, *_request_findings(so_far)]
    if meta is not None and not so_far.is_broken and not so_far.is_ahead:
        found += _row_findings(session, meta, history)
    return replace(so_far, findings=tuple(found))


def _sound_part(session: RawSession) -> tuple[tuple[LoggedRecord, ...], History, str | None]:
    """Return the unbroken chain of records, its fold, and the problem of the next record."""
    sound: list[LoggedRecord] = []
    history = History()
    for entry in session.log:
        try:
            logged = verify_next(session.key, entry, history.revision + 1, history.head_hash)
        except DataLoss as error:
            return tuple(sound), history, error.message.removeprefix(f"session {session.key.session_id!r}: ")
        sound.append(logged)
        history = history.apply(logged.record, logged.head_hash)
    return tuple(sound), history, None


def _log_findings(examined: Examination, problem: str | None) -> Iterator[Finding]:
    """Find the faults of the log. ``problem``: why it could not be read to its end; None: it could."""
    session = examined.session
    row = session.meta.row if session.meta is not None else None
    if row is not None and examined.is_ahead:
        detail = f"its log continues to record {examined.history.revision}, its row says {row.revision}"
        yield make_finding(session.key, Problem.LOG, detail, Remedy.REBUILD)
    problem = problem or _log_problem(examined, row)
    if problem is not None:
        yield make_finding(session.key, Problem.LOG, problem, Remedy.MARK)


def _log_problem(examined: Examination, row: SessionRow | None) -> str | None:
    """Return why a log without unsound records is not the whole log of its session; None: nothing shows that."""
    session, history = examined.session, examined.history
    if not session.log:
        return "no records are left"
    if row is not None and not examined.is_ahead:
        if history.revision < row.revision:
            return f"record {history.revision + 1} is missing, its row says {row.revision}"
        if (history.revision, history.head_hash) != (row.revision, row.head_hash):
            return f"record {row.revision} is not its row's newest record"
    beyond = max((known.revision for known in session.requests.values()), default=0)
    if row is None and beyond > history.revision:
        return f"record {history.revision + 1} is missing, a request id names {beyond}"
    if session.claimed is not None:
        # The failed checksum may be due to either value, so one that matches is enough.
        revision, head_hash = session.claimed
        if revision != history.revision and head_hash != history.head_hash:
            return f"record {history.revision} is not the newest record of its row, {revision}"
    return None


def _request_findings(examined: Examination) -> Iterator[Finding]:
    """Find wrong request ids. If no record is lost, an id that no record names was never committed."""
    session = examined.session
    named = examined.request_ids()
    for request_id, revision in named.items():
        known = session.requests.get(request_id)
        if known is None:
            detail = f"request id {request_id!r} of record {revision} is not known"
        elif known.revision != revision:
            detail = f"request id {request_id!r} leads to record {known.revision}, not {revision}"
        else:
            continue
        yield make_finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)
    for request_id in () if examined.is_broken else session.requests:
        if request_id not in named:
            leads = session.requests[request_id].revision
            detail = f"request id {request_id!r} leads to record {leads}, which has another"
            yield make_finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)


def _row_findings(session: RawSession, meta: Meta, history: History) -> Iterator[Finding]:
    row = meta.row
    for name, found, right in (
        ("head_item", row.head_item, history.head_item),
        ("item_count", row.item_count, len(history.items)),
    ):
        if found != right:
            detail = f"its row says {name} {found}, its records {right}"
            yield make_finding(session.key, Problem.COUNTS, detail, Remedy.REBUILD)
    if row.state is State.DAMAGED:
        detail = "it is marked as damaged, and every record is sound"
        yield make_finding(session.key, Problem.MARKED, detail, Remedy.REBUILD)


@dataclass(frozen=True, slots=True)
class Fix:
    """A repaired session, not yet written."""

    session: RawSession
    actions: tuple[str, ...]
    records_cut: int = 0
    """Unproven records that were cut from the end."""


def plan_fix(examined: Examination, *, truncate: bool, now: int) -> Fix | None:
    """Return the repaired session, or None if nothing can or need be repaired. Drops no record without ``truncate``.

    A log that is not whole makes the session DAMAGED; with ``truncate`` the session ends after its last sound
    record instead. A lost request id comes back without its fingerprint: its committed turn answers any later
    request with that id.
    """
    if examined.is_sound or any(one.remedy is Remedy.NONE for one in examined.findings):
        return None
    session = examined.session
    if session.meta is not None and session.meta.row.state is State.DELETED:
        rest = RawSession(session.key, session.meta)
        return Fix(rest, ("remains of the deleted session erased",))
    if examined.is_broken and not (truncate and examined.sound):
        return _mark_damaged(examined, now)
    requests = {
        request_id: CommittedRequest(_fingerprint(session, request_id, revision), revision)
        for request_id, revision in examined.request_ids().items()
    }
    log = session.log[: len(examined.sound)]
    fix = RawSession(session.key, _rebuild_meta(examined, now), log, requests)
    cut = len(session.log) - len(log)
    return Fix(fix, tuple(_actions(examined, cut)), cut)


def _mark_damaged(examined: Examination, now: int) -> Fix | None:
    session, before = examined.session, examined.session.meta
    if before is not None and before.row.state is State.DAMAGED:
        return None
    if before is None and not examined.sound:
        return None
    meta = _rebuild_meta(examined, now) if before is None else without_lease_holder(before)
    row = msgspec.structs.replace(meta.row, state=State.DAMAGED)
    marked = RawSession(
        session.key, Meta(row, meta.create_fingerprint, meta.lease), session.log, session.requests
    )
    return Fix(marked, ("marked as damaged: it can be read up to that point and exported, not continued",))


def _rebuild_meta(examined: Examination, now: int) -> Meta:
    """Rebuild the row from the sound records. A lost row loses its fork origin."""
    key, history, before = examined.session.key, examined.history, examined.session.meta
    if before is None:
        ttl = ttl_ms(history.config)
        first, last = examined.sound[0].record, examined.sound[-1].record
        row = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            create_ms=first.time_ms,
            update_ms=last.time_ms,
            expire_ms=now + ttl if ttl else 0,
        )
        before = Meta(row, "")
    kept = before.row.head_hash == history.head_hash and not any(
        one.problem is Problem.ROW for one in examined.findings
    )
    configured = any(one.record.config is not None for one in examined.sound)
    labelled = any(one.record.labels is not None for one in examined.sound)
    after = msgspec.structs.replace(
        before.row,
        state=State.ACTIVE,
        revision=history.revision,
        head_hash=history.head_hash,
        head_item=history.head_item,
        item_count=len(history.items),
        context_tokens=before.row.context_tokens if kept else int(history.tokens().size),
        config=history.config if configured else before.row.config,
        labels=dict(history.labels) if labelled else before.row.labels,
        running=None,
    )
    return without_lease_holder(Meta(after, before.create_fingerprint, before.lease))


def _fingerprint(session: RawSession, request_id: str, revision: int) -> str:
    """Return the fingerprint of an entry with the right revision, else ""."""
    known = session.requests.get(request_id)
    return known.fingerprint if known is not None and known.revision == revision else ""


def _actions(examined: Examination, cut: int) -> list[str]:
    problems = {one.problem for one in examined.findings}
    names = {
        Problem.ROW: "row rebuilt from the records",
        Problem.COUNTS: "item numbers corrected",
        Problem.REQUESTS: "request ids rebuilt",
        Problem.LISTING: "restored to the listing",
        Problem.EXPIRY: "expiry corrected",
        Problem.MARKED: "damage mark removed",
    }
    words = [text for problem, text in names.items() if problem in problems]
    if examined.is_broken:
        words.insert(0, f"ends at revision {examined.history.revision}, {cut} unproven records cut")
    elif examined.is_ahead:
        words.insert(0, f"row advanced to revision {examined.history.revision}")
    elif Problem.LOG in problems:
        words.insert(0, "malformed entries removed")
    return words


def salvage_meta(key: Key, stored: Sequence[StoredRecord], *, update_ms: int) -> Meta:
    """Rebuild a DAMAGED session's metadata from its log. It never expires, because its expiry is lost."""
    history = History()
    create_ms = 0
    for entry in stored:
        try:
            record = decode_record(entry.data)
            history = history.apply(record, entry.head_hash)
        except (msgspec.MsgspecError, ValueError, FailedPrecondition):
            break
        create_ms = create_ms or record.time_ms
    row = SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        state=State.DAMAGED,
        revision=stored[-1].revision if stored else 0,
        head_item=history.head_item,
        head_hash=stored[-1].head_hash if stored else "",
        item_count=len(history.items),
        context_tokens=len(history.tokens()),
        config=history.config,
        labels=dict(history.labels),
        create_ms=create_ms,
        update_ms=update_ms,
    )
    return Meta(row, "")
