"""The SQLite store while it serves: where its file is, whether it takes changes, how large its log of changes grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError, Unavailable
from pensieve.store import TenantUsage, sqlite_store
from pensieve.store._rules import Moment
from pensieve.store._sqlite import file as sqlite_file
from pensieve.store._sqlite import reader as sqlite_reader
from pensieve.store._sqlite import rows as sqlite_rows
from pensieve.store._sqlite.disk import content_digest, make_durable
from pensieve.store._sqlite.reader import SqliteReader
from pensieve.store._sqlite.recovery import rebuild_file
from pensieve.store._sqlite.rows import Rows
from pensieve.store.records import State
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import (
    TENANT,
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
OTHER = key("s2")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Open, with one session of one turn and an empty one."""
    one = SqliteStore(tmp_path / "h.db")
    await one.open()
    for at in (KEY, OTHER):
        await one.create(row(at), first_record(), "fp")
    await whole_turn(one, KEY, 1)
    try:
        yield one
    finally:
        await one.close()


async def test_another_program_that_writes_delays_all_changes_by_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_MS", 2000)
    async with opened_sqlite(tmp_path / "h.db") as store:
        with contextlib.closing(sqlite3.connect(tmp_path / "h.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            made = [store.create(row(key(f"s{number}")), first_record(), "fp") for number in range(20)]
            async with asyncio.timeout(20):  # half of what twenty waits take
                refused = await asyncio.gather(*made, return_exceptions=True)
            assert all(isinstance(one, Unavailable) and "locked" in one.message for one in refused)
            other.execute("ROLLBACK")
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)


def behind(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection, connection:
        connection.execute(statement, values)


async def reason(store: SqliteStore, base: int = 2) -> str:
    """Why a turn of ``KEY`` on revision ``base`` cannot be kept."""
    with pytest.raises(PensieveError) as caught:
        await whole_turn(store, KEY, base)
    return caught.value.reason


# ---- where the file is


@pytest.mark.fault(47)
@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_a_turn_is_not_kept_in_a_file_that_was_moved_away(store: SqliteStore, suffix: str) -> None:
    """The path leads nowhere, then to another file; when the file is back, its turns are."""
    path = Path(f"{store.path}{suffix}")
    moved = path.with_name("moved")
    await store.begin(KEY, request("r2", "t2"))
    path.rename(moved)
    record = turn_record(2, "r2")
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await store.commit(KEY, "t2", "fp-r2", record, counts(3))
        assert caught.value.reason == "STORE_REPLACED"
        path.write_bytes(moved.read_bytes())
    path.unlink()
    moved.rename(path)
    assert (await store.commit(KEY, "t2", "fp-r2", record, counts(3))).revision == 3
    await store.ping()


@pytest.mark.parametrize("copied", [True, False])
async def test_after_an_error_no_other_file_is_taken_for_the_one_that_was_open(
    store: SqliteStore, copied: bool
) -> None:
    """Neither an older copy, whose turns would go on from where it was made, nor a new and empty file."""
    older = store.path.read_bytes()
    moved = store.path.with_name("moved")
    store.path.rename(moved)
    if copied:
        store.path.write_bytes(older)
    database = store._database
    await database._in_thread(lambda: database.file.close_after_error(Unavailable("a disk error")))
    for call in (store.load(KEY), store.ping()):
        with pytest.raises(Unavailable) as caught:
            await call
        assert caught.value.reason == "STORE_REPLACED"
    assert store.path.exists() == copied
    moved.rename(store.path)
    await asyncio.sleep(sqlite_file.REOPEN_PAUSE_S)
    assert (await store.load(KEY)).revision == 2
    await whole_turn(store, KEY, 2)


async def test_a_file_given_up_is_left_as_it_is(store: SqliteStore) -> None:
    """Closing must not bring into the database what is perhaps not on the disk."""
    database, log = store.path.read_bytes(), Path(f"{store.path}-wal").read_bytes()
    assert log
    given_up = store._database._in_thread(
        lambda: store._database.file.close_after_error(Unavailable("a disk error"))
    )
    await given_up
    assert (store.path.read_bytes(), Path(f"{store.path}-wal").read_bytes()) == (database, log)
    assert (await store.load(KEY)).revision == 2


async def test_a_log_that_changes_while_it_is_opened_is_not_written_again(store: SqliteStore) -> None:
    connection = store._database.file.connection()
    seen = content_digest(Path(f"{store.path}-wal"))
    make_durable(connection, store.path, seen)
    await whole_turn(store, KEY, 2)
    with pytest.raises(Unavailable, match="changed while it was opened"):
        make_durable(connection, store.path, seen)
    await whole_turn(store, KEY, 3)


# ---- whether it takes changes


async def test_ping_makes_a_change_unless_one_was_just_made(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = []
    beat = Rows.beat
    monkeypatch.setattr(Rows, "beat", lambda self, now: (beats.append(now), beat(self, now))[1])
    store._database._proven_at = -1e9
    for _ in range(3):
        await store.ping()
    assert len(beats) == 1
    behind(store.path, "CREATE TRIGGER no BEFORE INSERT ON store BEGIN SELECT RAISE(ABORT, 'no'); END")
    store._database._proven_at = -1e9
    with pytest.raises(DataLoss):
        await store.ping()


@pytest.mark.fault(38)
async def test_ping_tells_of_a_disk_that_is_nearly_full(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(Unavailable) as caught:
        await store.ping()
    assert caught.value.reason == "STORE_FULL"
    monkeypatch.undo()
    await store.ping()


@pytest.mark.fault(38)
async def test_ping_tells_of_a_file_system_that_has_become_read_only(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux makes it after errors of the disk; it has room then."""
    found = os.statvfs(store.path)
    flags = os.statvfs_result([*found[:8], found.f_flag | os.ST_RDONLY, *found[9:]])
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    with pytest.raises(Unavailable, match="the file system is read-only") as caught:
        await store.ping()
    assert caught.value.reason == "STORE_FULL"
    monkeypatch.undo()
    await store.ping()


async def test_a_large_file_is_not_looked_over_for_each_session_that_has_lost_something(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(sqlite_file, "is_sound", lambda connection: looks.append(connection) or True)
    for _ in range(3):
        assert not await store._database.repair()
    assert len(looks) == 1
    monkeypatch.setattr(sqlite_file, "AGAIN_S", 0.0)
    assert not await store._database.repair()
    assert len(looks) == 2


@pytest.mark.fault(43)
async def test_a_file_made_of_a_damaged_one_is_as_private_from_its_first_byte_on(store: SqliteStore) -> None:
    made, modes = store.path.with_name(".h.db.new"), set[int]()

    def look(_what: str, _done: int, _of: int | None) -> None:
        if made.exists():
            modes.add(stat.S_IMODE(made.stat().st_mode))

    await store.close()
    before = os.umask(0)
    try:
        rebuild_file(store.path, Moment(1, 1), look)
    finally:
        os.umask(before)
    assert modes == {0o600}
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    store.path.chmod(0o640)
    rebuild_file(store.path, Moment(1, 1))
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o640, "who could read it still can"


@pytest.mark.fault(43)
async def test_a_file_with_a_damaged_page_is_served_without_what_it_has_lost(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(row(KEY), first_record(), "fp")
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'records'").fetchone()[0]
    with path.open("r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xff" * 4096)
    before = path.read_bytes()
    await store.open()
    await store.ping()
    with pytest.raises(DataLoss):
        await store.read(KEY)
    assert (await store.load(KEY)).state is State.DAMAGED
    await store.create(row(OTHER), first_record(), "fp")
    await whole_turn(store, OTHER, 1)
    await store.close()
    (kept,) = tmp_path.glob("h.db.damaged-*")
    assert kept.read_bytes() == before


@pytest.mark.fault(43)
@pytest.mark.parametrize("lost", ["PRAGMA user_version = 0", "DELETE FROM store"], ids=["schema", "name"])
async def test_a_file_that_has_lost_what_it_says_of_itself_is_served_again(
    store: SqliteStore, lost: str
) -> None:
    """It looks like another program's; what its pages hold tells that it is a history."""
    before = await store.read(KEY)
    await store.close()
    behind(store.path, lost)
    async with opened_sqlite(store.path) as again:
        assert await again.read(KEY) == before
        assert again.store_id
        await whole_turn(again, KEY, 2)
    assert list(store.path.parent.glob("h.db.damaged-*"))


@pytest.mark.fault(43)
async def test_a_server_whose_file_has_lost_its_name_keeps_it_and_goes_on(store: SqliteStore) -> None:
    """The server knows the name. Under a new one it would take its own file for another and refuse all work."""
    name = store.store_id
    await store._database.write(lambda rows: True, erases=True)
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'store'").fetchone()[0]
    with store.path.open("r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xff" * 4096)
    behind(store.path, "INSERT INTO tenants VALUES ('nobody', 0, 0)")  # so that the page is read again
    assert await store._database.repair()
    assert store.store_id == name
    await whole_turn(store, KEY, 2)
    assert len(await store.read(KEY)) == 3
    await store.close()
    async with opened_sqlite(store.path) as again:
        assert again.store_id == name
    assert list(store.path.parent.glob("h.db.damaged-*"))


async def test_an_unreadable_row_is_made_again_from_its_records(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    before = await store.load(KEY)
    behind(store.path, "UPDATE sessions SET meta = x'C1FF' WHERE session_id = ?", KEY.session_id)
    listed = {one.session_id: one.state for one in (await store.list_sessions(TENANT, limit=9)).rows}
    assert listed == {"s1": State.ACTIVE, "s2": State.ACTIVE}
    after = await store.load(KEY)
    assert (after.revision, after.head_hash, after.item_count) == (before.revision, before.head_hash, 2)
    assert len(await store.read(KEY)) == 2
    await whole_turn(store, KEY, 2)
    await whole_turn(store, OTHER, 1)
    await store.ping()
    assert caplog.text.count("derived rows are rebuilt") == 1


async def test_an_unreadable_row_of_a_broken_log_damages_its_session_alone(store: SqliteStore) -> None:
    behind(store.path, "UPDATE sessions SET meta = x'C1FF' WHERE session_id = ?", KEY.session_id)
    behind(store.path, "UPDATE records SET data = x'01' WHERE session = 1 AND revision = 2")
    listed = {one.session_id: one.state for one in (await store.list_sessions(TENANT, limit=9)).rows}
    assert listed == {"s1": State.DAMAGED, "s2": State.ACTIVE}
    with pytest.raises(FailedPrecondition):
        await store.begin(KEY, request("r2", "t2"))
    await whole_turn(store, OTHER, 1)
    await store.ping()


async def test_an_unreadable_row_can_be_deleted_and_does_not_keep_a_server_from_starting(
    store: SqliteStore,
) -> None:
    behind(store.path, "UPDATE sessions SET meta = 'text', leased = 1, expire_ms = 9 WHERE session_id = 's1'")
    behind(store.path, "UPDATE sessions SET meta = x'' WHERE session_id = 's2'")
    await store.close()
    await store.open()
    assert await store.purge_expired() == 0, "its row does not prove when it would have expired"
    await store.delete(OTHER)
    await store.delete(KEY)
    assert await store.usage(TENANT) == TenantUsage(0, 0)


async def test_expired_sessions_are_removed_a_few_at_a_time(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "PURGE_BATCH", 3)
    changes = []
    change = store._database._change
    monkeypatch.setattr(
        store._database, "_change", lambda work, *, flush: (changes.append(1), change(work, flush=flush))[1]
    )
    for number in range(7):
        await store.create(row(key(f"n{number}"), ttl_s=60.0), first_record(), "fp")
    store._wall_clock = lambda: 1 << 50
    changes.clear()
    assert await store.purge_expired() == 7
    assert len(changes) == 4


# ---- reads beside the commits


async def test_neither_commits_nor_reads_wait_for_a_listing(store: SqliteStore) -> None:
    entered, leave = threading.Event(), threading.Event()

    def listing(rows: Rows) -> int:
        seen = rows.meta(KEY)
        entered.set()
        assert leave.wait(60)
        again = rows.meta(KEY)
        assert seen is not None and again is not None
        assert again.row.revision == seen.row.revision, "a read sees one state of the file"
        return again.row.revision

    slow = asyncio.create_task(store._database.list(listing, KEY.tenant))
    try:
        assert await asyncio.to_thread(entered.wait, 60)
        await whole_turn(store, KEY, 2)
        assert (await store.load(KEY)).revision == 3
        assert len(await store.read(KEY)) == 3
        await store.ping()
        assert not slow.done()
    finally:
        leave.set()
    assert await slow == 2


async def test_a_tenant_whose_reads_pile_up_is_refused_and_the_others_are_served(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_reader, "MAX_WAITING", 2)
    entered, leave = threading.Event(), threading.Event()

    def stuck(rows: Rows) -> None:
        entered.set()
        assert leave.wait(60)

    reads = [asyncio.create_task(store._database.read(stuck, TENANT))]
    try:
        assert await asyncio.to_thread(entered.wait, 60)
        reads += [asyncio.create_task(store._database.read(stuck, TENANT)) for _ in range(2)]
        other = asyncio.create_task(store.usage("other"))
        refused = asyncio.create_task(store.load(KEY))
        await asyncio.sleep(0)
        assert [task.done() for task in (*reads, other, refused)] == [False] * 4 + [True]
    finally:
        leave.set()
    with pytest.raises(Unavailable, match="too many reads of this tenant are waiting"):
        await refused
    await asyncio.gather(*reads)
    assert await other == TenantUsage(0, 0)
    assert (await store.load(KEY)).revision == 2


def test_a_reader_without_a_connection_can_be_closed_while_a_read_is_ending(tmp_path: Path) -> None:
    """There is nothing to interrupt then."""

    class Ending:
        """The lock of a read that lets go at the second try."""

        tries = 0

        def acquire(self, timeout: float) -> bool:
            self.tries += 1
            return self.tries > 1

        def release(self) -> None:
            pass

    reader, lock = SqliteReader(tmp_path / "h.db", "reads", 0), Ending()
    reader._lock = lock  # type: ignore[assignment]
    reader.close()
    assert lock.tries == 2


async def test_a_listing_by_label_looks_at_the_sessions_that_carry_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        labels = {"common": "yes", "rare": str(number // 5)}
        await store.create(row(key(f"n{number:02}"), labels=labels), first_record(), "fp")
    looked_at, steps = [], []
    read_row = sqlite_rows.read_row
    monkeypatch.setattr(sqlite_rows, "read_row", lambda *row: (looked_at.append(1), read_row(*row))[1])
    reader = store._database.file.listings._connection
    assert reader is not None
    reader.set_progress_handler(lambda: steps.append(1), 1)

    async def listed(labels: dict[str, str]) -> list[str]:
        looked_at.clear()
        steps.clear()
        page = await store.list_sessions(TENANT, limit=3, labels=labels)
        return [one.session_id for one in page.rows]

    assert await listed({"rare": "0"}) == ["n04", "n03", "n02"]
    by_rare = len(steps)
    assert await listed({"common": "yes", "rare": "0"}) == ["n04", "n03", "n02"]
    assert len(looked_at) == 4
    assert len(steps) < 4 * by_rare + 4 * 60, "it begins with the rarest label"
    assert await listed({"common": "yes", "rare": "99"}) == await listed({"common": "no"}) == []
    assert not looked_at


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT COUNT(*) FROM sessions UNION ALL SELECT x + 1 FROM n) SELECT MAX(x) FROM n"


@pytest.mark.fault(40)
async def test_a_read_without_end_does_not_let_the_log_of_changes_grow_without_end(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "MOST_LOG_BYTES", 400_000)
    store._database.file._empty_at = 100_000
    monkeypatch.setattr(sqlite_file, "LOG_BYTES", 100_000)
    log = Path(f"{store.path}-wal")
    reading = threading.Event()

    def endless(rows: Rows) -> None:
        rows._connection.execute("SELECT COUNT(*) FROM sessions").fetchone()  # from here on the log is needed
        reading.set()
        rows._connection.execute(ENDLESS).fetchone()

    slow = asyncio.create_task(store._database.list(endless, KEY.tenant))
    assert await asyncio.to_thread(reading.wait, 60)
    largest = 0
    for base in range(2, 42):
        await whole_turn(store, KEY, base, "x" * 30_000)
        largest = max(largest, log.stat().st_size)
    assert largest < 1_000_000, "40 turns of 60 kB are 2.4 MB"
    with pytest.raises(Unavailable, match="interrupted"):
        for base in range(42, 200):
            if slow.done():
                break
            await whole_turn(store, KEY, base, "x" * 30_000)
        await slow


async def test_the_log_is_emptied_when_another_program_has_stopped_reading(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_file, "LOG_BYTES", 50_000)
    monkeypatch.setattr(sqlite_file, "MOST_LOG_BYTES", 100_000)
    store._database.file._empty_at = 50_000
    log = Path(f"{store.path}-wal")
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT COUNT(*) FROM sessions").fetchone()
        for base in range(2, 8):
            await whole_turn(store, KEY, base, "x" * 30_000)
        assert log.stat().st_size > 300_000
        assert "another program reads" in caplog.text
    for base in range(8, 12):
        await whole_turn(store, KEY, base, "x" * 30_000)
    await store.ping()
    assert log.stat().st_size < 300_000
