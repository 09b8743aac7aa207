"""Threads over the history file: one makes all changes in turn, others read beside it.

After a disk error the file is closed (``file``), and every call is refused until its content is durable
again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from pensieve.errors import DataLoss, PensieveError, Unavailable
from pensieve.store import _refusals
from pensieve.store._rules import Moment
from pensieve.store._sqlite.errors import (
    is_damage,
    is_full,
    leaves_file_known,
    os_to_store_error,
    to_store_error,
)
from pensieve.store._sqlite.file import SqliteFile
from pensieve.store._sqlite.reader import InterruptedRead, SqliteReader
from pensieve.store._sqlite.rows import RequestIdCache, Rows

T = TypeVar("T")

PROOF_S: Final = 1.0
"""A flushed change proves that changes are possible for this long; then ``prove_writable`` makes one."""
READ_ATTEMPTS: Final = 5


class SqliteDatabase:
    """Public methods belong to the event loop; none of them blocks it."""

    def __init__(self, path: Path, now: Callable[[], Moment], on_error: Callable[[], None]) -> None:
        """``on_error``: see ``open_store``; ``prove_writable`` does not call it."""
        self.file = SqliteFile(path, now)
        self._now = now
        self._on_error = on_error
        self._thread: ThreadPoolExecutor | None = None
        self._proven_at = -PROOF_S
        """When a change was last flushed, by the monotonic clock."""
        self._damage: PensieveError | None = None
        """Set once a change has met a damaged page: the file then needs an operator."""
        self._urgent = deque[Callable[[], None]]()
        """Changes that go ahead of the thread's queue. Only the thread removes entries."""
        self._erasing = False
        self._ids = RequestIdCache()
        """Owned by the thread. The sums in the file's rows tell which entries are still valid."""

    async def open(self) -> None:
        """Raise FailedPrecondition if another server holds the file or its schema is newer; Unavailable."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pensieve-sqlite")
        self._damage = None
        await self._in_thread(self.file.open)

    async def close(self) -> None:
        """Wait for work in progress, then release the file."""
        if self._thread is not None:
            await self._in_thread(self.file.close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def read(self, work: Callable[[Rows], T], tenant: str) -> T:
        """Run ``work`` in one read transaction, possibly more than once. For reads of a row or two."""
        return await self._read(work, self.file.reads, tenant)

    async def read_log(self, work: Callable[[Rows], T], tenant: str) -> T:
        """As ``read``, for a slice of a log."""
        return await self._read(work, self.file.logs, tenant)

    async def list(self, work: Callable[[Rows], T], tenant: str) -> T:
        """As ``read``, for long reads, which do not delay others."""
        return await self._read(work, self.file.listings, tenant)

    async def write(self, work: Callable[[Rows], T], *, flush: bool = True, erases: bool = False) -> T:
        """Run ``work`` in one transaction, which is rolled back on any error.

        ``erases``: a true result means that content was deleted. Then empty the WAL, so that the content does not stay
        readable in it, also for a caller that was cancelled meanwhile.
        """

        def change() -> T:
            self._run_urgent()
            result = self._change(work, flush=flush)
            if erases and result:
                self._erasing = True
                self._tidy()
            return result

        return await self._run_counted(change)

    async def write_urgent(self, work: Callable[[Rows], T]) -> T:
        """As ``write``, not flushed, ahead of all waiting changes."""
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
        self._thread.submit(self._run_urgent)  # in case no other change comes first
        return await self._count_errors(asyncio.wrap_future(done))

    @property
    def is_erasing(self) -> bool:
        """Whether the WAL may hold deleted content, because another program reads the file."""
        return self._erasing

    async def prove_writable(self) -> None:
        await self._in_thread(self._prove_writable)

    async def repair(self) -> bool:
        """Check the whole file and repair it; return whether it was damaged. Raises the store's errors."""
        return await self._run_counted(self._repair)

    async def _read(self, work: Callable[[Rows], T], reader: SqliteReader, tenant: str) -> T:
        for _ in range(READ_ATTEMPTS):
            try:
                return await reader.run(lambda connection: work(Rows(connection)), tenant)
            except InterruptedRead:
                await self._run_counted(self.file.connection)
            except sqlite3.DatabaseError as error:
                if is_damage(error) and await self._run_counted(self._repair):
                    continue
                problem = await self._in_thread(lambda met=error: self._handle_error(met))  # type: ignore[misc]
                self._on_error()
                raise problem from error
        self._on_error()
        raise _refusals.unavailable("the read was interrupted too often")

    def _repair(self) -> bool:
        try:
            repaired = self.file.repair()
        except DataLoss:
            return False
        if repaired:
            self._damage = None
        return repaired

    def _change(self, work: Callable[[Rows], T], *, flush: bool) -> T:
        try:
            return self._change_once(work, flush=flush)
        except DataLoss as error:
            damage = error.__cause__
            if isinstance(damage, sqlite3.DatabaseError) and is_damage(damage) and self._repair():
                return self._change_once(work, flush=flush)
            raise

    def _change_once(self, work: Callable[[Rows], T], *, flush: bool) -> T:
        connection = self.file.connection()
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
            self.file.begin(connection)
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
            problem = self._handle_error(error)
            if is_full(error):
                self._tidy()  # the WAL may take the missing space
            raise problem from error
        self.file.check_in_place()
        if flush:
            self._proven_at = time.monotonic()
        if self.file.should_empty_log and self._thread is not None:
            self._thread.submit(self._tidy)  # after this change, so that its caller does not wait
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
            raise os_to_store_error(error, self.file.path) from error

    def _tidy(self) -> None:
        try:
            if self.file.empty_log(at_once=self._erasing):
                self._erasing = False
        except sqlite3.DatabaseError as error:
            self._handle_error(error)
            self._on_error()

    def _handle_error(self, error: sqlite3.DatabaseError) -> Exception:
        """Return the exception to raise for ``error``. After a disk error, close the file: its state is unknown."""
        if isinstance(error, sqlite3.ProgrammingError | sqlite3.DataError):
            return error
        problem = to_store_error(error, self.file.path)
        self._proven_at = -PROOF_S
        if not leaves_file_known(error) and not is_damage(error):
            self.file.close_after_error(problem)
        return problem

    def _run_urgent(self) -> None:
        while self._urgent:
            self._urgent.popleft()()

    async def _run_counted(self, work: Callable[[], T]) -> T:
        return await self._count_errors(self._in_thread(work))

    async def _count_errors(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except (Unavailable, DataLoss):
            self._on_error()
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise _refusals.unavailable("the store is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
