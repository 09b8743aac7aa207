"""Pages of a file read from its bytes: every row that SQLite finds in a sound file, with the values that it reads."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from pensieve.store._sqlite.pages import Pages

LENGTHS = [*range(0, 3000, 171), *range(3900, 4700, 19), *range(8000, 8700, 97), 30_000]
"""Bytes of a row. What stays on its own page changes its rule at 4061, and again with each page that continues it."""
ROWIDS = [-(1 << 63), -1, 0, 127, 128, 1 << 42, (1 << 56) - 1, 1 << 56, (1 << 63) - 1]
VALUES = [
    None,
    0,
    1,
    -1,
    127,
    -32768,
    1 << 22,
    -(1 << 31),
    1 << 46,
    -(1 << 63),
    0.5,
    -1e300,
    "",
    "späť",
    b"\0",
]


@pytest.mark.parametrize("size", [512, 4096, 65536])
@pytest.mark.parametrize("logged", [False, True], ids=["in the file", "in the log of changes"])
def test_each_row_is_read_as_sqlite_reads_it(tmp_path: Path, size: int, logged: bool) -> None:
    path = tmp_path / "h.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {size}")
        connection.execute(f"PRAGMA journal_mode = {'WAL' if logged else 'DELETE'}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE t (number INTEGER PRIMARY KEY, value, data)")
        connection.execute("CREATE INDEX by_data ON t (data, value)")
        rows: list[tuple[int, object, object]] = [(rowid, "at", b"x") for rowid in ROWIDS]
        rows += [(1000 + at, value, "v") for at, value in enumerate(VALUES)]
        rows += [(2000 + length, "of", b"d" * length) for length in LENGTHS]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        in_table = connection.execute("SELECT rowid, NULL, value, data FROM t").fetchall()
        in_index = connection.execute("SELECT data, value, rowid FROM t").fetchall()
        with contextlib.closing(Pages(path)) as pages:
            found = [row for row in pages.rows() if row is not None and len(row.values) == 3]
    assert all(row.is_whole for row in found)
    of_table = [(row.rowid, *row.values) for row in found if row.is_table_row]
    of_index = [tuple(row.values) for row in found if not row.is_table_row]
    assert sorted(of_table, key=repr) == sorted(in_table, key=repr)
    assert sorted(of_index, key=repr) == sorted(in_index, key=repr)
