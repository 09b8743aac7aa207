"""``TurnCache`` decides what ``CacheManager`` decides."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.turns.cache import TurnCache

SIZE = 8
ZEROS = np.zeros(4096, np.int32)
COST = Machine().cost(SIZE, 4096)


class Manager:
    """The real cache, driven in the words of its twin."""

    def __init__(self, config: CacheConfig, name: str) -> None:
        self.cache = CacheManager(config, COST, policies.make(name)[0])

    def can_admit(self, key: int, history: int, tokens: int) -> bool:
        return self.cache.can_admit(SessionKey(str(key)), ZEROS[:tokens], tokens - history, reserve=True)

    def admit(self, key: int, history: int, tokens: int, now: float) -> Restore:
        return self.cache.admit(SessionKey(str(key)), ZEROS[:tokens], tokens - history, now)

    def complete(self) -> None:
        self.cache.take_copies()
        self.cache.complete_copies()

    def computed(self, key: int, start: int, end: int) -> None:
        self.cache.computed(SessionKey(str(key)), start, end)
        self.cache.check()

    def grow(self, key: int, start: int, end: int, now: float) -> None:
        for length in range(start + 1, end + 1):
            assert self.cache.extend(SessionKey(str(key)), length, now)

    def release(self, key: int, tokens: int, stamp: float) -> None:
        self.cache.release(SessionKey(str(key)), stamp, ZEROS[:tokens])


@dataclass
class Run:
    """A turn that runs, as a schedule drawn at random has it."""

    tokens: int
    missing: tuple[Range, ...]
    due: float


class Both:
    """The same random schedule on both; whatever can be asked of both is compared."""

    def __init__(self, name: str, host: int, seed: str) -> None:
        self.rng = random.Random(seed)
        config = CacheConfig(60, host, SIZE, swap_watermark=self.rng.choice((0, 0.25)))
        self.twin = TurnCache(config, COST, policies.make(name)[0])
        self.manager = Manager(config, name)
        self.stamp = policies.make(name)[1]
        self.context: dict[int, int] = {}
        self.running: dict[int, Run] = {}
        self.turns = dict.fromkeys(range(20), 0)
        self.now = 0.0
        self.lost = self.suspended = 0

    def step(self) -> None:
        self.now += self.rng.expovariate(0.2)
        key = self.rng.randrange(20)
        if key not in self.running:
            self.begin(key)
        elif self.running[key].missing:
            self.end(key, suspended=True)
        else:
            self.grow(key)
            self.end(key, suspended=False)
        self.plan_ends()

    def begin(self, key: int) -> None:
        history = self.context.get(key, 0)
        total = history + self.rng.randrange(1, 40)
        if total > 300 or len(self.running) >= 3:
            return
        admits = self.manager.can_admit(key, history, total)
        assert self.twin.can_admit(key, total, reserve=True) == admits
        if not admits:
            return
        ours, theirs = (
            self.twin.admit(key, history, total, self.now),
            self.manager.admit(key, history, total, self.now),
        )
        assert ours == theirs
        self.lost += ours.recomputed
        self.turns[key] += 1
        self.plan_ends()
        # Others are suspended before their first step. The twin cannot have half a chunk, nor its old host copy then.
        whole = self.rng.random() < 0.5 or any(start % SIZE for start, _ in ours.missing)
        for start, end in ours.missing if whole else ():
            self.manager.computed(key, start, end)
        self.running[key] = Run(total, () if whole else ours.missing, self.rng.expovariate(0.02))

    def plan_ends(self) -> None:
        tiers = self.manager.cache.occupancy()
        assert self.twin.device_free * SIZE == tiers.device_free
        assert self.twin._reclaimable * SIZE == tiers.device_reclaimable
        self.twin.save_ahead(self.now, 10**6)
        self.manager.cache.swap_out_ahead(self.now, 10**6)
        self.twin.complete()
        self.manager.complete()

    def grow(self, key: int) -> None:
        run = self.running[key]
        longer = run.tokens + self.rng.randrange(0, 30)
        chunks = self.twin.chunks_for(longer) - self.twin.chunks_for(run.tokens)
        if chunks > self.twin.unpinned:
            return
        self.twin.grow(chunks, self.now)
        self.manager.grow(key, run.tokens, longer, self.now)
        self.plan_ends()
        if longer > run.tokens:
            self.manager.computed(key, run.tokens, longer)
        run.tokens = longer

    def end(self, key: int, *, suspended: bool) -> None:
        run = self.running.pop(key)
        stamp = self.stamp(self.now, self.now + run.due, self.turns[key])
        self.twin.release(key, run.tokens, stamp, run.missing)
        self.manager.release(key, run.tokens, stamp)
        self.context[key] = run.tokens
        self.suspended += suspended


# ``arc`` weighs its two lists anew in each round, and the twin asks for fewer rounds.
@pytest.mark.parametrize("name", [name for name in policies.NAMES if name != "arc"])
@pytest.mark.parametrize("host", [0, 40, 90])
def test_decides_as_the_manager(name: str, host: int) -> None:
    both = Both(name, host, f"{name}{host}")
    for _ in range(700):
        both.step()
        tiers = both.manager.cache.occupancy()
        assert (both.twin.device_free * SIZE, both.twin.host_free * SIZE) == (
            tiers.device_free,
            tiers.host_free,
        )
        for reclaim in Reclaim:
            assert both.twin.index.total(reclaim) == both.manager.cache.index.total(reclaim)
    assert both.lost > 0 and both.suspended > 10, (
        "nothing was ever evicted or suspended: the test shows nothing"
    )


def test_waits_for_its_own_copies() -> None:
    """A session whose chunks the plan in hand copies out cannot be admitted by the same plan."""
    config = CacheConfig(device_chunks=20, host_chunks=20, chunk_tokens=SIZE, swap_watermark=0.0)
    twin, manager = TurnCache(config, COST, policies.make("lru")[0]), Manager(config, "lru")
    for key, tokens in ((1, 40), (3, 80)):
        twin.admit(key, 0, tokens, float(key))
        twin.complete()
        twin.release(key, tokens, float(key))
        manager.admit(key, 0, tokens, float(key))
        manager.complete()
        manager.computed(key, 0, tokens)
        manager.release(key, tokens, float(key))
    twin.admit(2, 0, 64, 9.0)
    manager.admit(2, 0, 64, 9.0)
    assert not twin.can_admit(1, 41, reserve=True) and not manager.can_admit(1, 40, 41)
    twin.complete()
    manager.complete()
    assert twin.can_admit(1, 41, reserve=True) and manager.can_admit(1, 40, 41)


def test_ranked_ahead_it_loses_no_more() -> None:
    """With ``slack`` the order is a little stale, no more than that."""
    exact, ahead = (
        TurnCache(CacheConfig(600, 600, SIZE), COST, policies.make("retention")[0], n) for n in (0, 24)
    )
    rng = random.Random(1)
    lost = {exact: 0, ahead: 0}
    context = dict.fromkeys(range(360), 0)
    for turn in range(3000):
        key, now = rng.randrange(90) + 90 * (turn // 900), 2.0 * turn
        history, total = context[key], context[key] + rng.randrange(1, 60)
        for cache in (exact, ahead):
            lost[cache] += cache.admit(key, history, total, now).recomputed
            cache.save_ahead(now, 10**6)
            cache.complete()
            cache.release(key, total, now)
        context[key] = total
    assert lost[exact] > 1000
    assert lost[ahead] == pytest.approx(lost[exact], rel=0.05)


def test_clear_frees_everything() -> None:
    config = CacheConfig(device_chunks=16, host_chunks=8, chunk_tokens=SIZE)
    cache = TurnCache(config, COST, policies.make("retention")[0])
    cache.admit(1, 0, 100, 0.0)
    cache.complete()
    cache.release(1, 100, 1.0)
    cache.admit(2, 0, 60, 2.0)
    cache.complete()
    cache.clear()
    assert (cache.device_free, cache.host_free, cache.unpinned) == (16, 8, 16)
    assert cache.admit(1, 100, 128, 3.0).recomputed == 100
