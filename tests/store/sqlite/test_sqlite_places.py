"""One history file under several names, or under none any more, and the room that its log of changes takes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.errors import FailedPrecondition, Unavailable
from pensieve.store._sqlite import disk
from pensieve.store._sqlite import file as sqlite_file
from pensieve.store.sqlite_store import SqliteStore
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

KEY = key()


@contextlib.asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[SqliteStore]:
    """A store that is known by a link to another folder; it has one session of one turn."""
    (folder / "disk").mkdir()
    link = folder / "link.db"
    link.symlink_to(folder / "disk" / "h.db")
    async with opened_sqlite(link) as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        yield store


async def refused(path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="in use by another Pensieve server") as caught:
        async with opened_sqlite(path):
            pass
    assert caught.value.reason == "STORE_LOCKED"


# ---- one server, whatever the name


@pytest.mark.fault(33, 62)
async def test_a_link_and_what_it_leads_to_are_one_file(tmp_path: Path) -> None:
    async with linked(tmp_path):
        await refused(tmp_path / "disk" / "h.db")
    async with opened_sqlite(tmp_path / "disk" / "h.db"):
        await refused(tmp_path / "link.db")


@pytest.mark.fault(33, 62)
@pytest.mark.parametrize("how", ["hard link", "lock file deleted"])
async def test_the_file_itself_is_locked(tmp_path: Path, how: str) -> None:
    path = other = tmp_path / "h.db"
    async with opened_sqlite(path) as store:
        await store.create(row(KEY), first_record(), "fp")
        if how == "hard link":
            other = tmp_path / "g.db"
            other.hardlink_to(path)
        else:
            (tmp_path / "h.db.lock").unlink()
        await refused(other)
        await whole_turn(store, KEY, 1)
    async with opened_sqlite(other) as store:
        assert len(await store.read(KEY)) == 2


@pytest.mark.parametrize(
    ("number", "served"), [(errno.ENOLCK, False), (errno.EIO, False), (errno.EINVAL, True)]
)
async def test_a_lock_that_fails_is_told_and_one_that_the_kernel_lacks_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, served: bool
) -> None:
    """The lock file is there all the same; a network file system that has lost its locks is no place for a history."""

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.fcntl, "fcntl", failing)
    store = SqliteStore(tmp_path / "h.db")
    if served:
        await store.open()
        await refused(tmp_path / "h.db")
        await store.close()
    else:
        with pytest.raises(Unavailable, match=f"cannot lock .*h.db: {os.strerror(number)}"):
            await store.open()


@pytest.mark.fault(62)
async def test_behind_a_link_the_log_of_changes_is_emptied_and_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "LOG_BYTES", 30_000)
    written: list[Path] = []
    monkeypatch.setattr(disk, "_write_again", written.append)
    async with linked(tmp_path) as store:
        log = tmp_path / "disk" / "h.db-wal"
        most = 0
        for base in range(2, 12):
            await whole_turn(store, KEY, base, "x" * 10_000)
            most = max(most, log.stat().st_size)
        assert 0 < most < 200_000
        await store._database._in_thread(
            lambda: store._database.file.close_after_error(Unavailable("a disk error"))
        )
        assert len(await store.read(KEY)) == 12
    assert log in written
    assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "link.db"]


async def test_a_link_that_leads_elsewhere_now(tmp_path: Path) -> None:
    async with linked(tmp_path) as store:
        (tmp_path / "other.db").write_bytes((tmp_path / "disk" / "h.db").read_bytes())
        (tmp_path / "new").symlink_to(tmp_path / "other.db")
        (tmp_path / "new").rename(tmp_path / "link.db")
        with pytest.raises(Unavailable) as caught:
            await whole_turn(store, KEY, 2)
        assert caught.value.reason == "STORE_REPLACED"


# ---- opened on a disk in trouble, or after a renewal that was cut off


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "STORE_FULL"),
        (errno.EDQUOT, "STORE_FULL"),
        (errno.EROFS, "STORE_FULL"),
        (errno.EIO, "STORE_UNAVAILABLE"),
    ],
    ids=lambda one: errno.errorcode[one] if isinstance(one, int) else one,
)
async def test_a_start_tells_a_full_disk_from_a_sick_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    async with opened_sqlite(tmp_path / "h.db"):
        pass

    def failing(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "fsync_path", failing)
    with pytest.raises(Unavailable, match=os.strerror(number)) as caught:
        await SqliteStore(tmp_path / "h.db").open()
    assert caught.value.reason == reason


async def test_a_file_made_of_one_that_is_no_longer_there_is_not_taken_and_not_left(tmp_path: Path) -> None:
    path, left = tmp_path / "h.db", tmp_path / ".h.db.renewed-1"
    async with opened_sqlite(path) as store:
        await store.create(row(KEY), first_record(), "fp")
    shutil.copy(path, left)
    older = left.read_bytes()
    async with opened_sqlite(path) as store:
        await whole_turn(store, KEY, 1)
    assert not left.exists()
    left.write_bytes(older)
    async with opened_sqlite(path) as store:
        assert len(await store.read(KEY)) == 2
    assert not left.exists()


# ---- deleted while in use


@pytest.mark.fault(63)
@pytest.mark.parametrize("deleted", [["-wal"], ["-wal", "-shm"]], ids="".join)
@pytest.mark.parametrize("noticed", ["by a turn", "by a ping"])
async def test_turns_outlive_the_log_of_changes_that_held_them(
    tmp_path: Path, deleted: list[str], noticed: str
) -> None:
    """What is deleted looks like rubbish and holds the newest turns, which a copy of what is left must have."""
    path = tmp_path / "h.db"
    async with opened_sqlite(path) as store:
        await store.create(row(KEY), first_record(), "fp")
        for base in (1, 2):
            await whole_turn(store, KEY, base)
        for suffix in deleted:
            os.unlink(f"{path}{suffix}")
        if noticed == "by a turn":
            await whole_turn(store, KEY, 3)
        else:
            await store.ping()
        after_a_crash = tmp_path / "crash"
        after_a_crash.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", after_a_crash / f"h.db{suffix}")
        async with opened_sqlite(after_a_crash / "h.db") as found:
            assert len(await found.read(KEY)) == (4 if noticed == "by a turn" else 3)
        await store.ping()
        revision = (await store.load(KEY)).revision
        assert (await whole_turn(store, KEY, revision)).revision == revision + 1


@pytest.mark.fault(63)
async def test_while_another_program_reads_the_deleted_log_of_changes_no_turn_is_taken(
    tmp_path: Path,
) -> None:
    """It could not be brought into the file, and a new log would hide what it holds."""
    path = tmp_path / "h.db"
    async with opened_sqlite(path) as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT COUNT(*) FROM sessions").fetchone()
            await whole_turn(store, KEY, 2)
            os.unlink(f"{path}-wal")
            with pytest.raises(Unavailable, match="another program reads the deleted write-ahead log"):
                await store.ping()
        await store.ping()
        assert len(await store.read(KEY)) == 3
        await whole_turn(store, KEY, 3)


@pytest.mark.fault(38)
async def test_a_full_disk_gets_back_what_the_log_of_changes_takes(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        connection = store._database.file.connection()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLITE_FULL as from a full disk
        await store.begin(KEY, request("r2", "t2"))
        log = tmp_path / "h.db-wal"
        assert log.stat().st_size
        with pytest.raises(Unavailable) as caught:
            await store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2", "x" * 100_000), counts(3))
        assert caught.value.reason == "STORE_FULL"
        assert not log.stat().st_size
        assert (await store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3))).revision == 3


@pytest.mark.fault(38)
async def test_a_disk_that_is_nearly_full_is_not_filled_by_the_log_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full of it, the disk would have no room for the pages in it, and it could never be emptied."""
    monkeypatch.setattr(sqlite_file, "SHORT_BYTES", 1 << 60)
    monkeypatch.setattr(sqlite_file, "SHORT_LOG_BYTES", 30_000)
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        most = 0
        for base in range(1, 21):
            await whole_turn(store, KEY, base, "x" * 10_000)
            most = max(most, (tmp_path / "h.db-wal").stat().st_size)
        assert 0 < most < 200_000
