"""Reading beside the writer: a thread with a read-only connection of its own, which tenants share fairly.

The next read is one of the tenant that has waited longest since its last one, so that a tenant with many reads makes
another wait for one read at most.

A read sees the file as it was when the read began, whatever is committed meanwhile; a commit that was acknowledged
before is in it. While a read is in hand, the log of changes cannot be emptied, so a reader can be told to pause: the
read in hand is interrupted when it takes too long, and done again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from pensieve.store import _refusals
from pensieve.store._sqlite.errors import is_interrupt, lenient_text

T = TypeVar("T")

MAX_WAITING: Final = 1000
"""Reads of one tenant that may wait for one reader; further ones are refused at once."""
PATIENCE_S: Final = 0.1
"""How long a pause waits for the read in hand before it interrupts it."""


class InterruptedRead(Exception):
    """The connection is closed, or the read was interrupted: it may be done again."""


class SqliteReader:
    """``run`` belongs to the event loop, everything else to the database thread."""

    def __init__(self, path: Path, name: str, busy_timeout_ms: int) -> None:
        self._path = path
        self._name = name
        self._busy_timeout_ms = busy_timeout_ms
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = OrderedDict[str, deque[Callable[[], None]]]()
        """Tenants that have reads waiting, the next one first; changed under ``_turns``."""
        self._turns = threading.Lock()
        self._lock = threading.Lock()
        """Held by whoever uses the connection."""
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T], tenant: str) -> T:
        """``work`` in one read transaction, when it is the tenant's turn.

        A read that has no caller any more is not begun. Raises InterruptedRead, Unavailable, and what ``work`` raises.
        """
        thread = self._thread
        if thread is None:
            raise InterruptedRead
        done = Future[T]()

        def read() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(self._read(work))
                except BaseException as error:
                    done.set_exception(error)

        with self._turns:
            if len(self._waiting.get(tenant, ())) >= MAX_WAITING:
                raise _refusals.unavailable("too many reads of this tenant are waiting")
            try:
                thread.submit(self._do_next)
            except RuntimeError as error:  # the thread was ended just now
                raise InterruptedRead from error
            self._waiting.setdefault(tenant, deque()).append(read)
        return await asyncio.wrap_future(done)

    def connect(self) -> None:
        """Open the connection. Raises sqlite3's errors."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        # Read-only for a second reason: closed as the last one, such a connection leaves the log of changes alone.
        self._connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self._connection.text_factory = lenient_text
        self._connection.execute(f"PRAGMA busy_timeout = {self._busy_timeout_ms}")
        self.touch()

    def touch(self) -> None:
        """Read something: from its first read on a connection counts as a user of the file. Raises sqlite3's errors."""
        if self._connection is not None:
            self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()

    def close(self) -> None:
        """Close the connection; the thread stays for the next one. May be called twice."""
        with self.paused():
            if self._connection is not None:
                connection, self._connection = self._connection, None
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def end(self) -> None:
        """Close the connection and let the thread end."""
        self.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    @contextlib.contextmanager
    def paused(self, *, interrupt: bool = True) -> Iterator[bool]:
        """No read is in hand meanwhile. Without ``interrupt`` a long one goes on, and False is yielded."""
        held = self._lock.acquire(timeout=PATIENCE_S if interrupt else 0)
        while interrupt and not held:
            if self._connection is not None:
                self._connection.interrupt()
            held = self._lock.acquire(timeout=PATIENCE_S)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _do_next(self) -> None:
        """One read of the tenant whose turn it is. Each read that waits has the thread do this once."""
        with self._turns:
            if not self._waiting:
                return
            tenant, queue = self._waiting.popitem(last=False)
            read = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        read()

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            connection = self._connection
            if connection is None:
                raise InterruptedRead
            try:
                connection.execute("BEGIN")
                try:
                    return work(connection)
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.OperationalError as error:
                if is_interrupt(error):
                    raise InterruptedRead from error
                raise
