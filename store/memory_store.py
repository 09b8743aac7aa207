"""History in this process's memory, for tests, demonstrations and simulations. Lost with the process."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pensieve.errors import PensieveError
from pensieve.store import _rules
from pensieve.store._codec import (
    StoredRecord,
    make_erased_record,
    make_stored_record,
    marking_damage,
    read_all_slices,
    read_log,
    take_slice,
)
from pensieve.store._listing import (
    decode_cursor,
    encode_cursor,
    found_by,
    has_labels,
    mark_entries,
    may_be_about,
    position_of,
)
from pensieve.store._rules import CommittedRequest, Meta, Moment, steady_clock_ms, wall_clock_ms
from pensieve.store.contract import (
    SLICE_RECORDS,
    BeginOutcome,
    BeginRequest,
    Counts,
    EndOrder,
    HeldLease,
    Key,
    LoggedRecord,
    LogSlice,
    MarkedTurn,
    Page,
    RenewalAnswer,
    Renewed,
    TenantUsage,
)
from pensieve.store.records import Record, SessionRow, State


@dataclass(slots=True)
class _Session:
    meta: Meta
    log: list[StoredRecord] = field(default_factory=list)
    requests: dict[str, CommittedRequest] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)


class MemoryStore:
    """``HistoryStore`` over dicts. Only ``read`` yields to the event loop, so every other method is atomic."""

    def __init__(
        self, *, clock: Callable[[], int] = wall_clock_ms, steady: Callable[[], int] = steady_clock_ms
    ) -> None:
        """``clock``: ms since the epoch; ``steady``: ms of a clock that never steps, for leases."""
        self._wall_clock, self._steady_clock = clock, steady
        self._sessions: dict[Key, _Session] = {}
        self._marks: defaultdict[tuple[str, str], list[MarkedTurn]] = defaultdict(list)
        """(tenant, digest) → marked turns, oldest first."""
        self._store_id = uuid.uuid4().hex

    @property
    def durability(self) -> str:
        return "none"

    @property
    def store_id(self) -> str:
        return self._store_id

    @property
    def remnants(self) -> str:
        return ""

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing: the content lives as long as the object."""

    async def ping(self) -> None:
        """Do nothing."""

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        key = Key(row.tenant, row.session_id)
        now = self._now()
        meta = _rules.create(self._meta(key), key, row, record, fingerprint, now)
        if meta is None:
            return self._view(key, now)
        self._remove_marks(key)
        self._sessions[key] = session = _Session(meta)
        return self._append(session, meta, record, fingerprint=None, now=now)

    async def load(self, key: Key, *, known_revision: int = 0) -> SessionRow:
        now = self._now()
        row = _rules.view(_rules.require_present(self._meta(key), now), now)
        _rules.check_reached(row, known_revision)
        return row

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page:
        now = self._now()
        start = decode_cursor(cursor)
        rows = [
            _rules.view(session.meta, now)
            for session in self._live_sessions(tenant, now)
            if position_of(session.meta.row) < start and has_labels(session.meta.row, labels)
        ]
        rows.sort(key=position_of, reverse=True)
        more = len(rows) > limit
        return Page(tuple(rows[:limit]), encode_cursor(position_of(rows[limit - 1])) if more else "")

    async def find_subject(self, tenant: str, subject: str) -> list[SessionRow]:
        rows = (session.meta.row for session in self._live_sessions(tenant, self._now()))
        return [row for row in rows if may_be_about(row, subject)]

    async def usage(self, tenant: str) -> TenantUsage:
        live = self._live_sessions(tenant, self._now())
        return TenantUsage(len(live), sum(len(stored.data) for session in live for stored in session.log))

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        async def fetch(after: int, chain: str) -> LogSlice:
            return await self.read_slice(key, after_revision=after, head_hash=chain)

        return await read_all_slices(fetch, after_revision, head_hash)

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        row = _rules.require_present(self._meta(key), self._now()).row
        log = self._sessions[key].log
        stored = log[max(0, after_revision - 1) : after_revision] if after_revision else []
        stored += take_slice(log[after_revision:], limit)
        async with marking_damage(self, key):
            logged = read_log(
                key, row, stored, after_revision=after_revision, head_hash=head_hash, limit=limit
            )
        return LogSlice(row, tuple(logged))

    async def find_request(self, key: Key, request_id: str) -> int | None:
        _rules.require_present(self._meta(key), self._now())
        known = self._sessions[key].requests.get(request_id)
        return None if known is None else known.revision

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        return self._marks.get((tenant, found_by(mark, answer)), [])[: -limit - 1 : -1]

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        known = self._known(key, request.request_id)
        hash_there = self._hash_at(key, request.known_revision)
        begun = _rules.begin(self._meta(key), known, request, self._now(), hash_there=hash_there)
        if begun.meta is not None:
            self._sessions[key].meta = begun.meta
        return begun.outcome

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        return _rules.single_answer(await self.renew_leases([HeldLease(key, token)], lease_ms))

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        now = self._now()
        return [self._renew(lease, lease_ms, now) for lease in leases]

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        waits, meta = _rules.ask_to_end(self._meta(key), request_id, order, self._now())
        if meta is not None:
            self._sessions[key].meta = meta
        return waits

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        now = self._now()
        known = self._known(key, record.request_id)
        if not _rules.check_commit(self._meta(key), known, token, fingerprint, record, now):
            return self._view(key, now)
        session = self._sessions[key]
        meta = _rules.after_append(session.meta, record, counts, now)
        return self._append(session, meta, record, fingerprint=fingerprint, now=now)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        meta = _rules.abort(self._meta(key), token, called_off)
        if meta is not None:
            self._sessions[key].meta = meta

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
        now = self._now()
        known = self._known(key, record.request_id)
        if not _rules.check_apply(self._meta(key), known, fingerprint, record, expected_revision, now):
            return self._view(key, now)
        session = self._sessions[key]
        meta = _rules.after_append(session.meta, record, counts, now)
        stored = [make_erased_record(one) for one in erased_records]
        for one in stored:
            _rules.check_replaces(one, session.log[one.revision - 1].head_hash, meta)
        for one in stored:
            session.log[one.revision - 1] = one
        gone = {one.revision for one in stored}
        for name in session.marks if gone else ():
            found = self._marks[key.tenant, name]
            found[:] = [one for one in found if one.session_id != key.session_id or one.revision not in gone]
        return self._append(session, meta, record, fingerprint=fingerprint, now=now)

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        now = self._now()
        tombstone = _rules.delete(self._meta(key), key, expected_revision, allow_missing, now)
        if tombstone is not None:
            self._remove_marks(key)
            self._sessions[key] = _Session(tombstone)

    async def forget(self, key: Key, head_hash: str) -> None:
        if _rules.check_forget(self._meta(key), head_hash, self._now()):
            self._remove_marks(key)
            del self._sessions[key]

    async def mark_damaged(self, key: Key) -> None:
        meta = _rules.require_present(self._meta(key), self._now())
        self._sessions[key].meta = _rules.with_damaged_state(meta)

    async def purge_expired(self) -> int:
        now = self._now()
        gone = [key for key, session in self._sessions.items() if _rules.is_gone(session.meta, now)]
        for key in gone:
            self._remove_marks(key)
            del self._sessions[key]
        return len(gone)

    def _live_sessions(self, tenant: str, now: Moment) -> list[_Session]:
        return [
            session
            for key, session in self._sessions.items()
            if key.tenant == tenant
            and not _rules.is_gone(session.meta, now)
            and session.meta.row.state is not State.DELETED
        ]

    def _remove_marks(self, key: Key) -> None:
        """Remove the session's entries from the mark index."""
        for name in self._sessions[key].marks if key in self._sessions else ():
            others = [one for one in self._marks[key.tenant, name] if one.session_id != key.session_id]
            self._marks[key.tenant, name] = others
            if not others:
                del self._marks[key.tenant, name]

    def _now(self) -> Moment:
        return Moment(self._wall_clock(), self._steady_clock())

    def _meta(self, key: Key) -> Meta | None:
        session = self._sessions.get(key)
        return None if session is None else session.meta

    def _known(self, key: Key, request_id: str) -> CommittedRequest | None:
        session = self._sessions.get(key)
        return None if session is None else session.requests.get(request_id)

    def _renew(self, lease: HeldLease, lease_ms: int, now: Moment) -> RenewalAnswer:
        try:
            news, meta = _rules.renew(self._meta(lease.key), lease.token, lease_ms, now)
        except PensieveError as error:
            return error
        self._sessions[lease.key].meta = meta
        return news

    def _hash_at(self, key: Key, revision: int) -> str:
        session = self._sessions.get(key)
        log = [] if session is None else session.log
        return next((entry.head_hash for entry in log if entry.revision == revision), "")

    def _view(self, key: Key, now: Moment) -> SessionRow:
        return _rules.view(self._sessions[key].meta, now)

    def _append(
        self, session: _Session, meta: Meta, record: Record, *, fingerprint: str | None, now: Moment
    ) -> SessionRow:
        """Append ``record`` and store ``meta``. Without a fingerprint the request id is not stored."""
        stored = make_stored_record(record, meta.row.head_hash)
        session.log.append(stored)
        if record.request_id and fingerprint is not None:
            session.requests[record.request_id] = CommittedRequest(fingerprint, record.revision)
        row = meta.row
        for one in mark_entries(record):
            self._marks[row.tenant, one.found_by].append(MarkedTurn(row.session_id, record.revision))
            session.marks.add(one.found_by)
        session.meta = _rules.with_head_hash(meta, stored.head_hash)
        return _rules.view(session.meta, now)
