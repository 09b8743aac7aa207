"""Check a history file's b-trees and the rows that are derived from its records.

SQLite does not report a row that is missing or out of place: it just does not find the row.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from typing import Final

from pensieve.store._rules import Moment
from pensieve.store._sqlite.errors import SQLITE_ERRORS, is_interrupt
from pensieve.store._sqlite.raw_rows import ORPHANS, columns_of, key_from_name, read_row
from pensieve.store._sqlite.rows import Rows
from pensieve.store.contract import Key

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""Longest check at start; the rest is found only when it is met."""
TENANTS: Final = "SELECT tenant, COUNT(*), SUM(bytes) FROM sessions WHERE deleted = 0 GROUP BY tenant"
_DERIVED: Final = ("sessions", "requests", "labels", "marks", "tenants")
_STEPS: Final = 10_000


class OutOfTime(Exception):
    """The time limit was reached."""


def is_sound(connection: sqlite3.Connection) -> bool:
    """Whether every page and index is as SQLite would write it. Reads the whole file. Raises OutOfTime."""
    try:
        tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        }
        derived = [
            f"integrity_check({table})" for table in _DERIVED if table in tables
        ]  # an older file has fewer
        for check in (*derived, "integrity_check(1)"):
            if connection.execute(f"PRAGMA {check}").fetchall() != [("ok",)]:
                return False
    except SQLITE_ERRORS as error:
        if is_interrupt(error):
            raise OutOfTime from error
        return False
    return True


def reindex(connection: sqlite3.Connection) -> bool:
    """Rebuild all indexes. Returns whether the file is then sound; if not, nothing was changed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("REINDEX")
        if is_sound(connection):
            connection.execute("COMMIT")
            return True
    except SQLITE_ERRORS:
        pass
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    return False


def rebuild_all_derived(connection: sqlite3.Connection, now: Moment) -> int:
    """Rebuild rows that contradict the records; return for how many sessions. Raises sqlite3's errors, OutOfTime."""
    try:
        wrong = list(dict.fromkeys(_inconsistent_sessions(connection)))
        sums = set(connection.execute("SELECT * FROM tenants WHERE sessions <> 0 OR bytes <> 0"))
        sums_hold = sums == set(connection.execute(TENANTS))
    except sqlite3.OperationalError as error:
        if is_interrupt(error):
            raise OutOfTime from error
        raise
    if not wrong and sums_hold:
        return 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        rows = Rows(connection)
        for key in wrong:
            rows.rebuild_derived(key, now)
        make_sums(connection)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if wrong:
        log.error(
            "the history file contradicted its records: derived rows of %d sessions are rebuilt",
            len(wrong),
        )
    return len(wrong)


def make_sums(connection: sqlite3.Connection) -> None:
    """Recompute tenants' totals, and remove derived rows without a session."""
    for table in ("requests", "labels", "marks"):
        connection.execute(
            f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions NOT INDEXED)"
            " AND session NOT IN (SELECT session FROM records)"
        )
    connection.execute("DELETE FROM tenants")
    connection.execute(f"INSERT INTO tenants {TENANTS}")


@contextlib.contextmanager
def time_limit(connection: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Interrupt the body's statements after ``seconds``."""
    until = time.monotonic() + seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > until), _STEPS)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def _inconsistent_sessions(connection: sqlite3.Connection) -> Iterator[Key]:
    """Yield sessions whose rows fail a check that does not need their records."""
    counted = {
        table: dict(connection.execute(f"SELECT session, {value} FROM {table} GROUP BY session").fetchall())
        for table, value in (("requests", "SUM(crc)"), ("marks", "COUNT(*)"), ("labels", "COUNT(*)"))
    }
    for number, tenant, session_id, crc, blob, requests_sum, marks, labels, *columns in connection.execute(
        "SELECT id, tenant, session_id, crc, meta, requests_sum, marks, labels, update_ms, expire_ms, deleted, leased"
        " FROM sessions NOT INDEXED"
    ):
        key = Key(str(tenant), str(session_id))
        meta = read_row(key, crc, blob).meta
        if meta is None:
            yield _name_in_records(connection, number) or key
        elif (
            columns_of(meta) != tuple(columns)
            or counted["requests"].get(number, 0) != requests_sum
            or counted["marks"].get(number, 0) != marks
            or not counted["labels"].get(number, 0) == labels == len(meta.row.labels)
        ):
            yield key
    for _, name in connection.execute(ORPHANS):
        lost = key_from_name(name)
        if lost is not None:
            yield lost


def _name_in_records(connection: sqlite3.Connection, number: int) -> Key | None:
    found = connection.execute(
        "SELECT named FROM records WHERE session = ? AND revision = 1", (number,)
    ).fetchone()
    return None if found is None else key_from_name(found[0])
