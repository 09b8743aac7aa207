"""A power cut or a kill in the middle of a commit: what was flushed before is there, whatever else reached the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.store.records import State
from support.store.store_bench import (
    counts,
    first_record,
    key,
    opened_sqlite,
    request,
    row,
    turn_record,
    whole_turn,
)

PAGE = 4096
KEYS = [key(f"s{number}") for number in range(3)]


async def amid_commit(path: Path, *, used_again: bool) -> tuple[bytes, bytes, bytes]:
    """The file and its log of changes before a commit is flushed, and the log with all that the commit writes.

    ``used_again``: the log is written from its beginning again, over the changes of an earlier time.
    """
    log = Path(f"{path}-wal")
    async with opened_sqlite(path) as store:
        for at in KEYS:
            await store.create(row(at), first_record(), "fp")
            for base in range(1, 4):
                await whole_turn(store, at, base, "x" * 2000)
        if used_again:
            connection = store._database.file.connection
            checkpoint = "PRAGMA wal_checkpoint(PASSIVE)"
            await store._database._in_thread(lambda: connection().execute(checkpoint).fetchall())
        for at in KEYS:
            await whole_turn(store, at, 4)
        file, before = path.read_bytes(), log.read_bytes()
        for at in KEYS:
            await store.begin(at, request("r5", "t5"))  # not flushed by itself
        await store.commit(KEYS[0], "t5", "fp-r5", turn_record(5, "r5", "y" * 6000), counts(6))
        return file, before, log.read_bytes()


async def check_served(folder: Path, file: bytes, log: bytes) -> bool:
    """Whether the server took the file for damaged. Every confirmed turn is there, and each session goes on."""
    folder.mkdir()
    path = folder / "h.db"
    path.write_bytes(file)
    Path(f"{path}-wal").write_bytes(log)
    async with opened_sqlite(path) as store:
        for at in KEYS:
            found = await store.load(at)
            assert found.state is State.ACTIVE
            assert len(await store.read(at)) == found.revision
            assert found.revision == 5 or (at == KEYS[0] and found.revision == 6)
            await whole_turn(store, at, found.revision, "and on")
    return any(folder.glob("*.damaged-*"))


@pytest.mark.fault(37)
@pytest.mark.parametrize("used_again", [False, True], ids=["new log", "log used again"])
async def test_pages_that_never_reached_the_disk(tmp_path: Path, used_again: bool) -> None:
    """They are written in any order until the flush is over: each of them is missing once."""
    file, before, log = await amid_commit(tmp_path / "h.db", used_again=used_again)
    before = before.ljust(len(log), b"\0")
    pages = [at for at in range(0, len(log), PAGE) if log[at : at + PAGE] != before[at : at + PAGE]]
    assert len(pages) > 10
    for at in pages:
        cut = log[:at] + before[at : at + PAGE] + log[at + PAGE :]
        await check_served(tmp_path / f"cut{at}", file, cut)


@pytest.mark.fault(37)
async def test_a_kill_between_two_writes_is_no_damage(tmp_path: Path) -> None:
    """What follows in the log is of an earlier time."""
    file, before, log = await amid_commit(tmp_path / "h.db", used_again=True)
    assert len(before) == len(log)
    first = next(at for at in range(len(log)) if log[at] != before[at])
    for at in range(first + 10, first + 6 * PAGE, PAGE // 2):
        assert not await check_served(tmp_path / f"cut{at}", file, log[:at] + before[at:])
