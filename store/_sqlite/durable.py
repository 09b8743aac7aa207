"""Makes what a history file says durable, before anybody is told of it.

A file that is opened may hold changes that never reached the disk: the process before us was killed, or a write or a
flush failed. Linux reports a failed write-back once and then forgets it: the pages stay in memory as if they were on
the disk, later flushes succeed and prove nothing, and a power cut brings the old content back. SQLite reads its log of
changes (the ``-wal`` file) from that memory, and would take changes for committed that are not on any disk.

So every byte of the log is written again, in place, and flushed: that flush covers pages that are dirty *now*, and
its success proves that they are on the disk. The database file itself needs no such care: SQLite empties the log only
after a successful flush of the pages that it has copied from there, and copies anew all that was not so flushed. In
place, because then a power cut in the middle finds a beginning of the log that is at least as long as before.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pensieve.store import _refusals

_CHUNK = 1 << 20


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
