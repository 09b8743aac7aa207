"""Translate errors of SQLite and of the operating system to the store's errors."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Final

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError
from pensieve.store import _refusals

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT)
_UNHARMED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


SQLITE_ERRORS: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""The errors of an SQLite call. Python fails to decode a message that quotes a damaged name."""


def primary_code(error: Exception) -> int:
    """Return SQLite's result code without its extension; -1 for errors of the Python module itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else -1


def lenient_text(data: bytes) -> str:
    """Decode text that may not be UTF-8 where the file is damaged. Python's own error would quote the content."""
    return data.decode("utf-8", errors="replace")


def is_interrupt(error: Exception) -> bool:
    return primary_code(error) == sqlite3.SQLITE_INTERRUPT


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the pages are damaged or the tables contradict each other."""
    return primary_code(error) in _DAMAGE


def may_be_damage(error: PensieveError) -> bool:
    """Whether a file that failed to open with ``error`` may have damaged pages."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.DatabaseError):
        return primary_code(cause) in (*_DAMAGE, sqlite3.SQLITE_ERROR)
    return error.reason in ("STORE_FOREIGN", "HISTORY_CORRUPT")


def is_full(error: sqlite3.Error) -> bool:
    return primary_code(error) == sqlite3.SQLITE_FULL


def leaves_file_known(error: sqlite3.Error) -> bool:
    """Whether the transaction was rolled back and the file is unchanged: full, read-only, busy."""
    return primary_code(error) in _UNHARMED


def to_store_error(error: Exception, path: Path) -> PensieveError:
    """Return the store's error for one of SQLITE_ERRORS. The failed statement's outcome is unknown to the caller."""
    if isinstance(error, UnicodeDecodeError):
        return DataLoss(f"history file {path}: its schema cannot be read", reason="HISTORY_CORRUPT")
    code = primary_code(error)
    problem = f"{path}: {error}"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
        return _refusals.full(problem)
    if code == sqlite3.SQLITE_NOTADB:
        return FailedPrecondition(f"{path} is not a history file: {error}", reason="STORE_FOREIGN")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT):
        return DataLoss(f"history file {problem}", reason="HISTORY_CORRUPT")
    return _refusals.unavailable(problem)


def os_to_store_error(error: OSError, path: Path) -> PensieveError:
    """Return the store's error for an operating system error while ``path`` is opened or made durable."""
    problem = f"{path}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return _refusals.full(problem)
    return _refusals.unavailable(problem)
