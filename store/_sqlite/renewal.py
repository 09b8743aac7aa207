"""A new history file in place of a damaged one, with every record that the damaged one still holds.

The damaged file is kept beside it. A crash in between leaves either the old file or the new one: the new one is whole
and on the disk before the old one is touched, and the next start ends what was begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Final, NamedTuple

from pensieve.errors import FailedPrecondition
from pensieve.store._clock import Moment
from pensieve.store._examine import examine
from pensieve.store._fix import fixed
from pensieve.store._raw import Progress, RawSession, at_rest
from pensieve.store._salvage import salvaged
from pensieve.store._sqlite import schema
from pensieve.store._sqlite.durable import log_of_changes, sync_folder
from pensieve.store._sqlite.places import size_of
from pensieve.store._sqlite.recovery import RecoveredFile
from pensieve.store._sqlite.rows import Rows
from pensieve.store.records import State

log = logging.getLogger(__name__)

TOLD_S: Final = 10.0


class Renewal(NamedTuple):
    """What a renewal has made."""

    kept: Path
    """The damaged file, under its new name."""
    sessions: int
    damaged: int
    """Sessions that have lost records."""


class NothingFound(Exception):
    """No session can be read from the file."""


def renew(path: Path, now: Moment, progress: Progress | None = None, *, store_id: str = "") -> Renewal:
    """Make a new file of what ``path`` holds, and put it in its place. No connection to it may be open.

    ``store_id``: the store's name, for a file that has lost it; "" where the caller does not know it either.
    Raises NothingFound, OSError and sqlite3's errors; the old file is as it was then.
    """
    tell = progress or _logging()
    made = path.with_name(f".{path.name}.new")
    recovered = RecoveredFile(path, lambda done, of: tell("reading pages", done, of))
    try:
        keys = recovered.keys()
        if not keys:
            raise NothingFound
        _remove(made)
        # Made by hand: SQLite would let everybody read it until it is whole.
        os.close(os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        damaged = 0
        with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # it is flushed as a whole
            schema.bring_up(connection, 0)
            connection.execute("BEGIN IMMEDIATE")
            if known := recovered.store_id or store_id:
                connection.execute("UPDATE store SET value = ? WHERE name = 'store_id'", (known,))
            for number, key in enumerate(keys):
                tell("writing sessions", number, len(keys))
                raw = recovered.session(key)
                if raw is None or (session := as_kept(raw, now)).meta is None:
                    continue
                assert session.meta is not None
                Rows(connection).replace(key, session.meta, session.log, session.requests)
                damaged += session.meta.row.state is State.DAMAGED
            connection.execute("COMMIT")
    finally:
        recovered.close()
    shutil.copymode(path, made)
    found = os.stat(path)
    with contextlib.suppress(PermissionError):
        os.chown(made, found.st_uid, found.st_gid)
    _sync(made)
    whole = path.with_name(f".{path.name}.renewed-{found.st_ino}")
    made.rename(whole)
    sync_folder(path.parent)
    kept = _swapped(path, whole)
    log.error(
        "%s was damaged: a new file with its %d sessions is in its place, %d of them have lost records; the damaged "
        "one is kept as %s",
        *(path, len(keys), damaged, kept.name),
    )
    return Renewal(kept, len(keys), damaged)


def end_renewal(path: Path) -> bool:
    """End what a renewal has begun before its process was killed; whether there was one. Raises OSError."""
    ended = False
    _remove(path.with_name(f".{path.name}.new"))
    for whole in path.parent.glob(f".{path.name}.renewed-*"):
        if path.exists() and whole.name.endswith(f"-{os.stat(path).st_ino}"):
            log.error("the renewal of %s is ended, which was begun before", path)
            _swapped(path, whole)
            ended = True
        else:  # the file it was made from is no longer there
            _remove(whole)
    return ended


def as_kept(raw: RawSession, now: Moment) -> RawSession:
    """The session as its records prove it; one that has lost records is marked as damaged."""
    try:
        fix = fixed(examine(raw), truncate=False, now=now.wall_ms)
    except FailedPrecondition:  # records of a newer program are kept as they are
        fix = None
    session = raw if fix is None else fix.session
    meta = salvaged(raw.key, raw.log, update_ms=now.wall_ms) if session.meta is None else session.meta
    return RawSession(session.key, at_rest(meta), session.log, session.requests)


def _swapped(path: Path, whole: Path) -> Path:
    """The new file gets the name; the old one and its log of changes are kept under another."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    kept = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    os.link(path, kept)
    changes = log_of_changes(path)
    if size_of(changes):
        os.link(changes, log_of_changes(kept))
    sync_folder(path.parent)
    for beside in (changes, path.with_name(path.name + "-shm")):
        _remove(beside)
    whole.rename(path)
    sync_folder(path.parent)
    return kept


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _logging() -> Progress:
    """Progress for a server's log."""
    last = time.monotonic()

    def tell(what: str, done: int, of: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > TOLD_S:
            last = time.monotonic()
            log.warning("renewing the history file: %s, %d of %s", what, done, of)

    return tell
