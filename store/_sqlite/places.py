"""Where the files of an open history are: SQLite would go on with ones that were deleted or moved away."""

from __future__ import annotations

import enum
import os
from pathlib import Path

from pensieve.store._sqlite.durable import log_of_changes

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
