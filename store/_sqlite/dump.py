"""Raw access to a history file for maintenance.

Reading opens the file read-only beside the server that holds it. Writing takes the server's lock.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from pensieve.errors import FailedPrecondition, PensieveError
from pensieve.store import _refusals
from pensieve.store._raw import (
    Finding,
    Mode,
    Problem,
    Progress,
    RawSession,
    Remedy,
    make_finding,
    no_progress,
    sort_keys,
)
from pensieve.store._rules import wall_clock_ms
from pensieve.store._sqlite.disk import log_of_changes, size_of
from pensieve.store._sqlite.errors import (
    SQLITE_ERRORS,
    lenient_text,
    may_be_damage,
    primary_code,
    to_store_error,
)
from pensieve.store._sqlite.examination import TENANTS, is_sound, make_sums
from pensieve.store._sqlite.file import BUSY_TIMEOUT_MS, SqliteFile
from pensieve.store._sqlite.raw_rows import (
    CHECKSUM_SCHEMA,
    ORPHANS,
    SUMS_SCHEMA,
    find_number,
    key_from_name,
    read_raw,
)
from pensieve.store._sqlite.recovery import LOST_TENANT, RecoveredFile, hidden_damage
from pensieve.store._sqlite.rows import Rows
from pensieve.store._sqlite.schema import SCHEMA, read_schema
from pensieve.store.contract import Key


class SqliteDump:
    """``RawStore`` over one history file."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: SqliteFile | None = None
        self._connection: sqlite3.Connection | None = None
        self._schema = SCHEMA
        """The file's schema; a file that is only read may have an older one."""
        self._recovered: RecoveredFile | None = None
        """Source of sessions once pages of the file have turned out to be damaged."""
        self._problem = ""
        """The fault of the file as a whole; "" if none."""
        self.store_id = ""

    @property
    def is_exclusive(self) -> bool:
        return self._file is not None

    async def open(self, mode: Mode) -> None:
        if mode is not Mode.WRITE and not self._path.is_file():
            raise FailedPrecondition(f"there is no history file {self._path}", reason="STORE_FOREIGN")
        if mode in (Mode.EXCLUSIVE, Mode.WRITE):
            self._file = SqliteFile(self._path)
            self._file.open(look_over=mode is Mode.WRITE)
            self._begin_write()
            return
        try:
            with self._translating():
                self._open_beside(mode)
        except PensieveError as error:
            if not may_be_damage(error) or (not self._recover().store_id and not self._recover().keys()):
                raise
            self._problem = error.message
        if mode is Mode.SNAPSHOT and self._recovered is None and not self._is_sound():
            self._recover()

    def _open_beside(self, mode: Mode) -> None:
        if problem := hidden_damage(Path(os.path.realpath(self._path))):
            self._problem = problem
            self._recover()
            return
        self._connection = _read_only(self._path)
        try:
            self.store_id = _known_store(self._connection, self._path)
        except sqlite3.OperationalError as error:
            if primary_code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            raise _unreadable(self._path) from error
        self._schema = read_schema(self._connection, self._path)
        if mode is Mode.SNAPSHOT:
            self._connection.execute("BEGIN")
            self._connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # takes the snapshot

    def _begin_write(self) -> None:
        """Begin a change of the open file."""
        assert self._file is not None
        self._connection = self._file.connection()
        self.store_id = self._file.store_id
        self._connection.execute("BEGIN IMMEDIATE")
        self._schema = SCHEMA

    def _is_sound(self) -> bool:
        return is_sound(self._sql)

    def _recover(self) -> RecoveredFile:
        """Read the pages of a damaged file without SQLite. Raises OSError."""
        if self._recovered is None:
            self._recovered = RecoveredFile(Path(os.path.realpath(self._path)))
            self.store_id = self.store_id or self._recovered.store_id
        return self._recovered

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if self._file is not None:
            self._file.close()
            self._file = None
        elif connection is not None:
            connection.close()
        if self._recovered is not None:
            self._recovered.close()
            self._recovered = None

    async def now(self) -> int:
        return wall_clock_ms()

    async def keys(self) -> list[Key]:
        if self._recovered is None:
            try:
                found = self._sql.execute("SELECT tenant, session_id FROM sessions NOT INDEXED").fetchall()
                keys = {Key(str(tenant), str(session_id)) for tenant, session_id in found}
                return sort_keys(keys | set(self._rowless_sessions()))
            except SQLITE_ERRORS:
                self._recover()
        return self._recover().keys()

    async def session(self, key: Key) -> RawSession | None:
        if self._recovered is None:
            try:
                with self._snapshot():
                    return self._read(key)
            except SQLITE_ERRORS:
                self._recover()
        return self._recover().session(key)

    async def check_storage(self) -> list[Finding]:
        if self._problem:
            return [make_finding(None, Problem.FILE, self._problem, Remedy.REBUILD)]
        try:
            answers = [str(row[0]) for row in self._sql.execute("PRAGMA integrity_check(20)")]
            found = [
                make_finding(None, Problem.FILE, answer, Remedy.REBUILD)
                for answer in answers
                if answer != "ok"
            ]
            if not found:
                return list(self._table_findings())
        except SQLITE_ERRORS as error:
            found = [make_finding(None, Problem.FILE, str(error), Remedy.REBUILD)]
        if self._file is None:
            self._recover()
        return found

    def _table_findings(self) -> Iterator[Finding]:
        """Report rows without a session and wrong sums. Raises sqlite3's errors."""
        for table in ("requests", "labels", "marks") if self._schema >= CHECKSUM_SCHEMA else ("requests",):
            ((orphans,),) = self._sql.execute(
                f"SELECT count(*) FROM {table} WHERE session NOT IN (SELECT id FROM sessions)"
                " AND session NOT IN (SELECT session FROM records)"
            )
            if orphans:
                detail = f"{orphans} rows of {table} belong to no session"
                yield make_finding(None, Problem.FILE, detail, Remedy.REBUILD)
        if self._schema >= SUMS_SCHEMA:
            kept = set(self._sql.execute("SELECT * FROM tenants WHERE sessions <> 0 OR bytes <> 0"))
            if kept != set(self._sql.execute(TENANTS)):
                detail = "tenants' totals are not the sums of their sessions"
                yield make_finding(None, Problem.FILE, detail, Remedy.REBUILD)

    async def repair_storage(self, progress: Progress = no_progress) -> None:
        assert self._file is not None
        with self._translating():
            self._sql.execute("ROLLBACK")
            self._file.repair(progress)
            self._begin_write()
            make_sums(self._sql)

    async def put(self, session: RawSession, *, expected_stamp: str | None) -> bool:
        assert session.meta is not None, "only a session with a row can be written"
        before = await self.session(session.key)
        if (None if before is None else before.stamp) != expected_stamp:
            return False
        with self._translating():
            Rows(self._sql).replace(session.key, session.meta, session.log, session.requests)
        return True

    async def flush(self) -> None:
        with self._translating():
            self._sql.execute("COMMIT")
            if self._file is not None:
                self._file.check_in_place()
            self._sql.execute("BEGIN IMMEDIATE")

    @property
    def _sql(self) -> sqlite3.Connection:
        assert self._connection is not None, "not open"
        return self._connection

    def _read(self, key: Key) -> RawSession | None:
        number = find_number(self._sql, key, self._schema)
        if number is None:  # not in the index: look for the row itself, or for records without a row
            found = self._sql.execute(
                "SELECT id FROM sessions NOT INDEXED WHERE tenant = ? AND session_id = ?",
                (key.tenant, key.session_id),
            ).fetchone()
            number = self._rowless_sessions().get(key) if found is None else int(found[0])
        return None if number is None else read_raw(self._sql, key, number, self._schema)

    def _rowless_sessions(self) -> dict[Key, int]:
        """Return the numbers of sessions that have records but no row; some have lost their names, too."""
        if self._schema < CHECKSUM_SCHEMA:
            return {}
        return {
            key_from_name(name) or Key(LOST_TENANT, str(number)): int(number)
            for number, name in self._sql.execute(ORPHANS)
        }

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        if self._sql.in_transaction:
            yield
            return
        self._sql.execute("BEGIN")
        try:
            yield
        finally:
            self._sql.execute("ROLLBACK")

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except SQLITE_ERRORS as error:
            raise to_store_error(error, self._path) from error


def _read_only(path: Path) -> sqlite3.Connection:
    real = Path(os.path.realpath(path))
    # A read-only file system needs no lock, which readers would keep in a file of their own, NAME-shm.
    is_frozen = os.statvfs(real).f_flag & os.ST_RDONLY and not size_of(log_of_changes(real))
    options = "mode=ro&immutable=1" if is_frozen else "mode=ro"
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?{options}", uri=True, isolation_level=None
        )
    except sqlite3.OperationalError as error:
        raise _unreadable(path) from error
    connection.text_factory = lenient_text
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def _unreadable(path: Path) -> PensieveError:
    return _refusals.unavailable(
        f"cannot read {path}, or write {path.name}-shm beside it: run this as the user that the server runs as; "
        f"copy a read-only snapshot ({path.name} and {path.name}-wal) to a folder where you may write"
    )


def _known_store(connection: sqlite3.Connection, path: Path) -> str:
    """Return the store id of a file whose schema this program supports."""
    if read_schema(connection, path) == 0:
        raise FailedPrecondition(f"{path} is not a history file", reason="STORE_FOREIGN")
    return str(connection.execute("SELECT value FROM store WHERE name = 'store_id'").fetchone()[0])
