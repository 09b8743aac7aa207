"""Expired sessions go without anybody asking."""

from __future__ import annotations

import asyncio

from pensieve.errors import Unavailable
from pensieve.server.operations.housekeeping import purge_forever
from pensieve.server.tasks import end_task
from pensieve.store.memory_store import MemoryStore


class Flaky(MemoryStore):
    """Down at the first round."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0
        self.third = asyncio.Event()

    async def purge_expired(self) -> int:
        self.rounds += 1
        if self.rounds == 1:
            raise Unavailable("down")
        if self.rounds == 3:
            self.third.set()
        return 1


async def test_purging_goes_on_after_the_store_was_down() -> None:
    store = Flaky()
    task = asyncio.create_task(purge_forever(store, interval_s=0.001))
    await asyncio.wait_for(store.third.wait(), 10)
    await end_task(task)
    assert task.done()
