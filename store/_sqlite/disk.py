"""A history file on its disk: one process serves it, its files stay in place, and its content is durable.

An opened file may hold changes that never reached the disk, because the process before us was killed or a
write or flush failed. Linux reports a failed write-back once and then forgets it: the pages stay in memory as
if they were on the disk, later flushes succeed and prove nothing, and a power cut brings the old content
back. SQLite reads its write-ahead log (WAL, the ``-wal`` file) from that memory and would take changes for
committed that are on no disk.

So ``make_durable`` writes every byte of the WAL again, in place, and flushes it: that flush covers pages that
are dirty *now*, and its success proves that they are on the disk. The database file needs no such care:
SQLite empties the WAL only after a successful flush of the pages copied from it, and copies anew all that was
not flushed. Writing in place keeps the WAL's valid beginning as long as before if the power fails in the
middle.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve.errors import FailedPrecondition
from pensieve.store import _refusals

_CHUNK = 1 << 20
_LOCK_HELD: Final = (errno.EACCES, errno.EAGAIN)
_LOCK_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_LOCK_OFFSET: Final = 1 << 62
"""Far behind the bytes that SQLite locks (1 GiB + 512), and behind the end of any file."""
Identity = tuple[int, int]
"""Device and inode."""
NO_FILE: Identity = (-1, -1)


class PlaceStatus(enum.Enum):
    IN_PLACE = enum.auto()
    LOG_DELETED = enum.auto()
    """The WAL or its index has no name anymore, and no other file took its place."""
    MOVED = enum.auto()


class FilePlaces:
    """The identities of a history's open files. SQLite itself would go on with files that were moved away."""

    def __init__(self, path: Path, real: Path) -> None:
        """``path``: the file's name; ``real``: where it leads to. Raises OSError."""
        self._path = path
        self._log = log_of_changes(real)
        self._index = real.with_name(real.name + "-shm")
        self._known = self._found()
        self._open_log = os.open(self._log, os.O_PATH | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._open_log)

    def check(self) -> PlaceStatus:
        """Compare the names with the open files."""
        database, log, _ = found = self._found()
        known_database, known_log, _ = self._known
        if found == self._known:
            return PlaceStatus.IN_PLACE
        if database == known_database and (log == known_log or self._log_is_deleted()):
            return PlaceStatus.LOG_DELETED
        return PlaceStatus.MOVED

    def _log_is_deleted(self) -> bool:
        """Whether it was deleted, not moved (it could come back).

        Another program that has since opened the database has created an empty one.
        """
        return os.fstat(self._open_log).st_nlink == 0 and size_of(self._log) == 0

    def _found(self) -> tuple[Identity, Identity, Identity]:
        return identity_of(self._path), identity_of(self._log), identity_of(self._index)


def identity_of(path: Path) -> Identity:
    """Return ``NO_FILE`` if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE
    return found.st_dev, found.st_ino


def size_of(path: Path) -> int:
    """Return 0 if there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def log_of_changes(path: Path) -> Path:
    """Return the path of SQLite's write-ahead log."""
    return path.with_name(path.name + "-wal")


def content_digest(path: Path) -> bytes:
    """Hash the file's bytes; a missing file reads as empty. Raises OSError."""
    digest = hashlib.blake2b()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return digest.digest()
    try:
        for _, chunk in _chunks(descriptor):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.digest()


def make_durable(connection: sqlite3.Connection, path: Path, seen: bytes) -> None:
    """Rewrite and flush the WAL of ``path``, and flush the folder. Raises OSError, Unavailable, sqlite3's errors.

    ``seen``: digest of the WAL before ``connection`` was opened, to prove that SQLite has read the bytes that
    are written: the kernel may drop unwritten pages at any time, and the disk's old content reappears. The
    write lock is held meanwhile, so no program can add to the WAL.
    """
    log = log_of_changes(path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        if content_digest(log) != seen:
            raise _refusals.unavailable(f"{log} changed while it was opened")
        if log.exists():
            _write_again(log)
        fsync_path(path.parent)
    finally:
        connection.execute("ROLLBACK")


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_again(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for offset, chunk in _chunks(descriptor):
            written = 0
            while written < len(chunk):
                written += os.pwrite(descriptor, chunk[written:], offset + written)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunks(descriptor: int) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while chunk := os.pread(descriptor, _CHUNK, offset):
        yield offset, chunk
        offset += len(chunk)


class FileLock:
    """An exclusive lock on a history, released with the process that holds it.

    The lock file beside the history also excludes others while the history is replaced. But it may be deleted
    by hand, and a hard link to the history has another one; so the history itself is locked, too. That is an
    open file description lock ("OFD", fcntl(2)): unlike SQLite's own locks, it survives when another
    descriptor of the file is closed.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    @property
    def held(self) -> bool:
        return bool(self._descriptors)

    def acquire(self, path: Path) -> None:
        """Lock the file, creating it if it is missing. Raises FailedPrecondition (STORE_LOCKED), Unavailable."""
        try:
            self._lock_beside(path)
            self._lock_itself(path)
        except BaseException:
            self.release()
            raise

    def lock_replacement(self, path: Path) -> None:
        """Also lock the file that has replaced the locked one. Raises as ``acquire``."""
        self._lock_itself(path)

    def release(self) -> None:
        """Close the last connection first: closing a descriptor of the file ends SQLite's locks in it."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _lock_beside(self, path: Path) -> None:
        beside = path.with_name(path.name + ".lock")
        try:
            _make_folder(path.parent)
            descriptor = self._open(beside)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {beside}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _locked_error(path) from error

    def _lock_itself(self, path: Path) -> None:
        try:
            # SQLite gives its -wal and -shm files the mode of this one, so only this one is made by hand.
            descriptor = self._open(path)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {path}: {error.strerror}") from error
        # struct flock: l_type, l_whence, l_start, l_len, l_pid, which is 0 for OFD locks
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCK_OFFSET, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in _LOCK_HELD:
                raise _locked_error(path) from error
            if error.errno not in _LOCK_UNSUPPORTED:  # a kernel without OFD locks has the lock file
                raise _refusals.unavailable(f"cannot lock {path}: {error.strerror}") from error

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor


def _make_folder(folder: Path) -> None:
    """Create the folder, with durable names. Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in missing:
        fsync_path(one.parent)


def _locked_error(path: Path) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} is in use by another Pensieve server; a SQLite history serves one server at a time "
        "(stop the other one, or use redis:// for several)",
        reason="STORE_LOCKED",
    )
