"""The learned policy inside the cache: what it is told, and what it then evicts."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np
import pytest

from pensieve.config import CacheConfig, PolicyName, SchedulerConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import CachedSession
from pensieve.engine.cache.index import Reclaim, ValueTable
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.policy import POLICIES, UNKNOWN, Retention
from pensieve.engine.cost import CostModel
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_tokens
from support.lengths import at_length

FLAT = CostModel(((0, 0.0), (1000, 0.0)), 1.0, 4)
"""Every chunk costs the same: only the rate of returns tells them apart."""


class Spy(Retention):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def on_turn_end(self, key: Hashable, new_tokens: int, context_tokens: int, now: float) -> int:
        self.told.append(("left", key, new_tokens, context_tokens, now))
        return 7

    def on_return(self, key: Hashable, now: float) -> None:
        self.told.append(("came back", key, now))


def spied(device: int) -> tuple[Driver, Spy, CacheManager]:
    config = CacheConfig(
        device_chunks=device, host_chunks=8, chunk_tokens=4, decode_reserve=0.0, swap_watermark=0.0
    )
    clock = Clock()
    worker = HashWorker(device, 8, 4)
    engine = make_engine(
        config, SchedulerConfig(context_limit=64, max_batch_tokens=16, max_running=8), worker, clock
    )
    cache, spy = engine._scheduler.cache, Spy()
    cache.index.table.policy = spy
    return Driver(engine, clock, random.Random(0), verify_tokens, VOCABULARY, 64), spy, cache


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_value_has_the_bits_of_its_column(name: PolicyName) -> None:
    """A victim put back into the heap is compared with others that were ranked as arrays."""
    policy, rng = POLICIES[name](), np.random.default_rng(1)
    kinds = np.array([policy.on_turn_end(key, 1 << key % 9, 1 << key % 17, 0.0) for key in range(400)])
    for key in range(0, 400, 3):
        policy.on_return(key, float(rng.exponential(40)))
    for key in range(0, 400, 3):  # by now, rates were learned
        kinds[key] = policy.on_turn_end(key, 1 << key % 9, 1 << key % 17, 100.0)
    costs, candidates = rng.random(400) * 10.0 ** rng.integers(-6, 3, 400), rng.integers(1, 50, 400)
    idle = 10.0 ** rng.uniform(-5, 7, 400)
    idle[:40] = 2.0 ** rng.integers(-6, 20, 40)  # edges of the bins
    idle[40] = 0.0
    values = policy.values(costs, candidates.astype(float), idle, kinds)
    rows = zip(costs.tolist(), candidates.tolist(), idle.tolist(), kinds.tolist(), strict=True)
    assert values.tolist() == [policy.value(*row) for row in rows]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_rows_without_candidates_are_never_the_lowest(name: PolicyName) -> None:
    table = ValueTable(POLICIES[name](), FLAT)
    for row in range(40):
        assert table.add_row() == row
        if row % 4 == 0:
            table.first_cost[Reclaim.PAGE, row], table.candidates[Reclaim.PAGE, row] = 1.0, 1
    rows, values = table.lowest_rows(Reclaim.PAGE, 5.0, 40)
    assert sorted(rows.tolist()) == list(range(0, 40, 4)) and np.isfinite(values).all()


def test_each_turn_is_told_of_when_it_begins_and_when_it_has_ended() -> None:
    driver, spy, cache = spied(16)
    driver.start_turn("a", list(range(12)), 3)
    driver.run_until_idle()
    driver.clock.now += 50
    again = driver.clock.now
    driver.start_turn("a", list(range(5)), 2)
    driver.run_until_idle()
    kinds = [told[0] for told in spy.told]
    assert kinds == ["came back", "left", "came back", "left"]
    assert spy.told[1][1:4] == ("a", 12, 15) and spy.told[3][1:4] == ("a", 5, 22)
    assert spy.told[1][4] <= again - 50 < again <= spy.told[2][2]  # type: ignore[operator]
    assert cache.sessions[SessionKey("a")].kind == 7


def test_a_suspended_session_is_not_idle() -> None:
    driver, spy, cache = spied(8)
    driver.start_turn("a", list(range(12)), 12)
    driver.step()
    driver.start_turn("b", list(range(10)), 12)
    while not driver.engine.stats().suspensions_total:
        driver.step()
    assert [told[0] for told in spy.told[-2:]] == ["left", "came back"]
    assert spy.told[-2][4] == spy.told[-1][2], "in the same moment: nobody was idle"
    assert cache.sessions[SessionKey("b")].kind == UNKNOWN
    driver.run_until_idle()
    ends = [told for told in spy.told if told[:2] == ("left", "b")]
    assert ends[-1][2:4] == (10, 22), "with the new tokens of its turn, whenever it was resumed"


def turn(cache: CacheManager, name: str, history: int, new: int, now: float) -> None:
    key, context = SessionKey(name), np.zeros(history + new, np.int32)
    restore = cache.admit(key, context, new, now)
    cache.take_copies()
    cache.complete_copies()
    for start, end in restore.missing:
        cache.computed(key, start, end)
    cache.release(key, now)
    cache.check()


def test_sessions_that_will_not_come_back_give_way_first() -> None:
    """Short questions come back after 30 s, long documents never: one just read goes before an older question."""
    cache = CacheManager(CacheConfig(400, 0, 4, "gittins"), FLAT)
    now = 0.0
    for number in range(200):
        now += 1.0
        turn(cache, f"document{number}", 0, 100, now)
        turn(cache, f"question{number}", 0, 10, now)
        if number >= 30:
            turn(cache, f"question{number - 30}", 10, 8, now)
    order = cache.index.round(Reclaim.SAVED_PAGE, now + 0.5, 50)
    names = []
    while len(names) < 50 and (group := order.take()):
        holder = group[0].holder
        assert isinstance(holder, CachedSession)
        names.append(str(holder.key))
        group[0].pins += 1  # out of the running, as if evicted
        order.put_back()
    due = {f"question{number}" for number in range(175, 200)}
    assert names[0] == "document199" and due.isdisjoint(names)
    assert all(cache.residency(SessionKey(name)).device == 10 for name in due)


def test_answers_do_not_depend_on_what_was_learned() -> None:
    config = CacheConfig(device_chunks=12, host_chunks=10, chunk_tokens=4, policy="gittins")
    scheduler = SchedulerConfig(context_limit=48, max_batch_tokens=16, max_running=4)
    for seed in range(at_length(2, 8)):
        clock, worker = Clock(), HashWorker(12, 10, 4)
        engine = make_engine(config, scheduler, worker, clock)
        driver = Driver(engine, clock, random.Random(seed), verify_tokens, VOCABULARY, 48)
        for _ in range(600):
            driver.act()
            driver.step()
        driver.run_until_idle()
        assert len(driver.finished) > 64, "it has not learned anything yet"
