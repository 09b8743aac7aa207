"""History in one SQLite file, for one server. Durable against process kill, OS crash and power cut ("fsync").

All work runs in one thread that owns the one connection, so no method blocks the event loop and there is nothing to
lock. A second server on the same file is refused by a lock file whose lock dies with its process. Because of that
lock, a lease found at start belongs to a dead process and is ended at once; its seed stays for a retry of the turn.

Writes that only move a lease are not flushed to the disk (``synchronous = NORMAL``): losing one loses nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pensieve.store import _refusals, _rules
from pensieve.store._clock import wall_clock_ms
from pensieve.store._codec import marking_damage, read_log
from pensieve.store._listing import decode_cursor, encode_cursor, has_labels, position
from pensieve.store._sqlite.file import SqliteFile, is_full, translated
from pensieve.store._sqlite.rows import Rows
from pensieve.store.contract import (
    BeginOutcome,
    BeginRequest,
    Counts,
    EndOrder,
    Key,
    LoggedRecord,
    Page,
    Renewed,
)
from pensieve.store.records import Record, SessionRow

T = TypeVar("T")

URL_PREFIX = "sqlite:///"


class SqliteStore:
    """``HistoryStore`` over one file."""

    def __init__(self, path: Path, *, clock: Callable[[], int] = wall_clock_ms) -> None:
        """``clock``: ms since the epoch; the store's only time."""
        self._file = SqliteFile(path)
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """``sqlite:///relative/path`` or ``sqlite:////absolute/path``. Raises ValueError on other forms."""
        path = url.removeprefix(URL_PREFIX)
        if path == url or not path or path.endswith("/"):
            raise ValueError(f"bad store {url!r}: use sqlite:///relative/file or sqlite:////absolute/file")
        return cls(Path(path))

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def durability(self) -> str:
        return "fsync"

    @property
    def store_id(self) -> str:
        return self._file.store_id

    async def open(self) -> None:
        """Take the file. Raises FailedPrecondition when another server holds it or its schema is newer."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pensieve-sqlite")
        try:
            await self._in_thread(self._file.open)
            await self._write(Rows.end_leases)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for the work in hand, then release the file."""
        if self._thread is not None:
            await self._in_thread(self._file.close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def ping(self) -> None:
        await self._in_thread(self._file.check_in_place)
        await self._read(lambda rows: rows.known(Key("", ""), ""))

    async def create(self, row: SessionRow, record: Record, fingerprint: str) -> SessionRow:
        key = Key(row.tenant, row.session_id)

        def work(rows: Rows) -> SessionRow:
            now, before = self._clock(), rows.meta(key)
            meta = _rules.create(before, key, row, record, fingerprint, now)
            if meta is None:
                return _rules.view(_rules.present(before, now), now)
            rows.erase(key)  # what is left of an expired session of that name
            return _rules.view(rows.append(key, meta, record, None), now)

        return await self._write(work)

    async def load(self, key: Key) -> SessionRow:
        def work(rows: Rows) -> SessionRow:
            now = self._clock()
            return _rules.view(_rules.present(rows.meta(key), now), now)

        return await self._read(work)

    async def list_sessions(
        self, tenant: str, *, limit: int, cursor: str = "", labels: dict[str, str] | None = None
    ) -> Page:
        start = decode_cursor(cursor)

        def work(rows: Rows) -> Page:
            now = self._clock()
            wanted = (meta for meta in rows.newest(tenant, start, now) if has_labels(meta.row, labels))
            found = [_rules.view(meta, now) for meta in islice(wanted, limit + 1)]
            page = found[:limit]
            return Page(tuple(page), encode_cursor(position(page[-1])) if len(found) > limit else "")

        return await self._read(work)

    async def read(self, key: Key, *, after_revision: int = 0, head_hash: str = "") -> list[LoggedRecord]:
        def work(rows: Rows) -> list[LoggedRecord]:
            row = _rules.present(rows.meta(key), self._clock()).row
            stored = rows.log(key, after_revision)
            return read_log(key, row, stored, after_revision=after_revision, head_hash=head_hash)

        async with marking_damage(self, key):
            return await self._read(work)

    async def find_request(self, key: Key, request_id: str) -> int | None:
        def work(rows: Rows) -> int | None:
            _rules.present(rows.meta(key), self._clock())
            known = rows.known(key, request_id)
            return None if known is None else known.revision

        return await self._read(work)

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        def work(rows: Rows) -> BeginOutcome:
            known = rows.known(key, request.request_id)
            begun = _rules.begin(rows.meta(key), known, request, self._clock())
            if begun.meta is not None:
                rows.put(key, begun.meta)
            return begun.outcome

        return await self._write(work, flush=False)

    async def renew(self, key: Key, token: str, lease_ms: int) -> Renewed:
        def work(rows: Rows) -> Renewed:
            news, meta = _rules.renew(rows.meta(key), token, lease_ms, self._clock())
            rows.put(key, meta)
            return news

        return await self._write(work, flush=False)

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        def work(rows: Rows) -> bool:
            meta = _rules.ask_to_end(rows.meta(key), request_id, order, self._clock())
            if meta is not None:
                rows.put(key, meta)
            return meta is not None

        return await self._write(work, flush=False)

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        def work(rows: Rows) -> SessionRow:
            now, before = self._clock(), rows.meta(key)
            known = rows.known(key, record.request_id)
            meta = _rules.commit(before, known, token, fingerprint, record, counts, now)
            after = (
                _rules.present(before, now) if meta is None else rows.append(key, meta, record, fingerprint)
            )
            return _rules.view(after, now)

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
    ) -> SessionRow:
        def work(rows: Rows) -> SessionRow:
            now, before = self._clock(), rows.meta(key)
            known = rows.known(key, record.request_id)
            meta = _rules.apply(before, known, fingerprint, record, counts, expected_revision, now)
            after = (
                _rules.present(before, now) if meta is None else rows.append(key, meta, record, fingerprint)
            )
            return _rules.view(after, now)

        return await self._write(work)

    async def delete(
        self, key: Key, *, expected_revision: int | None = None, allow_missing: bool = False
    ) -> None:
        def work(rows: Rows) -> bool:
            tombstone = _rules.delete(rows.meta(key), key, expected_revision, allow_missing, self._clock())
            if tombstone is None:
                return False
            rows.erase(key)
            rows.put(key, tombstone)
            return True

        if await self._write(work):
            await self._in_thread(self._erase_log_of_changes)

    async def mark_damaged(self, key: Key) -> None:
        await self._write(
            lambda rows: rows.put(key, _rules.damage(_rules.present(rows.meta(key), self._clock())))
        )

    async def purge_expired(self) -> int:
        """Remove sessions and tombstones whose time is over; returns how many."""
        return await self._write(lambda rows: rows.purge(self._clock()))

    async def _read(self, work: Callable[[Rows], T]) -> T:
        """``work`` in the database thread. One connection, one thread: nothing can change in between."""

        def run() -> T:
            connection = self._file.connection()
            try:
                return work(Rows(connection))
            except sqlite3.DatabaseError as error:
                raise self._failed(error) from error

        return await self._in_thread(run)

    async def _write(self, work: Callable[[Rows], T], *, flush: bool = True) -> T:
        """``work`` in one transaction, which is rolled back when anything raises."""

        def run() -> T:
            connection = self._file.connection()
            try:
                connection.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
                try:
                    result = work(Rows(connection))
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as error:
                raise self._failed(error) from error
            return result

        return await self._in_thread(run)

    def _failed(self, error: sqlite3.DatabaseError) -> Exception:
        """What to raise for ``error``; after anything but a full disk the file is opened afresh next time."""
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.DataError):
            return error
        if not is_full(error):
            self._file.drop_connection()
        return translated(error, self._file.path)

    def _erase_log_of_changes(self) -> None:
        """Empty the write-ahead log, where deleted content would otherwise stay readable for a while."""
        try:
            self._file.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from error

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise _refusals.unavailable("the store is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
