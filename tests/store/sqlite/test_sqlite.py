"""What only the SQLite store has: a file, its lock, its disk, and a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.errors import DataLoss, FailedPrecondition, Unavailable
from pensieve.store import Began
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
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
KILLS = 4


def commit_loop(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.faults.commit_loop", f"sqlite:///{path}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)


def acknowledged(process: subprocess.Popen[bytes], at_least: int) -> int:
    """Kill after some commits were acknowledged; the last acknowledged revision."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(at_least)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines(keepends=True)
    process.wait()
    process.stdout.close()
    whole = [int(line) for line in lines if line.endswith(b"\n")]
    assert whole, "the process died before its first commit"
    return whole[-1]


async def test_content_survives_a_restart(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        before, store_id = await store.read(KEY), store.store_id
    async with opened_sqlite(tmp_path / "h.db") as store:
        assert await store.read(KEY) == before
        assert store.store_id == store_id != ""
        assert store.durability == "fsync"


async def test_a_restart_ends_the_dead_servers_leases_and_keeps_their_seeds(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        await store.begin(KEY, request("r1", "t1", seed=77))
    async with opened_sqlite(tmp_path / "h.db") as store:
        assert (await store.load(KEY)).running is None
        again = await store.begin(KEY, request("r1", "t2", seed=78))
        assert isinstance(again, Began)
        assert again.seed == 77


async def test_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "made" / "h.db"
    before = os.umask(0)
    try:
        async with opened_sqlite(path) as store:
            await store.create(row(KEY), first_record(), "fp")
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            files = sorted(path.parent.iterdir())
            assert [file.name for file in files] == ["h.db", "h.db-shm", "h.db-wal", "h.db.lock"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(before)


async def test_a_second_server_on_the_file_is_refused(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db"):
        second = SqliteStore(tmp_path / "h.db")
        with pytest.raises(FailedPrecondition, match="in use by another Pensieve server") as caught:
            await second.open()
        assert caught.value.reason == "STORE_LOCKED"
        with pytest.raises(Unavailable):
            await second.load(KEY)
    async with opened_sqlite(tmp_path / "h.db"):
        pass


@pytest.mark.fault(37)
async def test_no_acknowledged_commit_is_lost_to_sigkill(tmp_path: Path) -> None:
    """And the killed process' lock is gone with it."""
    for kill in range(KILLS):
        process = commit_loop(tmp_path / "h.db")
        last = await asyncio.to_thread(acknowledged, process, 20 + 15 * kill)
        async with opened_sqlite(tmp_path / "h.db") as store:
            log = await store.read(KEY)  # checks every checksum and the chain
            assert len(log) in (last, last + 1), "one commit may have been made and not acknowledged"
            assert await store.find_request(KEY, f"r{last - 1}") == last


@pytest.mark.fault(38)
async def test_a_full_disk_refuses_writes_serves_reads_and_heals(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        before = await store.load(KEY)
        connection = store._database.file.connection()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLITE_FULL as from a full disk

        await store.begin(KEY, request("r2", "t2"))
        big = turn_record(2, "r2", "x" * 100_000)
        with pytest.raises(Unavailable) as caught:
            await store.commit(KEY, "t2", "fp-r2", big, counts(3))
        assert caught.value.reason == "STORE_FULL"
        assert (await store.load(KEY)).revision == before.revision
        assert len(await store.read(KEY)) == 2

        connection.execute("PRAGMA max_page_count = 1000000")
        assert (await store.commit(KEY, "t2", "fp-r2", big, counts(3))).revision == 3


IO_ERROR_SCRIPT = """
import asyncio, resource, signal, sys
from pathlib import Path
from support.store.store_bench import counts, first_record, key, opened_sqlite, request, row, turn_record
from pensieve.errors import Unavailable
from pensieve.store.sqlite_store import SqliteStore

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    await store.create(row(key()), first_record(), "fp")
    await store.begin(key(), request("r1", "t1"))
    connection = store._database.file.connection()
    size = Path(sys.argv[1] + "-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 6000, resource.RLIM_INFINITY))
    record = turn_record(1, "r1", "x" * 100_000)
    try:
        await store.commit(key(), "t1", "fp-r1", record, counts(2))
    except Unavailable as error:
        print(error.reason, error.message)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (await store.load(key())).revision == 1
    assert store._database.file.connection() is not connection, "the file was not opened afresh"
    after = await store.commit(key(), "t1", "fp-r1", record, counts(2))
    assert after.revision == 2 and len(await store.read(key())) == 2
    await store.close()
    print("healed")

asyncio.run(main())
"""


@pytest.mark.fault(39)
def test_an_io_error_is_unavailable_and_the_file_is_opened_afresh(tmp_path: Path) -> None:
    """A real failing write(2): the process may not grow the file (EFBIG), which SQLite reports as SQLITE_IOERR."""
    done = subprocess.run(
        [sys.executable, "-c", IO_ERROR_SCRIPT, str(tmp_path / "h.db")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("STORE_UNAVAILABLE")
    assert "disk I/O error" in done.stdout
    assert done.stdout.endswith("healed\n")


@pytest.mark.fault(40)
async def test_the_event_loop_runs_while_the_disk_does_not(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        with contextlib.closing(sqlite3.connect(tmp_path / "h.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(store.begin(KEY, request("r1", "t1")))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not writing.done()
            assert (await store.load(KEY)).revision == 1, "what is only read does not wait for a lock"
            assert len((await store.list_sessions(KEY.tenant, limit=9)).rows) == 1
            assert not writing.done()
            other.execute("ROLLBACK")
        assert isinstance(await writing, Began)


async def test_other_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, " * 100)
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign.db")) as foreign:
        foreign.execute("CREATE TABLE t (x)")
    for path in (text, tmp_path / "foreign.db"):
        with pytest.raises(FailedPrecondition) as caught:
            await SqliteStore(path).open()
        assert caught.value.reason == "STORE_FOREIGN"
    assert text.read_text().startswith("not a database")
    with pytest.raises(Unavailable):
        await SqliteStore(tmp_path).open()


async def test_a_file_taken_away_is_noticed(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.ping()
        (tmp_path / "h.db").rename(tmp_path / "moved.db")
        with pytest.raises(Unavailable) as caught:
            await store.ping()
        assert caught.value.reason == "STORE_REPLACED"


async def test_deletion_erases_the_bytes(tmp_path: Path) -> None:
    def found() -> list[str]:
        return [file.name for file in tmp_path.iterdir() if b"CANARY" in file.read_bytes()]

    async with opened_sqlite(tmp_path / "h.db") as store:
        await store.create(row(KEY), first_record(), "fp")
        for base in (1, 2):
            await whole_turn(store, KEY, base, "CANARY " * 2000)
        assert found()
        await store.delete(KEY)
        assert not found()


@pytest.mark.fault(43)
async def test_a_broken_database_page_is_data_loss(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    async with opened_sqlite(path) as store:
        await store.create(row(KEY), first_record(), "fp")
        for base in range(1, 6):
            await whole_turn(store, KEY, base, "x" * 5000)
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = bytes(len(data) - 4096 * 2)
    path.write_bytes(data)
    store = SqliteStore(path)
    with pytest.raises(DataLoss):
        await store.open()
        await store.read(KEY)
    await store.close()
