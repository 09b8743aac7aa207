"""Damaged pages of a history file: every answer is right or says that something is lost, and none is a bug."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError
from pensieve.store import HistoryStore, Key, LoggedRecord
from pensieve.store.records import State
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import TENANT, first_record, key, request, row, whole_turn

PAGE = 4096
SEEDS = 15
KEYS = [key(f"s{number}") for number in range(6)]
ALLOWED = {
    "HISTORY_CORRUPT",
    "HISTORY_REGRESSED",
    "SESSION_DAMAGED",
    "SESSION_NOT_FOUND",
    "STORE_FOREIGN",
    "STORE_FULL",  # SQLite calls a file read-only whose header says that a newer SQLite has written it
    "STORE_UNAVAILABLE",
    "STORE_VERSION",
    "REQUEST_ID_REUSED",
    "REVISION_MISMATCH",
    "SESSION_EXISTS",
    "TURN_FENCED",
}


async def made(path: Path) -> dict[Key, list[LoggedRecord]]:
    """What the sessions of a new file hold."""
    store = SqliteStore(path)
    await store.open()
    for number, at in enumerate(KEYS):
        await store.create(row(at, labels={"team": "blue"}), first_record(), "fp")
        for base in range(1, 4):
            await whole_turn(store, at, base, "x" * 700 * (number + 1))
    held = {at: await store.read(at) for at in KEYS}
    await store.close()
    return held


def damaged(data: bytes, chance: random.Random) -> bytes:
    """``data`` with some pages zeroed, filled at random or exchanged, and some bytes changed; the first page stays."""
    pages = [bytearray(data[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    for _ in range(chance.randrange(1, 1 + max(2, len(pages) // 3))):
        one, other = chance.randrange(1, len(pages)), chance.randrange(1, len(pages))
        match chance.randrange(4):
            case 0:
                pages[one][:] = bytes(PAGE)
            case 1:
                pages[one][:] = chance.randbytes(PAGE)
            case 2:
                pages[one], pages[other] = pages[other], pages[one]
            case _:
                for _ in range(8):
                    pages[one][chance.randrange(PAGE)] = chance.randrange(256)
    return b"".join(pages)


async def test_damage_is_told_and_never_a_bug(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    held = await made(path)
    sound = path.read_bytes()
    outcomes: Counter[str] = Counter()

    async def attempt(call: Awaitable[object]) -> object:
        try:
            answer = await call
        except PensieveError as error:
            assert error.reason in ALLOWED, error
            outcomes[error.reason] += 1
            return None
        outcomes["answered"] += 1
        return answer

    for seed in range(SEEDS):
        for left in tmp_path.glob("h.db*"):  # the log of changes of a file that could not be closed well
            left.unlink()
        path.write_bytes(damaged(sound, random.Random(seed)))
        store = SqliteStore(path)
        await attempt(store.open())
        for at in KEYS:
            for call in calls(store, at):
                await attempt(call())
            found = await attempt(store.read(at))
            # A log may have grown by the turn above, or be gone; what is read of it is what was written.
            assert found is None or not isinstance(found, list) or found[:4] == held[at][: len(found)], seed
        await attempt(store.list_sessions(TENANT, limit=99))
        await attempt(store.list_sessions(TENANT, limit=99, labels={"team": "blue"}))
        await attempt(store.usage(TENANT))
        await attempt(store.create(row(key("new")), first_record(), "fp"))
        await attempt(store.purge_expired())
        await attempt(store.delete(KEYS[0]))
        await attempt(store.ping())
        await store.close()
    assert outcomes["answered"] > 100 and outcomes["HISTORY_CORRUPT"] > 100, outcomes


def calls(store: HistoryStore, at: Key) -> list[Callable[[], Awaitable[object]]]:
    async def turn() -> object:
        try:
            return await whole_turn(store, at, 4)
        except FailedPrecondition:
            return None

    return [
        lambda: store.load(at),
        lambda: store.read(at, after_revision=2),
        lambda: store.find_request(at, "r2"),
        lambda: store.begin(at, request("r9", "t9")),
        lambda: store.abort(at, "t9"),
        turn,
    ]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET data = 'text' WHERE revision = 2",
        "UPDATE records SET crc = 'text' WHERE revision = 3",
        "UPDATE records SET head_hash = CAST(x'FFFE' AS TEXT) WHERE revision = 2",
        "UPDATE records SET head_hash = 'no hash' WHERE revision = 1",
        "UPDATE records SET head_hash = x'00' WHERE revision = 4",
        "UPDATE records SET revision = 9 WHERE revision = 3",
    ],
)
async def test_a_value_that_is_none_is_a_loss_of_its_session(tmp_path: Path, change: str) -> None:
    path = tmp_path / "h.db"
    await made(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("DELETE FROM sessions WHERE session_id <> 's0'")
        connection.execute(change)
    store = SqliteStore(path)
    await store.open()
    with pytest.raises(DataLoss) as caught:
        await store.find_request(KEYS[0], "r2")
        await store.read(KEYS[0], after_revision=1)
    assert caught.value.reason == "HISTORY_CORRUPT"
    assert (await store.load(KEYS[0])).state is State.DAMAGED
    await store.ping()
    await store.create(row(key("new")), first_record(), "fp")
    await store.close()
