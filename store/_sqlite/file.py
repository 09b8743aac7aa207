"""The SQLite file under ``sqlite_store``: its lock, its connections, its WAL, and whether it is in place.

All in the store's one database thread. Every new connection first makes the file's content durable, so
nothing that is read or answered can be undone by a power cut.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pensieve.errors import DataLoss, PensieveError
from pensieve.store import _refusals
from pensieve.store._raw import Progress
from pensieve.store._rules import Moment, steady_clock_ms, wall_clock_ms
from pensieve.store._sqlite import schema
from pensieve.store._sqlite.disk import (
    FileLock,
    FilePlaces,
    Identity,
    PlaceStatus,
    content_digest,
    identity_of,
    log_of_changes,
    make_durable,
    size_of,
)
from pensieve.store._sqlite.errors import (
    SQLITE_ERRORS,
    lenient_text,
    may_be_damage,
    os_to_store_error,
    primary_code,
    to_store_error,
)
from pensieve.store._sqlite.examination import (
    PATIENCE_S,
    OutOfTime,
    is_sound,
    rebuild_all_derived,
    reindex,
    time_limit,
)
from pensieve.store._sqlite.reader import SqliteReader
from pensieve.store._sqlite.recovery import NothingFound, finish_rebuild, hidden_damage, rebuild_file

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS: Final = 5000
REOPEN_PAUSE_S: Final = 0.25
"""Pause after a failed open, so that not every call asks a sick disk."""
LOG_BYTES: Final = 4 << 20
"""Size from which the WAL is emptied when no read is in progress."""
SHORT_BYTES: Final = 16 << 20
"""With less free space the WAL is emptied while it is small: emptying a large one needs room."""
SHORT_LOG_BYTES: Final = 256 << 10
MOST_LOG_BYTES: Final = 64 << 20
"""Size from which reads are interrupted to empty the WAL."""
LEAST_FREE_BYTES: Final = 1 << 20
"""With less free space the disk counts as full."""
AGAIN_S: Final = 60.0
"""Pause between checks of the whole file, which take as long as the file is large."""


def _system_time() -> Moment:
    return Moment(wall_clock_ms(), steady_clock_ms())


class SqliteFile:
    """One history file, held exclusively between ``open`` and ``close``."""

    def __init__(self, path: Path, now: Callable[[], Moment] = _system_time) -> None:
        self.path = path
        self._now = now
        self.store_id = ""
        self.reads = SqliteReader(path, "pensieve-sqlite-reads", BUSY_TIMEOUT_MS)
        self.listings = SqliteReader(path, "pensieve-sqlite-lists", BUSY_TIMEOUT_MS)
        self.logs = SqliteReader(path, "pensieve-sqlite-logs", BUSY_TIMEOUT_MS)
        self._real = path
        """The target of ``path`` if it is a link: SQLite keeps its other files beside the target."""
        self._log = log_of_changes(path)
        self._connection: sqlite3.Connection | None = None
        self._claim = FileLock()
        self._home: Identity | None = None
        """The file that was opened first. After a disk error no other file is accepted."""
        self._places: FilePlaces | None = None
        self._empty_at = LOG_BYTES
        self._refusal: PensieveError | None = None
        self._refuse_until = 0.0
        self._checked_at = -math.inf
        self._is_busy = False
        """The last change found the file in use to the end of its wait."""

    def open(self, *, look_over: bool = True, progress: Progress | None = None) -> None:
        """Lock the file; create or check its schema. Raises FailedPrecondition, Unavailable or DataLoss.

        A damaged file that cannot be opened is rebuilt; with ``look_over``, any damaged file is repaired.
        """
        try:
            self._refusal = self._home = None
            self._lock()
            self._open_or_renew(progress)
            if look_over:
                self._check_and_repair(PATIENCE_S, progress)
        except BaseException:
            self.close()
            raise

    def repair(self, progress: Progress | None = None) -> bool:
        """Check and repair the whole file, at most once in AGAIN_S; return whether it was damaged."""
        if time.monotonic() - self._checked_at < AGAIN_S:
            return False
        self.connection()
        repaired = self._check_and_repair(math.inf, progress)
        self._checked_at = -math.inf if repaired else time.monotonic()
        return repaired

    def close(self) -> None:
        """May be called twice."""
        for reader in self._readers:
            reader.shut_down()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        self._close_places()
        self._claim.release()
        self._checked_at = -math.inf

    def connection(self) -> sqlite3.Connection:
        """Return the writing connection, a new one after ``close_after_error``. Raises the store's errors."""
        if not self._claim.held:
            raise _refusals.unavailable("the store is not open")
        if self._connection is None:
            if self._refusal is not None and time.monotonic() < self._refuse_until:
                raise copy.copy(self._refusal)
            try:
                self._connection = self._connect()
            except PensieveError as error:
                self._refusal, self._refuse_until = error, time.monotonic() + REOPEN_PAUSE_S
                raise
            if self._refusal is not None:
                log.warning("the history file is open again, and its content is on the disk")
            self._refusal = None
        return self._connection

    def close_after_error(self, problem: PensieveError) -> None:
        """Close all connections: the file's state is unknown after ``problem``."""
        if self._connection is None:
            return
        log.error("the history file is closed until its content is proven: %s", problem.message)
        self._refusal, self._refuse_until = problem, 0.0
        connection, self._connection = self._connection, None
        self._close_connections(connection)

    def check_in_place(self) -> None:
        """Raise Unavailable (STORE_REPLACED) if the paths no longer lead to the open files.

        SQLite would go on writing to a file that cannot be found. If only the WAL was deleted, its content is
        saved.
        """
        found = PlaceStatus.IN_PLACE if self._places is None else self._places.check()
        if found is PlaceStatus.LOG_DELETED:
            self._recover_log()
        elif found is PlaceStatus.MOVED:
            raise self._moved()

    def check_space(self) -> None:
        """Raise Unavailable (STORE_FULL) if the file system is full or read-only. Raises OSError."""
        if os.statvfs(self._real.parent).f_flag & os.ST_RDONLY:
            raise _refusals.full(f"{self.path}: the file system is read-only")
        free = self._free_bytes()
        if free < LEAST_FREE_BYTES:
            raise _refusals.full(f"{self.path}: only {free:.0f} bytes are free on its file system")

    @property
    def should_empty_log(self) -> bool:
        """Whether the WAL has grown enough since it was emptied, or since the last attempt."""
        if self._connection is None or (grown := size_of(self._log)) < min(self._empty_at, SHORT_LOG_BYTES):
            return False
        if grown >= self._empty_at:
            return True
        try:
            return self._free_bytes() < SHORT_BYTES
        except OSError:  # the next ping reports it
            return True

    def empty_log(self, *, at_once: bool = False) -> bool:
        """Checkpoint the WAL into the database file and empty it. Raises sqlite3's errors.

        Reads in progress prevent that; they are interrupted above MOST_LOG_BYTES, or with ``at_once``.
        Returns False if another program reads the file.
        """
        connection = self._connection
        grown = size_of(self._log)
        if connection is None or not grown:
            return True
        done = self._checkpoint(connection, interrupt=at_once or grown >= MOST_LOG_BYTES)
        self._empty_at = LOG_BYTES if done else grown + LOG_BYTES
        if not done and grown >= MOST_LOG_BYTES:
            log.warning(
                "another program reads %s and keeps its write-ahead log at %d bytes", self.path, grown
            )
        return done

    def _free_bytes(self) -> float:
        """Return infinity if the file system does not say. Raises OSError."""
        found = os.statvfs(self._real.parent)
        free = found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)
        return free if found.f_blocks else math.inf

    @property
    def _readers(self) -> tuple[SqliteReader, ...]:
        return self.reads, self.listings, self.logs

    def _lock(self) -> None:
        """Raise FailedPrecondition (STORE_LOCKED), Unavailable."""
        self._real = Path(os.path.realpath(self.path))
        self._log = log_of_changes(self._real)
        self._claim.acquire(self._real)
        if finish_rebuild(self._real):
            self._claim.lock_replacement(self._real)
        self._home = identity_of(self._real)

    def _open_or_renew(self, progress: Progress | None) -> None:
        with self._translating():
            if problem := hidden_damage(self._real):
                log.error("%s: %s", self.path, problem)
                with contextlib.suppress(NothingFound):
                    self._rebuild(progress)
        try:
            self.connection()
        except PensieveError as error:
            if not may_be_damage(error):
                raise
            log.error("%s", error.message)
            self._refusal = None
            try:
                with self._translating():
                    self._rebuild(progress)
            except NothingFound:
                raise error from None
            self.connection()

    def _check_and_repair(self, patience_s: float, progress: Progress | None) -> bool:
        """Check the file and repair it; return whether it was damaged."""
        connection, changed = self.connection(), False
        try:
            with self._translating():
                with time_limit(connection, patience_s):
                    sound = is_sound(connection)
                if not sound:
                    changed = True
                    log.error("the history file %s has damaged pages or indexes", self.path)
                    if not reindex(connection):
                        self._rebuild(progress)
                        connection = self.connection()
                with time_limit(connection, patience_s):
                    changed |= rebuild_all_derived(connection, self._now()) > 0
        except OutOfTime:
            log.warning("%s is large: run `pensieve store check` to check all of it", self.path)
        except NothingFound as error:
            raise DataLoss(f"{self.path}: no session can be read", reason="HISTORY_CORRUPT") from error
        return changed

    def _rebuild(self, progress: Progress | None) -> None:
        """Replace the file with its readable sessions. Raises NothingFound, OSError and sqlite3's errors."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._close_connections(connection)
        self._close_places()
        rebuild_file(self._real, self._now(), progress, store_id=self.store_id)
        self._claim.lock_replacement(self._real)
        self._home = identity_of(self._real)

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise os_to_store_error(error, self.path) from error
        except SQLITE_ERRORS as error:
            raise to_store_error(error, self.path) from error

    def _checkpoint(self, connection: sqlite3.Connection, *, interrupt: bool) -> bool:
        """Return False if a read or another program kept the WAL from being emptied. Raises sqlite3's errors."""
        with contextlib.ExitStack() as stack:
            paused = [reader.paused(interrupt=interrupt) for reader in self._readers]
            empty = all([stack.enter_context(one) for one in paused])
            mode = "TRUNCATE" if empty else "PASSIVE"
            with self._no_busy_wait(connection):
                ((busy, _, _),) = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        return empty and not busy

    def _recover_log(self) -> None:
        """Save the deleted WAL, which is still open, into the database file, and begin a new one."""
        connection = self._connection
        if connection is None:
            return
        log.error("the write-ahead log of %s was deleted while in use: saving its content", self.path)
        with self._translating():
            saved = self._checkpoint(connection, interrupt=True)
        if not saved:
            raise _refusals.unavailable(f"{self.path}: another program reads the deleted write-ahead log")
        self._connection = None
        self._close_connections(connection)
        self.connection()

    def _close_places(self) -> None:
        if self._places is not None:
            places, self._places = self._places, None
            places.close()

    def _connect(self) -> sqlite3.Connection:
        with self._translating():
            if identity_of(self.path) != self._home:
                raise self._moved()
            seen = content_digest(self._log)
            connection = sqlite3.connect(self._real, isolation_level=None, check_same_thread=False)
            connection.text_factory = lenient_text
            try:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                self._set_up(connection, seen)
            except BaseException:
                self._close_connections(connection)
                raise
        return connection

    def _moved(self) -> PensieveError:
        return _refusals.replaced(f"{self.path} was deleted or replaced while in use")

    def _set_up(self, connection: sqlite3.Connection, seen: bytes) -> None:
        """Prepare an opened connection for use."""
        connection.execute("PRAGMA user_version").fetchone()  # rolls back a first change that was cut off
        for reader in self._readers:
            reader.connect()
        found = schema.read_schema(connection, self.path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # its errors would go unnoticed
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        for reader in self._readers:
            reader.touch()
        make_durable(connection, self._real, seen)
        store_id = schema.migrate(connection, found)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"{self.path} was replaced by another history file")
        self.store_id = store_id
        self._close_places()
        self._places = FilePlaces(self.path, self._real)
        with self._no_busy_wait(connection):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._empty_at = LOG_BYTES

    def _close_connections(self, connection: sqlite3.Connection) -> None:
        """Close all connections and leave the WAL as it is.

        The last connection to close would checkpoint the WAL and delete it, but its content may not be on the
        disk. So the readers' connections close last: they cannot write.
        """
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        for reader in self._readers:
            reader.close()

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a change. Changes wait one after the other: while another program writes, only the first one waits."""
        try:
            with self._no_busy_wait(connection) if self._is_busy else contextlib.nullcontext():
                connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            self._is_busy = primary_code(error) == sqlite3.SQLITE_BUSY
            raise
        self._is_busy = False

    @contextlib.contextmanager
    def _no_busy_wait(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Make a statement that finds the file in use fail at once."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            yield
        finally:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
