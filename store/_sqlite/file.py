"""The SQLite file under ``sqlite_store``: its lock, its connections, its log of changes, and whether it is in place.

Everything here runs in the store's one database thread. There is one way to a connection, at start and after an error
alike: what the file says is made durable first, so nothing that is read or answered can be undone by a power cut.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve.errors import FailedPrecondition, PensieveError
from pensieve.store import _refusals
from pensieve.store._sqlite import schema
from pensieve.store._sqlite.durable import content_digest, log_of_changes, make_durable, sync_folder
from pensieve.store._sqlite.errors import lenient_text, translated, translated_os
from pensieve.store._sqlite.reader import SqliteReader

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS: Final = 5000
REOPEN_PAUSE_S: Final = 0.25
"""After the file could not be opened it is left alone for so long: a sick disk is not asked at every call."""
LOG_BYTES: Final = 4 << 20
"""Size of the log of changes from which on it is emptied, when no read is in hand."""
MOST_LOG_BYTES: Final = 64 << 20
"""Size from which on reads are interrupted to empty it."""
LEAST_FREE_BYTES: Final = 1 << 20
"""With less free space the disk counts as full, although small changes may still fit."""

Identity = tuple[int, int]
"""Device and inode."""


class SqliteFile:
    """One history file, held exclusively by this object between ``open`` and ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store_id = ""
        self.reads = SqliteReader(path, "pensieve-sqlite-reads", BUSY_TIMEOUT_MS)
        self.listings = SqliteReader(path, "pensieve-sqlite-lists", BUSY_TIMEOUT_MS)
        self._log = log_of_changes(path)
        self._connection: sqlite3.Connection | None = None
        self._lock_fd: int | None = None
        self._home: Identity | None = None
        """The file that was opened first: after an error of the disk no other one is taken for it."""
        self._places: tuple[Identity, Identity] | None = None
        self._empty_at = LOG_BYTES
        self._refusal: PensieveError | None = None
        self._refuse_until = 0.0

    def open(self) -> None:
        """Lock the file, create or check its schema. Raises FailedPrecondition or Unavailable."""
        try:
            self._lock()
            self._refusal = self._home = None
            self.connection()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and release the lock. May be called twice."""
        self.reads.end()
        self.listings.end()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def connection(self) -> sqlite3.Connection:
        """The writing connection; a new one after ``drop``. Raises the store's own errors."""
        if self._lock_fd is None:
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
                log.warning("the history file is open again, and what it says is on the disk")
            self._refusal = None
        return self._connection

    def drop(self, problem: PensieveError) -> None:
        """Forget all connections, because nothing is known of the file after ``problem``."""
        if self._connection is None:
            return
        log.error("the history file is closed until it is proven what it holds: %s", problem.message)
        self._refusal, self._refuse_until = problem, 0.0
        connection, self._connection = self._connection, None
        self._forget(connection)

    def check_in_place(self) -> None:
        """Raises Unavailable (STORE_REPLACED) when the paths no longer lead to the open files.

        SQLite would go on writing to a file that was deleted or moved away, and acknowledge what nobody can find.
        """
        if self._places is not None and self._found() != self._places:
            raise self._moved()

    def check_space(self) -> None:
        """Raises Unavailable (STORE_FULL) when the file system is full or read-only. Raises OSError."""
        found = os.statvfs(self.path.parent)
        if found.f_flag & os.ST_RDONLY:
            raise _refusals.full(f"{self.path}: the file system is read-only")
        free = found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)
        if found.f_blocks and free < LEAST_FREE_BYTES:
            raise _refusals.full(f"{self.path}: {free} bytes are left on its file system")

    @property
    def wants_emptying(self) -> bool:
        """Whether the log of changes has grown by enough since it was emptied, or since that was tried."""
        return self._connection is not None and _size(self._log) >= self._empty_at

    def empty_log(self, *, at_once: bool = False) -> bool:
        """Bring the log of changes into the database file and empty it. Raises sqlite3's errors.

        Reads in hand keep it from being emptied; they are interrupted when it has grown beyond all measure, or
        ``at_once``. Returns whether it is empty; if not, it is another program that reads the file.
        """
        connection = self._connection
        grown = _size(self._log)
        if connection is None or not grown:
            return True
        with contextlib.ExitStack() as stack:
            interrupt = at_once or grown >= MOST_LOG_BYTES
            paused = [reader.paused(interrupt=interrupt) for reader in (self.reads, self.listings)]
            empty = all([stack.enter_context(one) for one in paused])
            mode = "TRUNCATE" if empty else "PASSIVE"
            with self._unwaiting(connection):
                ((busy, _, _),) = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        done = empty and not busy
        self._empty_at = LOG_BYTES if done else grown + LOG_BYTES
        if not done and grown >= MOST_LOG_BYTES:
            log.warning("another program reads %s and keeps its log of changes at %d bytes", self.path, grown)
        return done

    def _lock(self) -> None:
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            self._make_folder()
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise FailedPrecondition(
                f"{self.path} is in use by another Pensieve server; a SQLite history serves one server at a time "
                "(stop the other one, or use redis:// for several)",
                reason="STORE_LOCKED",
            ) from error
        self._lock_fd = descriptor

    def _make_folder(self) -> None:
        """The file's folder, and the names of what was made are durable. Raises OSError."""
        missing = [folder for folder in (self.path.parent, *self.path.parent.parents) if not folder.exists()]
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)

    def _connect(self) -> sqlite3.Connection:
        try:
            self._make_file()
            seen = content_digest(self._log)
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            connection.text_factory = lenient_text
            try:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                self._set_up(connection, seen)
            except BaseException:
                self._forget(connection)
                raise
        except OSError as error:
            raise translated_os(error, self.path) from error
        except sqlite3.DatabaseError as error:
            raise translated(error, self.path) from error
        return connection

    def _make_file(self) -> None:
        """The file exists and is the one that was opened first. Raises Unavailable (STORE_REPLACED), OSError."""
        if self._home is None:
            # SQLite gives its -wal and -shm files the mode of this one, so only this one must be made by hand.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._home = _identity(self.path)
        elif _identity(self.path) != self._home:
            raise self._moved()

    def _moved(self) -> PensieveError:
        return _refusals.replaced(f"{self.path} was deleted or replaced while in use")

    def _set_up(self, connection: sqlite3.Connection, seen: bytes) -> None:
        """From the opened connection to one that may be used."""
        connection.execute(
            "PRAGMA user_version"
        ).fetchone()  # a first change that was cut off is undone by this
        self.reads.connect()
        self.listings.connect()
        found = schema.found_schema(connection, self.path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # its errors would be seen by nobody
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        self.reads.touch()
        self.listings.touch()
        make_durable(connection, self.path, seen)
        store_id = schema.bring_up(connection, found)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"{self.path} was replaced by another history file")
        self.store_id = store_id
        self._places = self._found()
        with self._unwaiting(connection):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._empty_at = LOG_BYTES

    def _forget(self, connection: sqlite3.Connection) -> None:
        """Close all connections and leave the log of changes as it is.

        The last connection to be closed would bring the log into the database file and delete it; but what the log
        holds may not be on the disk. Therefore the last ones are the readers', which cannot write.
        """
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        self.reads.close()
        self.listings.close()

    def _found(self) -> tuple[Identity, Identity]:
        return _identity(self.path), _identity(self._log)

    @contextlib.contextmanager
    def _unwaiting(self, connection: sqlite3.Connection) -> Iterator[None]:
        """A statement that finds the file in use gives up at once."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            yield
        finally:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")


def _identity(path: Path) -> Identity:
    """(-1, -1) where no file can be found."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    """0 where no file can be found."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
