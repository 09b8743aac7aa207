"""Who serves a history file: one process at a time, whatever name it knows the file by."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from pensieve.errors import FailedPrecondition
from pensieve.store import _refusals
from pensieve.store._sqlite.durable import sync_folder

_TAKEN: Final = (errno.EACCES, errno.EAGAIN)
_UNKNOWN: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_BYTE: Final = 1 << 62
"""Far behind the bytes that SQLite locks (1 GiB and 512 more), and behind the end of any file."""


class Claim:
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

    def take(self, path: Path) -> None:
        """Make the file if there is none. Raises FailedPrecondition (STORE_LOCKED), Unavailable."""
        try:
            self._lock_beside(path)
            self._lock_itself(path)
        except BaseException:
            self.give_up()
            raise

    def follow(self, path: Path) -> None:
        """Hold the file that has taken the place of the one that was taken. Raises as ``take``."""
        self._lock_itself(path)

    def give_up(self) -> None:
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
