"""The SQLite file under ``sqlite_store``: its lock, schema, connection settings, and what its errors mean.

Everything here runs in the store's one database thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import uuid
from pathlib import Path

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError
from pensieve.store import _refusals

SCHEMA = 1
BUSY_TIMEOUT_MS = 5000

_TABLES = """
CREATE TABLE store (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    update_ms INTEGER NOT NULL,
    expire_ms INTEGER NOT NULL,          -- 0: never
    deleted INTEGER NOT NULL,            -- 1: a tombstone
    leased INTEGER NOT NULL,             -- 1: meta holds a lease
    meta BLOB NOT NULL,                  -- msgpack of _rules.Meta
    UNIQUE (tenant, session_id)
);
CREATE INDEX sessions_newest ON sessions (tenant, deleted, update_ms, session_id);
CREATE INDEX sessions_expiring ON sessions (expire_ms) WHERE expire_ms > 0;
CREATE INDEX sessions_leased ON sessions (leased) WHERE leased = 1;
CREATE TABLE records (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL,
    crc INTEGER NOT NULL,
    head_hash TEXT NOT NULL,
    PRIMARY KEY (session, revision)
);
CREATE TABLE requests (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    request_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (session, request_id)
) WITHOUT ROWID;
"""


class SqliteFile:
    """One history file, held exclusively by this object between ``open`` and ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store_id = ""
        self._connection: sqlite3.Connection | None = None
        self._lock_fd: int | None = None
        self._inode = -1

    def open(self) -> None:
        """Lock the file, create or check its schema. Raises FailedPrecondition or Unavailable."""
        try:
            self._lock()
            self.connection()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection and give the lock back. May be called twice."""
        self.drop_connection()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def connection(self) -> sqlite3.Connection:
        """The open connection; a new one after ``drop_connection``. Raises the store's own errors."""
        if self._lock_fd is None:
            raise _refusals.unavailable("the store is not open")
        if self._connection is None:
            try:
                self._connection = self._connect()
            except sqlite3.DatabaseError as error:
                raise translated(error, self.path) from error
        return self._connection

    def drop_connection(self) -> None:
        """Forget the connection: after an I/O error a handle may claim success for data that is not on the disk."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def check_in_place(self) -> None:
        """Raises Unavailable (STORE_REPLACED) when the path no longer leads to the open file.

        SQLite would go on writing to a file that was deleted or moved away, and acknowledge what nobody can find.
        """
        self.connection()
        try:
            found = os.stat(self.path).st_ino
        except FileNotFoundError:
            found = -1
        if found != self._inode:
            raise _refusals.replaced(f"{self.path} was deleted or replaced while in use")

    def _lock(self) -> None:
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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

    def _connect(self) -> sqlite3.Connection:
        # SQLite gives its -wal and -shm files the mode of the database file, so only this one must be made by hand.
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {self.path}: {error.strerror}") from error
        self._inode = os.fstat(descriptor).st_ino
        os.close(descriptor)
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")
            self._check_schema(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA:
            raise _refusals.newer_schema(str(found), SCHEMA)
        if found == 0:
            if connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
                raise FailedPrecondition(
                    f"{self.path} is a SQLite file of another program", reason="STORE_FOREIGN"
                )
            create = "INSERT INTO store VALUES ('store_id', '" + uuid.uuid4().hex + "');"
            connection.executescript(f"BEGIN;{_TABLES}{create}PRAGMA user_version = {SCHEMA};COMMIT;")
        store_id = str(connection.execute("SELECT value FROM store WHERE name = 'store_id'").fetchone()[0])
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"{self.path} was replaced by another history file")
        self.store_id = store_id


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk, the quota or the file system's mode refuses writes while reads still work."""
    return _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its extension; -1 for errors of the Python module itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else -1


def translated(error: sqlite3.DatabaseError, path: Path) -> PensieveError:
    """The store's error for SQLite's. The outcome of the failed statement is unknown to the caller."""
    code = _primary_code(error)
    problem = f"{path}: {error}"
    if is_full(error):
        return _refusals.full(problem)
    if code == sqlite3.SQLITE_NOTADB:
        return FailedPrecondition(f"{path} is not a history file: {error}", reason="STORE_FOREIGN")
    if code == sqlite3.SQLITE_CORRUPT:
        return DataLoss(f"history file {problem}", reason="HISTORY_CORRUPT")
    return _refusals.unavailable(problem)
