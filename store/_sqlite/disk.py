"""A history file on its disk: one process serves it, its files stay in place, and what it says is durable.

SQLite would go on with files that were deleted or moved away, so the open ones are compared with their names
(``FilePlaces``). One process has the file at a time, whatever name it knows the file by (``Claim``).

A file that is opened may hold changes that never reached the disk: the process before us was killed, or a write or a
flush failed. Linux reports a failed write-back once and then forgets it: the pages stay in memory as if they were on
the disk, later flushes succeed and prove nothing, and a power cut brings the old content back. SQLite reads its log of
changes (the ``-wal`` file) from that memory, and would take changes for committed that are not on any disk.

So every byte of the log is written again, in place, and flushed (``make_durable``): that flush covers pages that are
dirty *now*, and its success proves that they are on the disk. The database file itself needs no such care: SQLite
empties the log only after a successful flush of the pages that it has copied from there, and copies anew all that was
not so flushed. In place, because then a power cut in the middle finds a beginning of the log that is at least as long
as before.
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
_TAKEN: Final = (errno.EACCES, errno.EAGAIN)
_UNKNOWN: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_BYTE: Final = 1 << 62
"""Far behind the bytes that SQLite locks (1 GiB and 512 more), and behind the end of any file."""
Identity = tuple[int, int]
"""Device and inode."""
NOWHERE: Identity = (-1, -1)


class Whereabouts(enum.Enum):
    """What was found."""

    IN_PLACE = enum.auto()
    LOG_DELETED = enum.auto()
    """The log of changes, or the index of it, has no name any more and lives only as long as this process has it open.
    Nothing else has taken its place."""
    MOVED = enum.auto()


class FilePlaces:
    """The open files of one history, as they are found when this is made."""

    def __init__(self, path: Path, real: Path) -> None:
        """``path`` is what the file is known by, ``real`` where that leads to. Raises OSError."""
        self._path = path
        self._log = log_of_changes(real)
        self._index = real.with_name(real.name + "-shm")
        self._known = self._found()
        self._open_log = os.open(self._log, os.O_PATH | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._open_log)

    def look(self) -> Whereabouts:
        """Where they are now."""
        database, log, _ = found = self._found()
        known_database, known_log, _ = self._known
        if found == self._known:
            return Whereabouts.IN_PLACE
        if database == known_database and (log == known_log or self._log_is_deleted()):
            return Whereabouts.LOG_DELETED
        return Whereabouts.MOVED

    def _log_is_deleted(self) -> bool:
        """Not moved: it may come back then. Another program that opened the database since has made an empty one."""
        return os.fstat(self._open_log).st_nlink == 0 and size_of(self._log) == 0

    def _found(self) -> tuple[Identity, Identity, Identity]:
        return identity_of(self._path), identity_of(self._log), identity_of(self._index)


def identity_of(path: Path) -> Identity:
    """``NOWHERE`` where no file can be found."""
    try:
        found = os.stat(path)
    except OSError:
        return NOWHERE
    return found.st_dev, found.st_ino


def size_of(path: Path) -> int:
    """0 where no file can be found."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def log_of_changes(path: Path) -> Path:
    """SQLite's write-ahead log beside the database file ``path``."""
    return path.with_name(path.name + "-wal")


def content_digest(path: Path) -> bytes:
    """Of the file's bytes as they are read now; a file that does not exist reads as empty. Raises OSError."""
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
    """Write the log of changes of ``path`` again and flush it and the folder. Raises OSError, Unavailable, sqlite3's.

    ``seen``: digest of the log before ``connection`` was opened, so that what SQLite has read of it is what is
    written: memory that holds unwritten pages may be given up at any time, and the disk's old content shows up.
    The write lock is held meanwhile, so that no program can add to the log.
    """
    log = log_of_changes(path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        if content_digest(log) != seen:
            raise _refusals.unavailable(f"{log} changed while it was opened")
        if log.exists():
            _write_again(log)
        sync_folder(path.parent)
    finally:
        connection.execute("ROLLBACK")


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder``. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    """The file's bytes with their offsets."""
    offset = 0
    while chunk := os.pread(descriptor, _CHUNK, offset):
        yield offset, chunk
        offset += len(chunk)


class FileLock:
    """Two locks, both gone with the process that holds them.

    The lock file stands beside the file's name, so it also keeps others away while the file is replaced. It may be
    deleted by hand, and a hard link to the history has another one; therefore the file itself is locked, too. That
    lock is one of an open file description ("OFD", fcntl(2)): unlike SQLite's own, it does not end when some
    descriptor of the file is closed.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    @property
    def held(self) -> bool:
        return bool(self._descriptors)

    def acquire(self, path: Path) -> None:
        """Make the file if there is none. Raises FailedPrecondition (STORE_LOCKED), Unavailable."""
        try:
            self._lock_beside(path)
            self._lock_itself(path)
        except BaseException:
            self.release()
            raise

    def lock_replacement(self, path: Path) -> None:
        """Hold the file that has taken the place of the one that was taken. Raises as ``take``."""
        self._lock_itself(path)

    def release(self) -> None:
        """Not before the last connection is closed: closing a descriptor of the file ends the locks of SQLite in it."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _lock_beside(self, path: Path) -> None:
        beside = path.with_name(path.name + ".lock")
        try:
            _make_folder(path.parent)
            descriptor = self._opened(beside)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {beside}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _locked(path) from error

    def _lock_itself(self, path: Path) -> None:
        try:
            # SQLite gives its -wal and -shm files the mode of this one, so only this one must be made by hand.
            descriptor = self._opened(path)
        except OSError as error:
            raise _refusals.unavailable(f"cannot open {path}: {error.strerror}") from error
        # struct flock: l_type, l_whence, l_start, l_len, l_pid, which is 0 for this kind of lock
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _BYTE, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _locked(path) from error
            if error.errno not in _UNKNOWN:  # a kernel that lacks them has the lock file
                raise _refusals.unavailable(f"cannot lock {path}: {error.strerror}") from error

    def _opened(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor


def _make_folder(folder: Path) -> None:
    """The folder is there, and the names of what was made are durable. Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def _locked(path: Path) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} is in use by another Pensieve server; a SQLite history serves one server at a time "
        "(stop the other one, or use redis:// for several)",
        reason="STORE_LOCKED",
    )
