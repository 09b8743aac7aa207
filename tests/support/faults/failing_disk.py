"""A SQLite store on a disk that fails, in a process of its own: ``python -m support.faults.failing_disk SCENE FOLDER``.

The process must have the environment of ``IoErrors``. Each scene gives its own orders to the disk and prints "passed".
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from pensieve.errors import Unavailable
from pensieve.store.records import SessionRow
from pensieve.store.sqlite_store import SqliteStore
from support.faults.io_errors import IoErrors
from support.store.store_bench import counts, first_record, key, request, row, turn_record, whole_turn

KEY = key()


class Scene:
    """An open store with one session of one turn, and its disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "h.db"
        self.disk = IoErrors(folder, self.path)
        self.errors = 0
        self.store = SqliteStore(self.path, on_error=self.count)

    def count(self) -> None:
        self.errors += 1

    async def start(self) -> None:
        await self.store.open()
        await self.store.create(row(KEY), first_record(), "fp")
        await whole_turn(self.store, KEY, 1)

    async def begin(self, base: int) -> None:
        await self.store.begin(KEY, request(f"r{base}", f"t{base}"))

    async def commit(self, base: int, text: str = "hello") -> SessionRow:
        record = turn_record(base, f"r{base}", text)
        return await self.store.commit(KEY, f"t{base}", f"fp-r{base}", record, counts(base + 1))

    async def refused(self, call: Awaitable[object]) -> str:
        """The reason of the refusal that ``call`` must meet."""
        try:
            await call
        except Unavailable as error:
            return error.reason
        raise AssertionError("it was answered as if nothing had happened")

    async def served(self, call: Callable[[], Awaitable[SessionRow]]) -> SessionRow:
        """What ``call`` answers once the store is served again."""
        async with asyncio.timeout(30):
            while True:
                try:
                    return await call()
                except Unavailable:
                    await asyncio.sleep(0.05)

    async def after_a_power_cut(self, name: str) -> int:
        """How many records a store finds on what the disk holds now; they must be sound."""
        self.disk.power_cut(self.path.parent / name)
        store = SqliteStore(self.path.parent / name / self.path.name)
        await store.open()
        found = await store.read(KEY)
        await store.close()
        return len(found)


async def flush_fails(scene: Scene) -> None:
    """No flush succeeds: nothing is acknowledged, nothing is read that might be lost, health says so."""
    await scene.begin(2)
    scene.disk.fail("sync")
    for _ in range(3):
        assert await scene.refused(scene.commit(2)) == "STORE_UNAVAILABLE"
        await asyncio.sleep(0.3)  # past the pause between two attempts to open the file
    for call in (
        scene.store.ping(),
        scene.store.load(KEY),
        scene.store.read(KEY),
        scene.store.find_request(KEY, "r2"),
    ):
        assert await scene.refused(call) == "STORE_UNAVAILABLE"
    assert scene.errors >= 6, "the calls that were not served were not counted"
    assert await scene.after_a_power_cut("while") == 2
    scene.disk.heal()
    assert (await scene.served(lambda: scene.commit(2))).revision == 3
    await scene.store.ping()
    assert await scene.after_a_power_cut("healed") == 3


async def one_flush_fails(scene: Scene) -> None:
    """The flush of a commit fails once; what the retry answers must be on the disk, not in memory alone."""
    for base in range(2, 5):
        await scene.begin(base)
        scene.disk.fail("sync", times=1)
        await scene.refused(scene.commit(base))
        assert (await scene.served(lambda base=base: scene.commit(base))).revision == base + 1  # type: ignore[misc]
        assert await scene.after_a_power_cut(f"cut-{base}") == base + 1
    assert len(await scene.store.read(KEY)) == 5


async def writes_fail(scene: Scene) -> None:
    """The same when it is writing that fails, at any of the writes of a commit."""
    for base in range(2, 6):
        await scene.begin(base)
        scene.disk.fail("write", skip=base - 2, times=2)
        outcome = await scene.served(lambda base=base: scene.commit(base, "x" * 9000))  # type: ignore[misc]
        assert outcome.revision == base + 1
        assert await scene.after_a_power_cut(f"cut-{base}") == base + 1
    assert scene.disk.met()["write"] > 0
    assert scene.errors > 0


async def emptying_fails(scene: Scene) -> None:
    """The log of changes cannot be brought into the file: commits stay that were acknowledged, and it is counted."""
    scene.disk.fail("sync", times=2, name=scene.path.name)
    base = 2
    while scene.disk.met()["sync"] < 2 or base < 10:

        async def turn(base: int = base) -> SessionRow:
            await scene.begin(base)
            return await scene.commit(base, "x" * 200_000)

        assert (await scene.served(turn)).revision == base + 1
        base += 1
    assert scene.errors >= 1
    assert await scene.after_a_power_cut("cut") == base


async def disk_is_full(scene: Scene) -> None:
    """No room for any write: refused as full, also by ping, while everything can be read; then it is served again."""
    await scene.begin(2)
    scene.disk.fail("write", error=errno.ENOSPC)
    assert await scene.refused(scene.commit(2)) == "STORE_FULL"
    assert await scene.refused(scene.store.ping()) == "STORE_FULL"
    assert (await scene.store.load(KEY)).revision == 2
    assert len(await scene.store.read(KEY)) == 2
    scene.disk.heal()
    await scene.store.ping()
    assert (await scene.commit(2)).revision == 3
    assert await scene.after_a_power_cut("cut") == 3


async def dies_before_it_knows(scene: Scene) -> None:
    """The flush of a commit fails, and the process ends before it could make sure of anything."""
    await scene.begin(2)
    scene.disk.fail("sync", times=1)
    await scene.refused(scene.commit(2))
    scene.disk.heal()
    print("passed", flush=True)
    os._exit(0)


async def starts_again(scene: Scene) -> None:
    """The process after that one finds the commit in memory: if it says that it was kept, it must be on the disk."""
    revision = (await scene.store.load(KEY)).revision
    assert revision == 3, "the system has not forgotten what it could not write, or this test shows nothing"
    assert await scene.store.find_request(KEY, "r2") == 3
    assert await scene.after_a_power_cut("cut") == 3


SCENES = {
    scene.__name__: scene
    for scene in (
        *(flush_fails, one_flush_fails, writes_fail, emptying_fails, disk_is_full),
        *(dies_before_it_knows, starts_again),
    )
}
STORIES = [["flush_fails"], ["one_flush_fails"], ["writes_fail"], ["emptying_fails"], ["disk_is_full"]]
STORIES += [["dies_before_it_knows", "starts_again"]]
"""Scenes that are played one after the other over one folder, each in its process."""


async def run(name: str, folder: Path) -> None:
    scene = Scene(folder)
    if scene.path.exists():
        await scene.store.open()
    else:
        await scene.start()
    await SCENES[name](scene)
    scene.disk.heal()
    await scene.store.close()
    print("passed")


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2])))
