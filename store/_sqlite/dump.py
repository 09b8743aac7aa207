"""A history file as maintenance sees it: everything that is stored, and whole sessions written back.

Reading opens the file read-only beside a server that holds it: in WAL mode neither waits for the other. Writing takes
the server's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pensieve.errors import FailedPrecondition
from pensieve.store import _refusals
from pensieve.store._clock import wall_clock_ms
from pensieve.store._codec import StoredRecord
from pensieve.store._raw import Finding, Mode, Problem, RawSession, Remedy, finding, in_order
from pensieve.store._rules import Known, Meta
from pensieve.store._sqlite.file import BUSY_TIMEOUT_MS, SCHEMA, SqliteFile, translated
from pensieve.store._sqlite.rows import Rows
from pensieve.store.contract import Key
from pensieve.store.records import State

_meta_decoder = msgspec.msgpack.Decoder(Meta)


class SqliteDump:
    """``RawStore`` over one file."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: SqliteFile | None = None
        self._connection: sqlite3.Connection | None = None
        self.store_id = ""

    @property
    def alone(self) -> bool:
        """The lock that a server takes, too, is held."""
        return self._file is not None

    async def open(self, mode: Mode) -> None:
        if mode is not Mode.WRITE and not self._path.is_file():
            raise FailedPrecondition(f"there is no history file {self._path}", reason="STORE_FOREIGN")
        with self._translating():
            if mode in (Mode.ALONE, Mode.WRITE):
                self._file = SqliteFile(self._path)
                self._file.open()
                self._connection = self._file.connection()
                self.store_id = self._file.store_id
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("BEGIN IMMEDIATE")
                return
            self._connection = _read_only(self._path)
            self.store_id = _known_store(self._connection, self._path)
            if mode is Mode.SNAPSHOT:
                self._connection.execute("BEGIN")
                self._connection.execute("SELECT 1 FROM sessions LIMIT 1").fetchall()  # takes the snapshot

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.in_transaction:
            connection.execute("ROLLBACK")
        if self._file is not None:
            self._file.close()
            self._file = None
        elif connection is not None:
            connection.close()

    async def now(self) -> int:
        return wall_clock_ms()

    async def keys(self) -> list[Key]:
        with self._translating():
            found = self._sql.execute("SELECT tenant, session_id FROM sessions NOT INDEXED").fetchall()
        return in_order(Key(str(tenant), str(session_id)) for tenant, session_id in found)

    async def session(self, key: Key) -> RawSession | None:
        try:
            with self._one_moment():
                return self._read(key)
        except sqlite3.DatabaseError as error:
            unreadable = finding(key, Problem.ROW, f"SQLite cannot read it: {error}", Remedy.NONE)
            return RawSession(key, None, findings=(unreadable,))

    async def about_store(self) -> list[Finding]:
        found: list[Finding] = []
        try:
            answers = [str(row[0]) for row in self._sql.execute("PRAGMA integrity_check(20)")]
        except sqlite3.DatabaseError as error:
            return [finding(None, Problem.FILE, str(error), Remedy.NONE)]
        for answer in answers:
            if answer != "ok":
                remedy = Remedy.REBUILD if "index" in answer else Remedy.NONE
                found.append(finding(None, Problem.FILE, answer, remedy))
        with self._translating():
            for table in ("records", "requests"):
                ((orphans,),) = self._sql.execute(
                    f"SELECT count(*) FROM {table} WHERE session NOT IN (SELECT id FROM sessions)"
                )
                if orphans:
                    detail = f"{orphans} rows of {table} belong to no session"
                    found.append(finding(None, Problem.FILE, detail, Remedy.NONE))
        return found

    async def tidy(self) -> None:
        with self._translating():
            self._sql.execute("REINDEX")

    async def put(self, session: RawSession, *, over: str | None) -> bool:
        assert session.meta is not None, "only a session with a row can be written"
        before = await self.session(session.key)
        if (None if before is None else before.stamp) != over:
            return False
        with self._translating():
            rows = Rows(self._sql)
            rows.erase(session.key)
            rows.put(session.key, session.meta)
            at = self._id(session.key)
            self._sql.executemany(
                "INSERT INTO records (session, revision, data, crc, head_hash) VALUES (?, ?, ?, ?, ?)",
                ((at, *entry) for entry in session.log),
            )
            self._sql.executemany(
                "INSERT INTO requests (session, request_id, fingerprint, revision) VALUES (?, ?, ?, ?)",
                ((at, name, known.fingerprint, known.revision) for name, known in session.requests.items()),
            )
        return True

    async def flush(self) -> None:
        with self._translating():
            self._sql.execute("COMMIT")
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._sql.execute("BEGIN IMMEDIATE")

    @property
    def _sql(self) -> sqlite3.Connection:
        assert self._connection is not None, "not open"
        return self._connection

    def _id(self, key: Key) -> int | None:
        found = self._sql.execute(
            "SELECT id FROM sessions WHERE tenant = ? AND session_id = ?", (key.tenant, key.session_id)
        ).fetchone()
        return None if found is None else int(found[0])

    def _read(self, key: Key) -> RawSession | None:
        found = self._sql.execute(
            "SELECT id, update_ms, expire_ms, deleted, leased, meta FROM sessions NOT INDEXED"
            " WHERE id = (SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)",
            (key.tenant, key.session_id),
        ).fetchone()
        if found is None:
            return None
        at, *columns, blob = found
        log = self._sql.execute(
            "SELECT revision, data, crc, head_hash FROM records WHERE session = ? ORDER BY revision", (at,)
        )
        records = tuple(_stored(*row) for row in log)
        asked = self._sql.execute(
            "SELECT request_id, fingerprint, revision FROM requests WHERE session = ?", (at,)
        )
        requests = {str(name): Known(str(fingerprint), int(rev)) for name, fingerprint, rev in asked}
        stamp = hashlib.sha1(bytes(blob), usedforsecurity=False).hexdigest()
        try:
            meta = _meta_decoder.decode(blob)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            unreadable = finding(
                key, Problem.ROW, f"its row cannot be decoded ({type(error).__name__})", Remedy.REBUILD
            )
            return RawSession(key, None, records, requests, (unreadable,), stamp)
        if (meta.row.tenant, meta.row.session_id) != (key.tenant, key.session_id):
            foreign = finding(key, Problem.ROW, "its row is that of another session", Remedy.REBUILD)
            return RawSession(key, None, records, requests, (foreign,), stamp)
        return RawSession(key, meta, records, requests, tuple(_of_columns(key, meta, columns)), stamp)

    @contextlib.contextmanager
    def _one_moment(self) -> Iterator[None]:
        """All reads inside see the same data."""
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
        except sqlite3.DatabaseError as error:
            raise translated(error, self._path) from error


def _read_only(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, isolation_level=None
        )
    except sqlite3.OperationalError as error:
        raise _refusals.unavailable(f"cannot open {path}: {error}") from error
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def _known_store(connection: sqlite3.Connection, path: Path) -> str:
    """The store id of a file whose schema this program knows."""
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > SCHEMA:
        raise _refusals.newer_schema(str(found), SCHEMA)
    if found == 0:
        raise FailedPrecondition(f"{path} is not a history file", reason="STORE_FOREIGN")
    return str(connection.execute("SELECT value FROM store WHERE name = 'store_id'").fetchone()[0])


def _stored(revision: Any, data: Any, crc: Any, chain: Any) -> StoredRecord:
    """A record's row. What is not shaped like one becomes one that no check accepts."""
    return StoredRecord(
        int(revision),
        data if isinstance(data, bytes) else b"",
        crc if isinstance(crc, int) else -1,
        chain if isinstance(chain, str) else "",
    )


def _of_columns(key: Key, meta: Meta, columns: list[Any]) -> Iterator[Finding]:
    """The columns beside ``meta`` are what listing, expiry and leases are found by."""
    row = meta.row
    wanted = [row.update_ms, row.expire_ms, row.state is State.DELETED, meta.lease is not None]
    for name, found, right in zip(
        ("update_ms", "expire_ms", "deleted", "leased"), columns, wanted, strict=True
    ):
        if found != right:
            detail = f"column {name} is {found}, its row says {int(right)}"
            problem = Problem.EXPIRY if name == "expire_ms" else Problem.LISTING
            yield finding(key, problem, detail, Remedy.REBUILD)
