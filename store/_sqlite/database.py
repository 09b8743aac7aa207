"""Work on the history file: changes in one thread, one after the other, and reads beside them.

A change is told to have been made when it is on the disk and the file is still where its name says. After an error of
the disk the file is closed (``file``), and every call is refused until what it says has been made durable.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from pensieve.errors import DataLoss, PensieveError, Unavailable
from pensieve.store import _refusals
from pensieve.store._clock import Moment
from pensieve.store._sqlite.errors import is_damage, is_full, leaves_file_known, to_store_error, translated_os
from pensieve.store._sqlite.file import SqliteFile
from pensieve.store._sqlite.reader import InterruptedRead, SqliteReader
from pensieve.store._sqlite.rows import RequestIdCache, Rows

log = logging.getLogger(__name__)

T = TypeVar("T")

PROOF_S: Final = 1.0
"""A flushed change proves for so long that changes are possible; after that ``prove_writable`` makes one."""
READ_ATTEMPTS: Final = 5


class SqliteDatabase:
    """The public methods belong to the event loop; none of them blocks it."""

    def __init__(self, path: Path, now: Callable[[], Moment], on_error: Callable[[], None]) -> None:
        """``on_error`` is called, from any thread, for each call but ``prove_writable`` that could not be served."""
        self.file = SqliteFile(path, now)
        self._now = now
        self._on_error = on_error
        self._thread: ThreadPoolExecutor | None = None
        self._proven_at = -PROOF_S
        """When a change was last flushed, by the monotonic clock."""
        self._damage: PensieveError | None = None
        """Set once a change has met a damaged page: then the file needs a hand."""
        self._urgent = deque[Callable[[], None]]()
        """Changes that go before those that wait for the thread; emptied by the thread alone."""
        self._erasing = False
        """Deleted content is still in the log of changes."""
        self._ids = RequestIdCache()
        """Belongs to the thread. The sums in the file's rows tell which of them still hold."""

    async def open(self) -> None:
        """Raises FailedPrecondition when another server holds the file or its schema is newer; Unavailable."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pensieve-sqlite")
        self._damage = None
        await self._in_thread(self.file.open)

    async def close(self) -> None:
        """Wait for the work in hand, then release the file."""
        if self._thread is not None:
            await self._in_thread(self.file.close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def read(self, work: Callable[[Rows], T], tenant: str) -> T:
        """``work`` in one read transaction; it may run more than once. For what reads a row or two."""
        return await self._read(work, self.file.reads, tenant)

    async def read_log(self, work: Callable[[Rows], T], tenant: str) -> T:
        """Like ``read``, for a slice of a log."""
        return await self._read(work, self.file.logs, tenant)

    async def list(self, work: Callable[[Rows], T], tenant: str) -> T:
        """Like ``read``, for what may take long: single sessions are read meanwhile."""
        return await self._read(work, self.file.listings, tenant)

    async def write(self, work: Callable[[Rows], T], *, flush: bool = True) -> T:
        """``work`` in one transaction, which is rolled back when anything raises."""

        def change() -> T:
            self._do_urgent()
            return self._change(work, flush=flush)

        return await self._counted(change)

    async def write_urgent(self, work: Callable[[Rows], T]) -> T:
        """``write``, not flushed, ahead of all changes that wait: for what must not be late when many do."""
        done = Future[T]()

        def change() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(self._change(work, flush=False))
                except BaseException as error:
                    done.set_exception(error)

        if self._thread is None:
            raise _refusals.unavailable("the store is not open")
        self._urgent.append(change)
        self._thread.submit(self._do_urgent)  # should no other change come before
        return await self._counting(asyncio.wrap_future(done))

    async def erase_log(self) -> None:
        """Empty the log of changes, where deleted content would otherwise stay readable for a while."""
        self._erasing = True
        await self._in_thread(lambda: self._tidy(at_once=True))

    async def prove_writable(self) -> None:
        """Raises Unavailable or DataLoss when no change could be made; tries one if none was made just now."""
        await self._in_thread(self._prove_writable)

    async def repair(self) -> bool:
        """Look over the whole file; whether anything was made good. Raises the store's errors."""
        return await self._counted(self._mended)

    async def _read(self, work: Callable[[Rows], T], reader: SqliteReader, tenant: str) -> T:
        for _ in range(READ_ATTEMPTS):
            try:
                return await reader.run(lambda connection: work(Rows(connection)), tenant)
            except InterruptedRead:
                await self._counted(self.file.connection)
            except sqlite3.DatabaseError as error:
                if is_damage(error) and await self._counted(self._mended):
                    continue
                problem = await self._in_thread(lambda met=error: self._failed(met))  # type: ignore[misc]
                self._on_error()
                raise problem from error
        self._on_error()
        raise _refusals.unavailable("the read was interrupted too often")

    def _mended(self) -> bool:
        try:
            mended = self.file.repair()
        except DataLoss:
            return False
        if mended:
            self._damage = None
        return mended

    def _change(self, work: Callable[[Rows], T], *, flush: bool) -> T:
        try:
            return self._changed(work, flush=flush)
        except DataLoss as error:
            damage = error.__cause__
            if isinstance(damage, sqlite3.DatabaseError) and is_damage(damage) and self._mended():
                return self._changed(work, flush=flush)
            raise

    def _changed(self, work: Callable[[Rows], T], *, flush: bool) -> T:
        connection = self.file.connection()
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                rows = Rows(connection, self._ids)
                result = work(rows)
                connection.execute("COMMIT")
                rows.on_commit()
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._damage = to_store_error(error, self.file.path)
            problem = self._failed(error)
            if is_full(error):
                self._tidy()  # what the log of changes takes may be all that is missing
            raise problem from error
        self.file.check_in_place()
        if flush:
            self._proven_at = time.monotonic()
        if self.file.wants_emptying and self._thread is not None:
            self._thread.submit(self._tidy)  # behind this change, whose caller need not wait for it
        return result

    def _prove_writable(self) -> None:
        self.file.connection()
        self.file.check_in_place()
        if self._damage is not None:
            raise DataLoss(self._damage.message, reason="HISTORY_CORRUPT")
        self._check_space()
        if time.monotonic() - self._proven_at >= PROOF_S:
            self._change(lambda rows: rows.beat(self._now()), flush=True)
        if self._erasing:
            self._tidy()

    def _check_space(self) -> None:
        try:
            try:
                self.file.check_space()
            except Unavailable:
                self._tidy()
                self.file.check_space()
        except OSError as error:
            raise translated_os(error, self.file.path) from error

    def _tidy(self, *, at_once: bool = False) -> None:
        try:
            if self.file.empty_log(at_once=at_once or self._erasing):
                self._erasing = False
        except sqlite3.DatabaseError as error:
            self._failed(error)
            self._on_error()

    def _failed(self, error: sqlite3.DatabaseError) -> Exception:
        """What to raise for ``error``; after an error of the disk nothing is known of the file any more."""
        if isinstance(error, sqlite3.ProgrammingError | sqlite3.DataError):
            return error
        problem = to_store_error(error, self.file.path)
        self._proven_at = -PROOF_S
        if not leaves_file_known(error) and not is_damage(error):
            self.file.close_after_error(problem)
        return problem

    def _do_urgent(self) -> None:
        while self._urgent:
            self._urgent.popleft()()

    async def _counted(self, work: Callable[[], T]) -> T:
        """``work`` for a caller: that it could not be served is counted."""
        return await self._counting(self._in_thread(work))

    async def _counting(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except (Unavailable, DataLoss):
            self._on_error()
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise _refusals.unavailable("the store is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
