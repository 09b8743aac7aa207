"""What a history file derives from its records is never believed over them."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from pensieve.store import Began, BeginOutcome, Replay
from pensieve.store._codec import encode_record
from pensieve.store.records import State
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import TENANT, counts, first_record, key, request, row, turn_record, whole_turn

KEY = key()
OTHER = key("s2")
TURNS = 6
LABELS = {"team": "blue"}
FIRST = replace(first_record(), labels=LABELS)
DAMAGES = {
    "a request gone": "DELETE FROM requests WHERE request_id = 'r3'",
    "all requests gone": "DELETE FROM requests",
    "another request id": "UPDATE requests SET request_id = 'r?' WHERE request_id = 'r3'",
    "another revision": "UPDATE requests SET revision = 2 WHERE request_id = 'r3'",
    "a revision of text": "UPDATE requests SET revision = 'text'",
    "another fingerprint": "UPDATE requests SET fingerprint = 'fp-r?' WHERE request_id = 'r3'",
    "a fingerprint of bytes": "UPDATE requests SET fingerprint = x'00'",
    "requests of another": "UPDATE requests SET session = 3 WHERE session = 1",
    "another sum": "UPDATE sessions SET requests_sum = requests_sum + 1",
    "another checksum": "UPDATE requests SET crc = 0 WHERE request_id = 'r3'",
    "the row gone": "DELETE FROM sessions WHERE session_id = 's1'",
    "a row of noise": "UPDATE sessions SET meta = x'00ff' WHERE session_id = 's1'",
    "a row of another": "UPDATE sessions SET meta = (SELECT meta FROM sessions WHERE session_id = 's2')",
    "a column changed": "UPDATE sessions SET deleted = 1, expire_ms = 5, update_ms = 7 WHERE session_id = 's1'",
    "another name": "UPDATE sessions SET session_id = 'S1' WHERE session_id = 's1'",
}


async def made(path: Path) -> list[bytes]:
    """The records of s1 in a new file, beside another session."""
    store = SqliteStore(path)
    await store.open()
    for at in (KEY, OTHER):
        await store.create(row(at, labels=LABELS), FIRST, "fp")
        for base in range(1, TURNS + 1):
            await whole_turn(store, at, base)
    held = [encode_record(one.record) for one in await store.read(KEY)]
    await store.close()
    return held


def execute(path: Path, statement: str) -> None:
    """As another program, which knows nothing of foreign keys."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


async def retried(store: SqliteStore, request_id: str) -> BeginOutcome:
    """A client tries again what it has sent before; the server appends what is not known."""
    outcome = await store.begin(KEY, request(request_id, "again"))
    if isinstance(outcome, Began):
        base = outcome.row.revision
        await store.commit(KEY, "again", f"fp-{request_id}", turn_record(base, request_id), counts(base + 1))
    return outcome


@pytest.mark.fault(43)
@pytest.mark.parametrize("beside", [False, True], ids=["before the start", "beside the server"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_retry_is_committed_once_whatever_the_file_derives(
    tmp_path: Path, damage: str, beside: bool
) -> None:
    path = tmp_path / "h.db"
    held = await made(path)
    if not beside:
        execute(path, DAMAGES[damage])
    store = SqliteStore(path)
    await store.open()
    if beside:
        assert isinstance(await store.begin(KEY, request("unsent", "t")), Began)
        await store.abort(KEY, "t")
        execute(path, DAMAGES[damage])
    for base in (3, TURNS):
        outcome = await retried(store, f"r{base}")
        assert isinstance(outcome, Replay) and outcome.revision == base + 1
        assert await store.find_request(KEY, f"r{base}") == base + 1
    assert await store.find_request(KEY, "never") is None
    assert [encode_record(one.record) for one in await store.read(KEY)] == held
    assert (await store.load(KEY)).state is State.ACTIVE
    assert isinstance(await retried(store, "new"), Began)
    assert isinstance(await retried(store, "new"), Replay)
    page = await store.list_sessions(TENANT, limit=9, labels=LABELS)
    assert {one.session_id for one in page.rows} == {"s1", "s2"}
    await store.close()


async def test_a_lost_row_gives_its_number_to_no_other_session(tmp_path: Path) -> None:
    """Its records would be found under the other name."""
    path = tmp_path / "h.db"
    await made(path)
    execute(path, "DELETE FROM sessions WHERE session_id = 's2'")
    store = SqliteStore(path)
    await store.open()
    await store.create(row(key("s3")), first_record(), "fp")
    assert (await store.load(key("s3"))).revision == 1
    assert (await store.load(OTHER)).revision == TURNS + 1
    await store.close()


async def test_a_create_is_repeated_when_its_row_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    held = await made(path)
    execute(path, "DELETE FROM sessions WHERE session_id = 's1'")
    store = SqliteStore(path)
    await store.open()
    again = await store.create(row(KEY, labels=LABELS), FIRST, "fp")
    assert again.revision == TURNS + 1 and len(await store.read(KEY)) == len(held)
    await store.close()


async def test_a_row_that_named_more_records_than_there_are_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    await made(path)
    execute(path, "UPDATE sessions SET crc = 1 WHERE session_id = 's1'")
    execute(path, f"DELETE FROM records WHERE session = 1 AND revision = {TURNS + 1}")
    execute(path, f"DELETE FROM requests WHERE session = 1 AND revision = {TURNS + 1}")
    store = SqliteStore(path)
    await store.open()
    assert (await store.load(KEY)).state is State.DAMAGED
    await store.close()


async def test_a_turn_asks_the_file_for_its_own_session_alone(tmp_path: Path) -> None:
    """From the second turn on, whether a request id is new is known without reading the others."""
    store = SqliteStore(tmp_path / "h.db")
    await store.open()
    steps = []
    for at, turns in ((KEY, 300), (OTHER, 3)):
        await store.create(row(at), first_record(), "fp")
        for base in range(1, turns):
            await whole_turn(store, at, base)
        count: list[int] = []
        connection = store._database.file.connection()
        connection.set_progress_handler(lambda count=count: count.append(1), 1)
        await whole_turn(store, at, turns)
        connection.set_progress_handler(None, 0)
        steps.append(len(count))
    assert steps[0] < 2 * steps[1]
    await store.close()
