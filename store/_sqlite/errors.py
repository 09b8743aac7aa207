"""What the errors of SQLite and of the operating system mean for a caller of the store."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError
from pensieve.store import _refusals

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT)
_UNHARMED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its extension; -1 for errors of the Python module itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else -1


def lenient_text(data: bytes) -> str:
    """Text of the file, which is not UTF-8 where it is damaged; Python's own error for that quotes what it found."""
    return data.decode("utf-8", errors="replace")


def is_interrupt(error: sqlite3.Error) -> bool:
    return primary_code(error) == sqlite3.SQLITE_INTERRUPT


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is not what was written: its pages, or tables that contradict each other."""
    return primary_code(error) in _DAMAGE


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk has no room."""
    return primary_code(error) == sqlite3.SQLITE_FULL


def leaves_file_known(error: sqlite3.Error) -> bool:
    """Whether the transaction was rolled back and the file holds just what it held before: full, read-only, busy."""
    return primary_code(error) in _UNHARMED


def translated(error: sqlite3.DatabaseError, path: Path) -> PensieveError:
    """The store's error for SQLite's. The outcome of the failed statement is unknown to the caller."""
    code = primary_code(error)
    problem = f"{path}: {error}"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
        return _refusals.full(problem)
    if code == sqlite3.SQLITE_NOTADB:
        return FailedPrecondition(f"{path} is not a history file: {error}", reason="STORE_FOREIGN")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT):
        return DataLoss(f"history file {problem}", reason="HISTORY_CORRUPT")
    return _refusals.unavailable(problem)


def translated_os(error: OSError, path: Path) -> PensieveError:
    """The store's error for one of the operating system while ``path`` is opened or made durable."""
    problem = f"{path}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return _refusals.full(problem)
    return _refusals.unavailable(problem)
