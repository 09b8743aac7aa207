"""A step of the wall clock changes nothing for running turns, in the stores that one process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.errors import NotFound, TurnInProgress
from pensieve.store import Began, HistoryStore
from pensieve.store.memory_store import MemoryStore
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import (
    LEASE_MS,
    TENANT,
    Clock,
    counts,
    first_record,
    key,
    request,
    row,
    turn_record,
    whole_turn,
)

KEY = key()
HOUR_MS = 3_600_000
TTL_S = 1800.0


class Clocks:
    """The two clocks of one process, and its store."""

    def __init__(self, name: str, folder: Path) -> None:
        self.wall, self.steady = Clock(), Clock()
        self.steady.now = 5_000  # since the machine was started
        self.store: HistoryStore = (
            MemoryStore(clock=self.wall, steady=self.steady)
            if name == "memory"
            else SqliteStore(folder / "h.db", clock=self.wall, steady=self.steady)
        )

    def pass_time(self, ms: int) -> None:
        self.wall.now += ms
        self.steady.now += ms


@pytest.fixture(params=["memory", "sqlite"])
async def clocks(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Clocks]:
    made = Clocks(request.param, tmp_path)
    await made.store.open()
    await made.store.create(row(KEY, ttl_s=TTL_S), first_record(), "fp")
    yield made
    await made.store.close()


@pytest.mark.fault(51)
@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
async def test_a_step_of_the_wall_clock_neither_ends_nor_prolongs_a_lease(
    clocks: Clocks, step_ms: int
) -> None:
    store = clocks.store
    await store.begin(KEY, request("r1", "t1"))
    clocks.wall.now += step_ms
    running = (await store.load(KEY)).running
    assert running is not None and 0 < running.lease_ms_left <= LEASE_MS
    with pytest.raises(TurnInProgress) as caught:
        await store.begin(KEY, request("r2", "t2"))
    assert caught.value.retry_after_s is not None and 0 < caught.value.retry_after_s <= LEASE_MS / 1000
    assert [one.session_id for one in (await store.list_sessions(TENANT, limit=9)).rows] == [KEY.session_id]
    assert await store.purge_expired() == 0
    await store.renew(KEY, "t1", LEASE_MS)
    row_after = await store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert row_after.revision == 2
    await whole_turn(store, KEY, 2)


async def test_a_lease_lapses_by_time_that_passes(clocks: Clocks) -> None:
    store = clocks.store
    await store.begin(KEY, request("r1", "t1"))
    clocks.wall.now -= HOUR_MS
    clocks.steady.now += LEASE_MS + 1
    assert (await store.load(KEY)).running is None
    assert isinstance(await store.begin(KEY, request("r2", "t2")), Began)


async def test_an_idle_session_expires_by_the_wall_clock(clocks: Clocks) -> None:
    store = clocks.store
    await whole_turn(store, KEY, 1)
    clocks.pass_time(round(TTL_S * 1000) - 1000)
    assert (await store.load(KEY)).revision == 2
    clocks.pass_time(1000)
    with pytest.raises(NotFound):
        await store.load(KEY)
    assert (await store.usage(TENANT)).sessions == 0
    assert await store.purge_expired() == 1


async def test_a_lease_of_an_earlier_process_is_over_whatever_its_clock_said(tmp_path: Path) -> None:
    """The machine was started anew, so the monotonic clock is behind the end of the lease."""
    first = Clocks("sqlite", tmp_path)
    first.steady.now = 900 * HOUR_MS
    await first.store.open()
    await first.store.create(row(KEY), first_record(), "fp")
    await first.store.begin(KEY, request("r1", "t1", seed=77))
    await first.store.close()
    second = Clocks("sqlite", tmp_path)
    await second.store.open()
    assert (await second.store.load(KEY)).running is None
    again = await second.store.begin(KEY, request("r1", "t2", seed=78))
    assert isinstance(again, Began) and again.seed == 77
    await second.store.close()
