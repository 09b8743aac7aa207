"""The SQLite file under ``sqlite_store``: its lock, its connections, its log of changes, and whether it is in place.

Everything here runs in the store's one database thread. There is one way to a connection, at start and after an error
alike: what the file says is made durable first, so nothing that is read or answered can be undone by a power cut.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pensieve.errors import DataLoss, PensieveError
from pensieve.store import _refusals
from pensieve.store._clock import Moment, steady_clock_ms, wall_clock_ms
from pensieve.store._raw import Progress
from pensieve.store._sqlite import schema
from pensieve.store._sqlite.disk import (
    FileLock,
    FilePlaces,
    Identity,
    Whereabouts,
    content_digest,
    identity_of,
    log_of_changes,
    make_durable,
    size_of,
)
from pensieve.store._sqlite.errors import FAILED, lenient_text, may_be_damage, to_store_error, translated_os
from pensieve.store._sqlite.examination import (
    PATIENCE_S,
    OutOfTime,
    is_sound,
    rebuild_all_derived,
    reindexed,
    within,
)
from pensieve.store._sqlite.pages import hidden_damage
from pensieve.store._sqlite.reader import SqliteReader
from pensieve.store._sqlite.recovery import NothingFound, finish_rebuild, rebuild_file

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS: Final = 5000
REOPEN_PAUSE_S: Final = 0.25
"""After the file could not be opened it is left alone for so long: a sick disk is not asked at every call."""
LOG_BYTES: Final = 4 << 20
"""Size of the log of changes from which on it is emptied, when no read is in hand."""
SHORT_BYTES: Final = 16 << 20
"""With less free space the log of changes is emptied while it is small: full of it, a disk has no room to empty it."""
SHORT_LOG_BYTES: Final = 256 << 10
MOST_LOG_BYTES: Final = 64 << 20
"""Size from which on reads are interrupted to empty it."""
LEAST_FREE_BYTES: Final = 1 << 20
"""With less free space the disk counts as full, although small changes may still fit."""
AGAIN_S: Final = 60.0
"""The file is looked over no sooner again: it takes as long as the file is large."""


def _system_time() -> Moment:
    return Moment(wall_clock_ms(), steady_clock_ms())


class SqliteFile:
    """One history file, held exclusively by this object between ``open`` and ``close``."""

    def __init__(self, path: Path, now: Callable[[], Moment] = _system_time) -> None:
        self.path = path
        self._now = now
        self.store_id = ""
        self.reads = SqliteReader(path, "pensieve-sqlite-reads", BUSY_TIMEOUT_MS)
        self.listings = SqliteReader(path, "pensieve-sqlite-lists", BUSY_TIMEOUT_MS)
        self.logs = SqliteReader(path, "pensieve-sqlite-logs", BUSY_TIMEOUT_MS)
        self._real = path
        """Where ``path`` leads to when it is a link: SQLite keeps what belongs to the file beside that."""
        self._log = log_of_changes(path)
        self._connection: sqlite3.Connection | None = None
        self._claim = FileLock()
        self._home: Identity | None = None
        """The file that was opened first: after an error of the disk no other one is taken for it."""
        self._places: FilePlaces | None = None
        self._empty_at = LOG_BYTES
        self._refusal: PensieveError | None = None
        self._refuse_until = 0.0
        self._looked_over_at = -math.inf

    def open(self, *, look_over: bool = True, progress: Progress | None = None) -> None:
        """Lock the file, create or check its schema. Raises FailedPrecondition, Unavailable or DataLoss.

        A damaged file that cannot be opened is renewed; with ``look_over`` also one that can.
        """
        try:
            self._refusal = self._home = None
            self._take()
            self._open_or_renew(progress)
            if look_over:
                self._look_over(PATIENCE_S, progress)
        except BaseException:
            self.close()
            raise

    def repair(self, progress: Progress | None = None) -> bool:
        """Look over the whole file and make good what is damaged. Raises the store's errors.

        False if nothing was damaged, or if this was done a short while ago.
        """
        if time.monotonic() - self._looked_over_at < AGAIN_S:
            return False
        self.connection()
        mended = self._look_over(math.inf, progress)
        self._looked_over_at = -math.inf if mended else time.monotonic()
        return mended

    def close(self) -> None:
        """Close the connections and release the lock. May be called twice."""
        for reader in self._readers:
            reader.end()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        self._part()
        self._claim.release()
        self._looked_over_at = -math.inf

    def connection(self) -> sqlite3.Connection:
        """The writing connection; a new one after ``drop``. Raises the store's own errors."""
        if not self._claim.held:
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

    def close_after_error(self, problem: PensieveError) -> None:
        """Forget all connections, because nothing is known of the file after ``problem``."""
        if self._connection is None:
            return
        log.error("the history file is closed until it is proven what it holds: %s", problem.message)
        self._refusal, self._refuse_until = problem, 0.0
        connection, self._connection = self._connection, None
        self._forget(connection)

    def check_in_place(self) -> None:
        """Raises Unavailable (STORE_REPLACED) when the paths no longer lead to the open files.

        SQLite would go on writing to a file that was deleted or moved away, and acknowledge what nobody can find. When
        only its log of changes was deleted, all that it holds is in the database file afterwards.
        """
        found = Whereabouts.IN_PLACE if self._places is None else self._places.look()
        if found is Whereabouts.LOG_DELETED:
            self._regain()
        elif found is Whereabouts.MOVED:
            raise self._moved()

    def check_space(self) -> None:
        """Raises Unavailable (STORE_FULL) when the file system is full or read-only. Raises OSError."""
        if os.statvfs(self._real.parent).f_flag & os.ST_RDONLY:
            raise _refusals.full(f"{self.path}: the file system is read-only")
        free = self._free_bytes()
        if free < LEAST_FREE_BYTES:
            raise _refusals.full(f"{self.path}: {free:.0f} bytes are left on its file system")

    @property
    def wants_emptying(self) -> bool:
        """Whether the log of changes has grown by enough since it was emptied, or since that was tried."""
        if self._connection is None or (grown := size_of(self._log)) < min(self._empty_at, SHORT_LOG_BYTES):
            return False
        if grown >= self._empty_at:
            return True
        try:
            return self._free_bytes() < SHORT_BYTES
        except OSError:  # the next ping tells of it
            return True

    def empty_log(self, *, at_once: bool = False) -> bool:
        """Bring the log of changes into the database file and empty it. Raises sqlite3's errors.

        Reads in hand keep it from being emptied; they are interrupted when it has grown beyond all measure, or
        ``at_once``. Returns whether it is empty; if not, it is another program that reads the file.
        """
        connection = self._connection
        grown = size_of(self._log)
        if connection is None or not grown:
            return True
        done = self._emptied(connection, interrupt=at_once or grown >= MOST_LOG_BYTES)
        self._empty_at = LOG_BYTES if done else grown + LOG_BYTES
        if not done and grown >= MOST_LOG_BYTES:
            log.warning("another program reads %s and keeps its log of changes at %d bytes", self.path, grown)
        return done

    def _free_bytes(self) -> float:
        """Infinite where the file system does not say. Raises OSError."""
        found = os.statvfs(self._real.parent)
        free = found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)
        return free if found.f_blocks else math.inf

    @property
    def _readers(self) -> tuple[SqliteReader, ...]:
        return self.reads, self.listings, self.logs

    def _take(self) -> None:
        """Raises FailedPrecondition (STORE_LOCKED), Unavailable."""
        self._real = Path(os.path.realpath(self.path))
        self._log = log_of_changes(self._real)
        self._claim.acquire(self._real)
        if finish_rebuild(self._real):
            self._claim.lock_replacement(self._real)
        self._home = identity_of(self._real)

    def _open_or_renew(self, progress: Progress | None) -> None:
        with self._translating():
            if problem := hidden_damage(self._real):
                log.error("%s: %s", self.path, problem)
                with contextlib.suppress(NothingFound):
                    self._renew(progress)
        try:
            self.connection()
        except PensieveError as error:
            if not may_be_damage(error):
                raise
            log.error("%s", error.message)
            self._refusal = None
            try:
                with self._translating():
                    self._renew(progress)
            except NothingFound:
                raise error from None
            self.connection()

    def _look_over(self, patience_s: float, progress: Progress | None) -> bool:
        """Whether anything was made good."""
        connection, changed = self.connection(), False
        try:
            with self._translating():
                with within(connection, patience_s):
                    sound = is_sound(connection)
                if not sound:
                    changed = True
                    log.error("the history file %s has damaged pages or indexes", self.path)
                    if not reindexed(connection):
                        self._renew(progress)
                        connection = self.connection()
                with within(connection, patience_s):
                    changed |= rebuild_all_derived(connection, self._now()) > 0
        except OutOfTime:
            log.warning("%s is large: `pensieve store check` looks over all of it", self.path)
        except NothingFound as error:
            raise DataLoss(f"nothing can be read of {self.path}", reason="HISTORY_CORRUPT") from error
        return changed

    def _renew(self, progress: Progress | None) -> None:
        """Put a new file with all that can be read in the place of this one.

        Raises NothingFound, OSError and sqlite3's errors.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            self._forget(connection)
        self._part()
        rebuild_file(self._real, self._now(), progress, store_id=self.store_id)
        self._claim.lock_replacement(self._real)
        self._home = identity_of(self._real)

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translated_os(error, self.path) from error
        except FAILED as error:
            raise to_store_error(error, self.path) from error

    def _emptied(self, connection: sqlite3.Connection, *, interrupt: bool) -> bool:
        """Whether no read in hand and no other program kept the log of changes from it. Raises sqlite3's errors."""
        with contextlib.ExitStack() as stack:
            paused = [reader.paused(interrupt=interrupt) for reader in self._readers]
            empty = all([stack.enter_context(one) for one in paused])
            mode = "TRUNCATE" if empty else "PASSIVE"
            with self._unwaiting(connection):
                ((busy, _, _),) = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        return empty and not busy

    def _regain(self) -> None:
        """Bring the deleted log of changes, which is still open, into the database file, and begin a new one."""
        connection = self._connection
        if connection is None:
            return
        log.error("the log of changes of %s was deleted while in use: what is in it is saved", self.path)
        try:
            saved = self._emptied(connection, interrupt=True)
        except FAILED as error:
            raise to_store_error(error, self.path) from error
        if not saved:
            raise _refusals.unavailable(
                f"{self.path}: another program reads the log of changes that was deleted"
            )
        self._connection = None
        self._forget(connection)
        self.connection()

    def _part(self) -> None:
        if self._places is not None:
            places, self._places = self._places, None
            places.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            if identity_of(self.path) != self._home:
                raise self._moved()
            seen = content_digest(self._log)
            connection = sqlite3.connect(self._real, isolation_level=None, check_same_thread=False)
            connection.text_factory = lenient_text
            try:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                self._set_up(connection, seen)
            except BaseException:
                self._forget(connection)
                raise
        except OSError as error:
            raise translated_os(error, self.path) from error
        except FAILED as error:
            raise to_store_error(error, self.path) from error
        return connection

    def _moved(self) -> PensieveError:
        return _refusals.replaced(f"{self.path} was deleted or replaced while in use")

    def _set_up(self, connection: sqlite3.Connection, seen: bytes) -> None:
        """From the opened connection to one that may be used."""
        connection.execute(
            "PRAGMA user_version"
        ).fetchone()  # a first change that was cut off is undone by this
        for reader in self._readers:
            reader.connect()
        found = schema.read_schema(connection, self.path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # its errors would be seen by nobody
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        for reader in self._readers:
            reader.touch()
        make_durable(connection, self._real, seen)
        store_id = schema.migrate(connection, found)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"{self.path} was replaced by another history file")
        self.store_id = store_id
        self._part()
        self._places = FilePlaces(self.path, self._real)
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
        for reader in self._readers:
            reader.close()

    @contextlib.contextmanager
    def _unwaiting(self, connection: sqlite3.Connection) -> Iterator[None]:
        """A statement that finds the file in use gives up at once."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            yield
        finally:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
