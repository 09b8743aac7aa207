"""History in one SQLite file, for one server. Durable against process kill, OS crash and power cut ("fsync").

One thread makes all changes on the only writing connection; reads have threads of their own
(``_sqlite.reader``). So no method blocks the event loop, and no listing delays a commit. A lock that dies
with its process keeps a second server out. Therefore a lease found at start belongs to a dead process and is
expired at once, and leases use this process's monotonic clock.

After a disk error the state of the file is unknown: every call is refused until the file's content has been
made durable again (``_sqlite.disk``). Writes that only move a lease are not flushed (``synchronous =
NORMAL``): losing one does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from pensieve.errors import DataLoss, PensieveError
from pensieve.store import _rules
from pensieve.store._codec import make_erased_record, marking_damage, read_all_slices, read_log, take_slice
from pensieve.store._listing import decode_cursor, encode_cursor, found_by, may_be_about, position_of
from pensieve.store._rules import Moment, steady_clock_ms, wall_clock_ms
from pensieve.store._sqlite.database import SqliteDatabase
from pensieve.store._sqlite.dump import SqliteDump
from pensieve.store._sqlite.rows import DamagedSession, Rows
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

log = logging.getLogger(__name__)

T = TypeVar("T")

URL_PREFIX = "sqlite:///"
PURGE_BATCH: Final = 100
"""Sessions removed per change; turns' changes wait for it."""


class SqliteStore:
    """``HistoryStore`` over one file."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        steady: Callable[[], int] = steady_clock_ms,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """``clock``: ms since the epoch; ``steady``: ms, never steps. ``on_error``: see ``open_store``."""
        self._wall_clock, self._steady_clock = clock, steady
        self._database = SqliteDatabase(path, self._now, on_error)

    @classmethod
    def from_url(cls, url: str, *, on_error: Callable[[], None] = lambda: None) -> SqliteStore:
        """Parse ``sqlite:///relative/path`` or ``sqlite:////absolute/path``. Raises ValueError on other forms."""
        path = url.removeprefix(URL_PREFIX)
        if path == url or not path or path.endswith("/"):
            raise ValueError(f"bad store {url!r}: use sqlite:///relative/file or sqlite:////absolute/file")
        return cls(Path(path), on_error=on_error)

    def dump(self) -> SqliteDump:
        """Return raw access for maintenance, instead of ``open``."""
        return SqliteDump(self.path)

    @property
    def path(self) -> Path:
        return self._database.file.path

    @property
    def durability(self) -> str:
        return "fsync"

    @property
    def store_id(self) -> str:
        return self._database.file.store_id

    @property
    def remnants(self) -> str:
        if not self._database.is_erasing:
            return ""
        return f"another program reads {self.path}: its write-ahead log keeps erased content until that program ends"

    async def open(self) -> None:
        """Lock and open the file. Raises FailedPrecondition if another server holds it or its schema is newer."""
        try:
            await self._database.open()
            for key in await self._write(Rows.end_leases):
                await self._rebuild_derived(key)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for work in progress, then release the file."""
        await self._database.close()

    async def ping(self) -> None:
        """Raise Unavailable or DataLoss if changes are impossible; writes a probe unless a change was just made."""
        await self._database.prove_writable()

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        key = Key(row.tenant, row.session_id)

        def work(rows: Rows) -> SessionRow:
            now, before = self._now(), rows.meta(key)
            meta = _rules.create(before, key, row, record, fingerprint, now)
            if meta is None:
                return _rules.view(_rules.require_present(before, now), now)
            rows.erase(key)  # remains of an expired session with the same name
            return _rules.view(rows.append(key, meta, record, None), now)

        return await self._write(work)

    async def load(self, key: Key, *, known_revision: int = 0) -> SessionRow:
        def work(rows: Rows) -> SessionRow:
            now = self._now()
            row = _rules.view(_rules.require_present(rows.meta(key), now), now)
            _rules.check_reached(row, known_revision)
            return row

        return await self._read(work, key.tenant)

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page:
        start = decode_cursor(cursor)

        def work(rows: Rows) -> Page:
            now = self._now()
            newest = rows.newest(tenant, start, labels or {}, now)
            found = [_rules.view(meta, now) for meta in islice(newest, limit + 1)]
            page = found[:limit]
            return Page(tuple(page), encode_cursor(position_of(page[-1])) if len(found) > limit else "")

        return await self._with_repair(lambda: self._database.list(work, tenant))

    async def find_subject(self, tenant: str, subject: str) -> list[SessionRow]:
        def work(rows: Rows) -> list[SessionRow]:
            now = self._now()
            found = (_rules.view(meta, now) for meta in rows.every(tenant, now))
            return [row for row in found if may_be_about(row, subject)]

        return await self._with_repair(lambda: self._database.list(work, tenant))

    async def usage(self, tenant: str) -> TenantUsage:
        return await self._database.read(lambda rows: rows.usage(tenant, self._now()), tenant)

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        async def fetch(after: int, chain: str) -> LogSlice:
            return await self.read_slice(key, after_revision=after, head_hash=chain)

        return await read_all_slices(fetch, after_revision, head_hash)

    async def read_slice(
        self, key: Key, *, after_revision: int = 0, head_hash: str = "", limit: int = SLICE_RECORDS
    ) -> LogSlice:
        def work(rows: Rows) -> LogSlice:
            row = _rules.require_present(rows.meta(key), self._now()).row
            stored = [
                *rows.base_record(key, after_revision),
                *take_slice(rows.log(key, after_revision + 1), limit),
            ]
            logged = read_log(
                key, row, stored, after_revision=after_revision, head_hash=head_hash, limit=limit
            )
            return LogSlice(row, tuple(logged))

        async with marking_damage(self, key):
            try:
                return await self._with_repair(lambda: self._database.read_log(work, key.tenant))
            except DataLoss as error:
                if error.reason != "HISTORY_CORRUPT" or not await self._repair_file(key):
                    raise
            return await self._with_repair(lambda: self._database.read_log(work, key.tenant))

    async def find_request(self, key: Key, request_id: str) -> int | None:
        def work(rows: Rows) -> int | None:
            _rules.require_present(rows.meta(key), self._now())
            known = rows.committed_request(key, request_id)
            return None if known is None else known.revision

        return await self._read(work, key.tenant)

    async def find_marked(
        self, tenant: str, mark: str, answer: str | None, *, limit: int
    ) -> list[MarkedTurn]:
        name = found_by(mark, answer)
        return await self._database.read(lambda rows: rows.marked(tenant, name, self._now(), limit), tenant)

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        def work(rows: Rows) -> BeginOutcome:
            before, known = rows.meta(key), rows.committed_request(key, request.request_id)
            at = request.known_revision
            is_behind_head = (
                before is not None and at < before.row.revision
            )  # the row has the hash of its head
            hash_there = rows.hash_at(key, at) if request.known_head and is_behind_head else ""
            begun = _rules.begin(before, known, request, self._now(), hash_there=hash_there)
            if begun.meta is not None:
                rows.put(key, begun.meta)
            return begun.outcome

        return await self._write(work, flush=False)

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        return _rules.single_answer(await self.renew_leases([HeldLease(key, token)], lease_ms))

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        def work(rows: Rows) -> list[RenewalAnswer | DamagedSession]:
            now = self._now()
            return [_renew_one(rows, lease, lease_ms, now) for lease in leases]

        answers = await self._database.write_urgent(work)
        return [
            await self._renew_after_rebuild(answer.key, leases, lease_ms)
            if isinstance(answer, DamagedSession)
            else answer
            for answer in answers
        ]

    async def _renew_after_rebuild(
        self, key: Key, leases: Sequence[HeldLease], lease_ms: int
    ) -> RenewalAnswer:
        """Rebuild the session's row, which ends its lease, and renew once more."""
        await self._rebuild_derived(key)
        (lease,) = (one for one in leases if one.key == key)
        try:
            answer = await self._database.write_urgent(
                lambda rows: _renew_one(rows, lease, lease_ms, self._now())
            )
        except PensieveError as error:
            return error
        return _damaged_rows(key) if isinstance(answer, DamagedSession) else answer

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        def work(rows: Rows) -> bool:
            waits, meta = _rules.ask_to_end(rows.meta(key), request_id, order, self._now())
            if meta is not None:
                rows.put(key, meta)
            return waits

        return await self._write(work, flush=False)

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        def work(rows: Rows) -> SessionRow:
            now, before = self._now(), rows.meta(key)
            known = rows.committed_request(key, record.request_id)
            fresh = _rules.check_commit(before, known, token, fingerprint, record, now)
            meta = _rules.require_present(before, now)
            if fresh:
                meta = rows.append(key, _rules.after_append(meta, record, counts, now), record, fingerprint)
            return _rules.view(meta, now)

        return await self._write(work)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        def work(rows: Rows) -> None:
            meta = _rules.abort(rows.meta(key), token, called_off)
            if meta is not None:
                rows.put(key, meta)

        await self._write(work, flush=False)

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
        stored = [make_erased_record(one) for one in erased_records]

        def work(rows: Rows) -> SessionRow:
            now, before = self._now(), rows.meta(key)
            known = rows.committed_request(key, record.request_id)
            fresh = _rules.check_apply(before, known, fingerprint, record, expected_revision, now)
            meta = _rules.require_present(before, now)
            if not fresh:
                return _rules.view(meta, now)
            meta = _rules.after_append(meta, record, counts, now)
            for one in stored:
                _rules.check_replaces(one, rows.hash_at(key, one.revision), meta)
                rows.shrink(key, one)
            return _rules.view(rows.append(key, meta, record, fingerprint), now)

        return await self._write(work, erases=bool(stored))

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        def work(rows: Rows) -> bool:
            tombstone = _rules.delete(
                rows.meta_or_salvaged(key), key, expected_revision, allow_missing, self._now()
            )
            if tombstone is None:
                return False
            rows.erase(key)
            rows.put(key, tombstone)
            return True

        await self._write(work, erases=True)

    async def forget(self, key: Key, head_hash: str) -> None:
        def work(rows: Rows) -> bool:
            found = _rules.check_forget(rows.meta(key), head_hash, self._now())
            if found:
                rows.erase(key)
            return found

        await self._write(work, erases=True)

    async def mark_damaged(self, key: Key) -> None:
        await self._write(
            lambda rows: rows.put(
                key,
                _rules.with_damaged_state(_rules.require_present(rows.meta_or_salvaged(key), self._now())),
            )
        )

    async def purge_expired(self) -> int:
        """Remove expired sessions and tombstones in parts, so that commits go on; return how many."""
        removed = 0
        while some := await self._write(lambda rows: rows.purge(self._now(), PURGE_BATCH), erases=True):
            removed += some
        return removed

    async def _read(self, work: Callable[[Rows], T], tenant: str) -> T:
        return await self._with_repair(lambda: self._database.read(work, tenant))

    async def _write(self, work: Callable[[Rows], T], *, flush: bool = True, erases: bool = False) -> T:
        return await self._with_repair(lambda: self._database.write(work, flush=flush, erases=erases))

    async def _with_repair(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run ``call``. If it meets a damaged session, rebuild its derived rows and run it again."""
        rebuilt = set[Key]()
        while True:
            try:
                return await call()
            except DamagedSession as found:
                if found.key in rebuilt:
                    await self.mark_damaged(found.key)
                    raise _damaged_rows(found.key) from found
                rebuilt.add(found.key)
                await self._rebuild_derived(found.key)

    async def _repair_file(self, key: Key) -> bool:
        """Whether a repair of the file may have restored missing records. Tried once per session."""
        if (await self.load(key)).state is State.DAMAGED:
            return False
        return await self._database.repair()

    async def _rebuild_derived(self, key: Key) -> None:
        problem = "the history file contradicts the records of session %r of tenant %r: its derived rows are rebuilt"
        log.error(problem, key.session_id, key.tenant)
        await self._database.write(lambda rows: rows.rebuild_derived(key, self._now()))

    def _now(self) -> Moment:
        return Moment(self._wall_clock(), self._steady_clock())


def _damaged_rows(key: Key) -> DataLoss:
    return DataLoss(f"session {key.session_id!r}: its rows are damaged", reason="HISTORY_CORRUPT")


def _renew_one(rows: Rows, lease: HeldLease, lease_ms: int, now: Moment) -> RenewalAnswer | DamagedSession:
    try:
        news, meta = _rules.renew(rows.meta(lease.key), lease.token, lease_ms, now)
    except (PensieveError, DamagedSession) as error:
        return error
    rows.put(lease.key, meta)
    return news
