"""The SQLite store on a disk that fails: it never says "kept" of what it cannot prove to be on the disk."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import EndOrder
from pensieve.store._sqlite.dump import SqliteDump
from pensieve.store.maintenance import Mode
from pensieve.store.sqlite_store import SqliteStore
from support.faults.failing_disk import STORIES
from support.faults.io_errors import IoErrors
from support.store.store_bench import (
    LEASE_MS,
    counts,
    first_record,
    key,
    opened_sqlite,
    request,
    rewind_record,
    row,
    turn_record,
)

ROOT = Path(__file__).parents[3]

SYNCS = """
import os, sys
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    for call in (lambda: os.pwrite(file, b"x", 0), lambda: os.fsync(file), lambda: os.fdatasync(file)):
        try:
            call()
            print("ok", end=" ")
        except OSError as error:
            print(error.errno, end=" ")
"""


def test_the_preloaded_library_fails_what_it_is_told_to(tmp_path: Path) -> None:
    disk = IoErrors(tmp_path, tmp_path / "bad")

    def outcome() -> list[str]:
        command = [sys.executable, "-c", SYNCS, str(tmp_path / "bad"), str(tmp_path / "good")]
        environment = {**os.environ, **disk.environment}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.split()

    assert outcome() == ["ok"] * 6
    disk.fail("sync")
    assert outcome() == ["ok", str(errno.EIO), str(errno.EIO)] + ["ok"] * 3
    disk.fail("sync", skip=1, times=1)
    assert outcome() == ["ok", "ok", str(errno.EIO)] + ["ok"] * 3
    disk.fail("write", "sync", error=errno.ENOSPC, times=1)
    assert outcome() == [str(errno.ENOSPC), str(errno.ENOSPC)] + ["ok"] * 4
    disk.heal()
    assert outcome() == ["ok"] * 6
    assert disk.met() == {"sync": 4, "write": 1}


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: str(story[0]))
def test_a_failing_disk(tmp_path: Path, story: list[str]) -> None:
    disk = IoErrors(tmp_path, tmp_path / "h.db")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    for scene in story:
        done = subprocess.run(
            [sys.executable, "-m", "support.faults.failing_disk", scene, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path, **disk.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "passed\n"


FULL, NORMAL = 2, 1
"""SQLite's levels of ``synchronous``: each change is flushed before it counts as made, or the next flush covers it."""


async def test_what_is_told_to_be_kept_was_flushed_and_a_lease_was_not(tmp_path: Path) -> None:
    """The store's own connection says so, right after each change. A lease that a power cut takes away is no loss."""
    at, other = key(), key("s2")
    async with opened_sqlite(tmp_path / "h.db") as store:
        file = store._database.file

        async def flushed(change: Awaitable[object]) -> int:
            await change
            found = await store._database._in_thread(
                lambda: file.connection().execute("PRAGMA synchronous").fetchone()
            )
            return int(found[0])

        async def not_flushed() -> None:
            """A change of another session, after which none is flushed unless it asks for it."""
            assert await flushed(store.begin(other, request("r0", "t0"))) == NORMAL
            assert await flushed(store.abort(other, "t0")) == NORMAL

        await store.create(row(other), first_record(), "fp")
        await not_flushed()
        assert await flushed(store.create(row(at), first_record(), "fp")) == FULL
        assert await flushed(store.begin(at, request("r1", "t1"))) == NORMAL
        assert await flushed(store.renew(at, "t1", LEASE_MS)) == NORMAL
        assert await flushed(store.ask_to_end(at, "r1", EndOrder(keep=True))) == NORMAL
        assert await flushed(store.commit(at, "t1", "fp-r1", turn_record(1, "r1"), counts(2))) == FULL
        await not_flushed()
        assert await flushed(store.apply(at, "fp-r2", rewind_record(2, "r2"), counts(3))) == FULL
        await not_flushed()
        store._database._proven_at = -1e9
        assert await flushed(store.ping()) == FULL
        await not_flushed()
        assert await flushed(store.mark_damaged(at)) == FULL
        await not_flushed()
        assert await flushed(store.delete(at)) == FULL


@pytest.mark.parametrize("maintained", [False, True], ids=["served", "maintained"])
async def test_nothing_is_left_to_what_sqlite_was_built_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maintained: bool
) -> None:
    """Some builds neither flush each change nor overwrite what is deleted unless they are told to."""
    connect = sqlite3.connect

    def otherwise(*place: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*place, **options)
        for name in ("synchronous", "secure_delete", "foreign_keys"):
            connection.execute(f"PRAGMA {name} = OFF").fetchall()
        return connection

    monkeypatch.setattr(sqlite3, "connect", otherwise)
    store = SqliteDump(tmp_path / "h.db") if maintained else SqliteStore(tmp_path / "h.db")
    if isinstance(store, SqliteDump):
        await store.open(Mode.WRITE)
        connection = store._sql
    else:
        await store.open()
        await store.create(row(key()), first_record(), "fp")
        connection = store._database.file.connection()
    settings = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("synchronous", "secure_delete", "foreign_keys")
    }
    await store.close()
    assert settings == {"synchronous": FULL, "secure_delete": 1, "foreign_keys": 1}
