"""Reading beside the writer: a thread with its own read-only connection, shared fairly by tenants.

The next read belongs to the tenant whose last read is longest ago. A read sees the file as it was when it
began. A read in progress keeps the WAL from being emptied, so a reader can be paused: a read that takes too
long is interrupted and repeated later.
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
"""How long a pause waits for the read in progress before it interrupts it."""


class InterruptedRead(Exception):
    """The read may be repeated."""


class SqliteReader:
    """``run`` belongs to the event loop, all other methods to the database thread."""

    def __init__(self, path: Path, name: str, busy_timeout_ms: int) -> None:
        self._path = path
        self._name = name
        self._busy_timeout_ms = busy_timeout_ms
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = OrderedDict[str, deque[Callable[[], None]]]()
        """Waiting reads by tenant, the next tenant first; guarded by ``_turns``."""
        self._turns = threading.Lock()
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T], tenant: str) -> T:
        """Run ``work`` in one read transaction when it is the tenant's turn, unless its caller was cancelled.

        Raises InterruptedRead, Unavailable, and what ``work`` raises.
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
            except RuntimeError as error:  # the thread was just shut down
                raise InterruptedRead from error
            self._waiting.setdefault(tenant, deque()).append(read)
        return await asyncio.wrap_future(done)

    def connect(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        # Read-only also because such a connection, if closed last, leaves the WAL alone.
        self._connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self._connection.text_factory = lenient_text
        self._connection.execute(f"PRAGMA busy_timeout = {self._busy_timeout_ms}")
        self.touch()

    def touch(self) -> None:
        """Read something: only then does a connection count as a user of the file. Raises sqlite3's errors."""
        if self._connection is not None:
            self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()

    def close(self) -> None:
        """The thread stays for the next connection. May be called twice."""
        with self.paused():
            if self._connection is not None:
                connection, self._connection = self._connection, None
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def shut_down(self) -> None:
        self.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    @contextlib.contextmanager
    def paused(self, *, interrupt: bool = True) -> Iterator[bool]:
        """Keep reads from running. Without ``interrupt``, a read in progress continues and False is yielded."""
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
        """Run one read of the next tenant. Each waiting read submits this once."""
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
