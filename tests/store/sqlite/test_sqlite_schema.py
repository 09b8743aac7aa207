"""History files of other versions of the program: an older one is brought up to date, a newer one is left alone."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

import pytest

from pensieve.errors import FailedPrecondition
from pensieve.store import TenantUsage
from pensieve.store._codec import encode_record
from pensieve.store._sqlite import schema
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import TENANT, first_record, key, row, turn_record, whole_turn

KEY = key()


def statements(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [text for (text,) in connection.execute("SELECT sql FROM sqlite_schema ORDER BY name")]


async def make_first_schema(path: Path) -> None:
    """A file as the first version of the schema had it: three sessions, one of them damaged, one of them labelled."""
    store = SqliteStore(path)
    await store.open()
    await store.create(row(KEY, labels={"team": "blue", "kind": "chat"}), first_record(), "fp")
    await whole_turn(store, KEY, 1)
    for name in ("plain", "broken", "gone"):
        await store.create(row(key(name)), first_record(), "fp")
    await store.delete(key("gone"))
    await store.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            connection.execute(f"DROP TRIGGER {name}")
        for table in ("labels", "tenants", "marks"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("DROP INDEX records_named")
        for column in ("bytes", "crc", "requests_sum", "marks", "labels"):
            connection.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        connection.execute("ALTER TABLE requests DROP COLUMN crc")
        connection.execute("ALTER TABLE records DROP COLUMN named")
        connection.execute("UPDATE sessions SET meta = x'C1' WHERE session_id = 'broken'")
        connection.execute("PRAGMA user_version = 1")


async def test_an_older_file_is_brought_up_to_date(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "h.db"
    await make_first_schema(path)
    first = tmp_path / "first.db"
    with contextlib.closing(sqlite3.connect(first, isolation_level=None)) as connection:
        connection.executescript(schema._FIRST)
    assert sorted(statements(path), key=str) == sorted(statements(first), key=str)

    caplog.set_level(logging.INFO)
    store = SqliteStore(path)
    await store.open()
    told = f"from schema 1 to {schema.SCHEMA}: older programs can no longer open it"
    assert told in caplog.text, "who goes back to an older program has to know"
    caplog.clear()
    for labels in ({"team": "blue"}, {"team": "blue", "kind": "chat"}):
        page = await store.list_sessions(TENANT, limit=9, labels=labels)
        assert [one.session_id for one in page.rows] == [KEY.session_id]
    size = 3 * len(encode_record(first_record())) + len(encode_record(turn_record(1, "r1")))
    assert await store.usage(TENANT) == TenantUsage(3, size)
    await whole_turn(store, KEY, 2)
    size += len(encode_record(turn_record(2, "r2")))
    assert await store.usage(TENANT) == TenantUsage(3, size)
    await store.close()
    fresh = SqliteStore(tmp_path / "fresh.db")
    await fresh.open()
    await fresh.close()
    assert set(statements(path)) == set(statements(tmp_path / "fresh.db"))
    assert "schema" not in caplog.text, "nothing of a new file"


async def test_a_file_of_the_second_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """As a program of that time wrote it, byte for byte."""
    path = tmp_path / "h.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "schema2.sql").read_text())
        connection.execute("PRAGMA user_version = 2")
    store = SqliteStore(path)
    await store.open()
    kept = key("kept")
    log = [logged.record for logged in await store.read(kept)]
    assert log == [first_record(), turn_record(1, "r1"), turn_record(2, "r2")]
    assert [one.turn.annotations for one in log if one.turn is not None] == [{}, {}]
    page = await store.list_sessions(TENANT, limit=9, labels={"team": "blue"})
    assert [one.session_id for one in page.rows] == ["kept"]
    await whole_turn(store, kept, 3)
    assert (await store.load(kept)).revision == 4
    await store.close()
    fresh = SqliteStore(tmp_path / "fresh.db")
    await fresh.open()
    await fresh.close()
    assert set(statements(path)) == set(statements(tmp_path / "fresh.db"))


@pytest.mark.fault(53)
async def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(row(KEY), first_record(), "fp")
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition, match="upgrade Pensieve") as caught:
        await SqliteStore(path).open()
    assert caught.value.reason == "STORE_VERSION"
    assert path.read_bytes() == before


async def test_a_file_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE t (x)")
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition) as caught:
        await SqliteStore(path).open()
    assert caught.value.reason == "STORE_FOREIGN"
    assert path.read_bytes() == before
