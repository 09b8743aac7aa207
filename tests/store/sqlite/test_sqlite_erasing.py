"""Erased bytes leave the SQLite file and its log of changes: also when the caller goes away, or the process dies."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.errors import NotFound
from pensieve.store._sqlite.database import SqliteDatabase
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import first_record, key, opened_sqlite, row, whole_turn

KEY = key()
CANARY = b"canary"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Open, with one session that holds the canary, in the file and in the log."""
    (tmp_path / "disk").mkdir()
    async with opened_sqlite(tmp_path / "disk" / "h.db") as one:
        await one.create(row(KEY), first_record(), "fp")
        await whole_turn(one, KEY, 1, CANARY.decode() * 100)
        yield one


def held(folder: Path) -> bool:
    return any(CANARY in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("passes", range(12))
async def test_a_caller_that_goes_away_leaves_all_or_nothing(store: SqliteStore, passes: int) -> None:
    """It is cancelled after some passes of the event loop."""
    deletion = asyncio.create_task(store.delete(KEY))
    for _ in range(passes):
        await asyncio.sleep(0.0002 * passes)
    deletion.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await deletion
    with contextlib.suppress(NotFound):
        await store.renew_leases([], 1000)  # behind whatever the deletion had begun
        await store.load(KEY)
        assert held(store.path.parent)
        return
    assert not held(store.path.parent)


async def test_a_process_that_dies_before_the_log_is_emptied(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy = SqliteDatabase._tidy

    def dying(database: SqliteDatabase) -> None:
        shutil.copytree(store.path.parent, tmp_path / "left")
        tidy(database)

    monkeypatch.setattr(SqliteDatabase, "_tidy", dying)
    await store.delete(KEY)
    assert held(tmp_path / "left") and not held(store.path.parent)
    monkeypatch.undo()
    async with opened_sqlite(tmp_path / "left" / "h.db") as again:
        assert not held(tmp_path / "left")
        with pytest.raises(NotFound):
            await again.load(KEY)


async def test_what_another_program_keeps_is_said_until_it_is_gone(store: SqliteStore) -> None:
    assert store.remnants == ""
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT COUNT(*) FROM sessions").fetchone()
        await store.delete(KEY)
        assert held(store.path.parent) and "another program" in store.remnants
    await store.ping()
    assert not held(store.path.parent) and store.remnants == ""
