"""The tables of a history file, and the migration of older files.

``user_version`` is the schema's number; a program refuses a file with a larger one. Triggers maintain sizes,
tenants' totals and the labels' places in the listing, so no statement can forget them.
"""

from __future__ import annotations

import logging
import sqlite3
import uuid
from pathlib import Path
from typing import Final

import msgspec

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store import _refusals
from pensieve.store._rules import Meta
from pensieve.store._sqlite.raw_rows import crc_of_request, crc_of_row, name_of
from pensieve.store.contract import Key

log = logging.getLogger(__name__)

SCHEMA: Final = 4

_FIRST = """
CREATE TABLE store (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    update_ms INTEGER NOT NULL,
    expire_ms INTEGER NOT NULL,          -- 0: never
    deleted INTEGER NOT NULL,            -- 1: a tombstone
    leased INTEGER NOT NULL,             -- 1: meta holds a lease
    meta BLOB NOT NULL,                  -- msgpack of _rules.Meta
    UNIQUE (tenant, session_id)
);
CREATE INDEX sessions_newest ON sessions (tenant, deleted, update_ms, session_id);
CREATE INDEX sessions_expiring ON sessions (expire_ms) WHERE expire_ms > 0;
CREATE INDEX sessions_leased ON sessions (leased) WHERE leased = 1;
CREATE TABLE records (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL,
    crc INTEGER NOT NULL,
    head_hash TEXT NOT NULL,
    PRIMARY KEY (session, revision)
);
CREATE TABLE requests (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    request_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (session, request_id)
) WITHOUT ROWID;
"""

_SECOND = """
ALTER TABLE sessions ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;   -- of the session's records
CREATE TABLE labels (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    tenant TEXT NOT NULL,
    update_ms INTEGER NOT NULL,          -- the session's
    session_id TEXT NOT NULL,
    PRIMARY KEY (session, name)
) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    sessions INTEGER NOT NULL,           -- all but tombstones
    bytes INTEGER NOT NULL               -- of their records
) WITHOUT ROWID;
UPDATE sessions SET bytes = (SELECT COALESCE(SUM(LENGTH(data)), 0) FROM records WHERE session = sessions.id);
INSERT INTO tenants SELECT tenant, COUNT(*), SUM(bytes) FROM sessions WHERE deleted = 0 GROUP BY tenant;
"""

_SECOND_TRIGGERS = """
CREATE INDEX labels_newest ON labels (tenant, name, value, update_ms, session_id);
CREATE TRIGGER records_in AFTER INSERT ON records BEGIN
    UPDATE sessions SET bytes = bytes + LENGTH(NEW.data) WHERE id = NEW.session;
END;
CREATE TRIGGER records_out AFTER DELETE ON records BEGIN
    UPDATE sessions SET bytes = bytes - LENGTH(OLD.data) WHERE id = OLD.session;
END;
CREATE TRIGGER records_changed AFTER UPDATE OF data ON records BEGIN
    UPDATE sessions SET bytes = bytes + LENGTH(NEW.data) - LENGTH(OLD.data) WHERE id = NEW.session;
END;
CREATE TRIGGER sessions_in AFTER INSERT ON sessions WHEN NEW.deleted = 0 BEGIN
    INSERT INTO tenants VALUES (NEW.tenant, 1, NEW.bytes)
        ON CONFLICT (tenant) DO UPDATE SET sessions = sessions + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER sessions_out AFTER DELETE ON sessions WHEN OLD.deleted = 0 BEGIN
    UPDATE tenants SET sessions = sessions - 1, bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
END;
CREATE TRIGGER sessions_grown AFTER UPDATE OF bytes ON sessions WHEN NEW.deleted = 0 BEGIN
    UPDATE tenants SET bytes = bytes + NEW.bytes - OLD.bytes WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER sessions_moved AFTER UPDATE OF update_ms ON sessions WHEN NEW.update_ms <> OLD.update_ms BEGIN
    UPDATE labels SET update_ms = NEW.update_ms WHERE session = NEW.id;
END;
"""


_THIRD = """
CREATE TABLE marks (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    revision INTEGER NOT NULL,           -- of the turn
    found_by TEXT NOT NULL,              -- _marks.found_by of its mark and one of its answers
    tenant TEXT NOT NULL,
    time_ms INTEGER NOT NULL,            -- of its record
    PRIMARY KEY (session, revision, found_by)
) WITHOUT ROWID;
CREATE INDEX marks_found ON marks (tenant, found_by, time_ms);
"""

_FOURTH = """
ALTER TABLE sessions ADD COLUMN crc INTEGER NOT NULL DEFAULT -1;          -- raw_rows.crc_of_row
ALTER TABLE sessions ADD COLUMN requests_sum INTEGER NOT NULL DEFAULT 0;  -- of crc over the session's requests
ALTER TABLE sessions ADD COLUMN marks INTEGER NOT NULL DEFAULT 0;         -- how many rows of marks it has
ALTER TABLE sessions ADD COLUMN labels INTEGER NOT NULL DEFAULT 0;        -- how many rows of labels it has
ALTER TABLE requests ADD COLUMN crc INTEGER NOT NULL DEFAULT -1;          -- raw_rows.crc_of_request
ALTER TABLE records ADD COLUMN named TEXT;                                -- raw_rows.name_of, in revision 1
CREATE INDEX records_named ON records (named) WHERE named IS NOT NULL;
"""


def read_schema(connection: sqlite3.Connection, path: Path) -> int:
    """Return the file's schema, 0 for an empty file. Raises FailedPrecondition (STORE_VERSION, STORE_FOREIGN)."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA:
        raise _refusals.newer_schema(str(found), SCHEMA)
    if found == 0 and connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
        raise FailedPrecondition(f"{path} is a SQLite file of another program", reason="STORE_FOREIGN")
    return found


def migrate(connection: sqlite3.Connection, found: int) -> str:
    """Create the tables or migrate an older schema, in one transaction; return the store id.

    Raises DataLoss and sqlite3's errors. The caller then closes the connection, which undoes the transaction.
    """
    if found < SCHEMA:
        if found:
            log.info(
                "migrating the history file from schema %d to %d: older programs can no longer open it",
                found,
                SCHEMA,
            )
        connection.execute("BEGIN IMMEDIATE")
        if found == 0:
            _run(connection, _FIRST)
            connection.execute("INSERT INTO store VALUES ('store_id', ?)", (uuid.uuid4().hex,))
        if found < 2:
            _run(connection, _SECOND)
            _add_labels(connection)
            _run(connection, _SECOND_TRIGGERS)
        if found < 3:
            _run(connection, _THIRD)  # older records have no mark
        if found < 4:
            _run(connection, _FOURTH)
            _add_checksums(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    named = connection.execute("SELECT value FROM store WHERE name = 'store_id'").fetchone()
    if named is None:
        raise DataLoss("the history file has lost its store id: it is damaged", reason="HISTORY_CORRUPT")
    return str(named[0])


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run statement by statement: ``executescript`` would commit first."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


def _add_labels(connection: sqlite3.Connection) -> None:
    decoder = msgspec.msgpack.Decoder(Meta)
    for number, blob in connection.execute("SELECT id, meta FROM sessions WHERE deleted = 0"):
        try:
            row = decoder.decode(blob).row
        except (msgspec.MsgspecError, ValueError):
            continue
        connection.executemany(
            "INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?)",
            [
                (number, name, value, row.tenant, row.update_ms, row.session_id)
                for name, value in row.labels.items()
            ],
        )


def _add_checksums(connection: sqlite3.Connection) -> None:
    """Add the checksums, counts and names that an older file lacks; wrong rows fail their checksum."""
    connection.create_function("crc_of_request", 4, _crc_of_request, deterministic=True)
    connection.execute("UPDATE requests SET crc = crc_of_request(session, request_id, fingerprint, revision)")
    connection.execute(
        "UPDATE sessions SET"
        " requests_sum = (SELECT COALESCE(SUM(crc), 0) FROM requests WHERE session = sessions.id),"
        " marks = (SELECT COUNT(*) FROM marks WHERE session = sessions.id),"
        " labels = (SELECT COUNT(*) FROM labels WHERE session = sessions.id)"
    )
    decoder, last = msgspec.msgpack.Decoder(Meta), -1
    while rows := connection.execute(
        "SELECT id, tenant, session_id, meta FROM sessions WHERE id > ? ORDER BY id LIMIT 1000",
        (last,),
    ).fetchall():
        for last, tenant, session_id, blob in rows:
            key = Key(str(tenant), str(session_id))
            try:
                row = decoder.decode(blob).row
            except (msgspec.MsgspecError, ValueError, TypeError):
                continue
            if Key(row.tenant, row.session_id) == key:
                crc = crc_of_row(key, blob)
                connection.execute("UPDATE sessions SET crc = ? WHERE id = ?", (crc, last))
                connection.execute(
                    "UPDATE records SET named = ? WHERE session = ? AND revision = 1", (name_of(key), last)
                )


def _crc_of_request(session: object, request_id: object, fingerprint: object, revision: object) -> int:
    """Return -1 if the types are not those of a request."""
    if not (isinstance(session, int) and isinstance(revision, int)):
        return -1
    if not (isinstance(request_id, str) and isinstance(fingerprint, str)):
        return -1
    return crc_of_request(session, request_id, fingerprint, revision)
