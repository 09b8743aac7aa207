"""``TurnCache`` decides what ``CacheManager`` decides."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.restore import Restore
from pensieve.simulate import policies
from pensieve.simulate.machine import Machine
from pensieve.simulate.turn_cache import TurnCache

ZEROS = np.zeros(4096, np.int32)


class Manager:
    """The real cache, driven a turn at a time."""

    def __init__(self, config: CacheConfig, name: str) -> None:
        self.cache = CacheManager(config, Machine().cost(config.chunk_tokens, 4096))
        self.cache.index.policy = policies.make(name)[0]

    def admit(self, key: int, history: int, total: int, now: float) -> Restore:
        restore = self.cache.admit(SessionKey(str(key)), ZEROS[:total], total - history, now)
        self.cache.swap_out_ahead(now, 10**6)
        self.cache.take_copies()
        self.cache.complete_copies()
        for start, end in restore.missing:
            self.cache.computed(SessionKey(str(key)), start, end)
        self.cache.check()
        return restore

    def release(self, key: int, stamp: float) -> None:
        self.cache.release(SessionKey(str(key)), stamp)


@pytest.mark.parametrize("name", policies.NAMES)
@pytest.mark.parametrize("host", [0, 40, 90])
def test_decides_as_the_manager(name: str, host: int) -> None:
    rng = random.Random(f"{name}{host}")
    config = CacheConfig(device_chunks=60, host_chunks=host, chunk_tokens=8, swap_watermark=rng.choice((0, 0.25)))
    stamp = policies.make(name)[1]
    twin = TurnCache(config, Machine().cost(8, 4096), policies.make(name)[0])
    manager = Manager(config, name)
    context: dict[int, int] = {}
    running: dict[int, float] = {}
    turns = dict.fromkeys(range(20), 0)
    now, lost = 0.0, 0
    for _ in range(600):
        now += rng.expovariate(0.2)
        key = rng.randrange(20)
        if key in running:
            total = context[key]
            when = stamp(now, now + running.pop(key), turns[key])
            twin.release(key, when)
            manager.release(key, when)
            continue
        history = context.get(key, 0)
        total = history + rng.randrange(1, 60)
        if total > 300 or len(running) >= 3:
            continue
        real = manager.cache.can_admit(SessionKey(str(key)), ZEROS[:total], total - history, reserve=True)
        assert twin.can_admit(total, reserve=True) == real
        if not real:
            continue
        ours, theirs = twin.admit(key, history, total, now), manager.admit(key, history, total, now)
        assert ours == theirs
        lost += ours.recomputed
        context[key], running[key] = total, rng.expovariate(0.02)
        turns[key] += 1
        assert twin.device_free == manager.cache.tiers.device.free
        assert twin.host_free == manager.cache.tiers.host.free
    assert lost > 0, "nothing was ever evicted: the test shows nothing"


def test_clear_frees_everything() -> None:
    config = CacheConfig(device_chunks=16, host_chunks=8, chunk_tokens=8)
    cache = TurnCache(config, Machine().cost(8, 4096), policies.make("retention")[0])
    cache.admit(1, 0, 100, 0.0)
    cache.release(1, 1.0)
    cache.admit(2, 0, 60, 2.0)
    cache.clear()
    assert (cache.device_free, cache.host_free) == (16, 8)
    assert cache.admit(1, 100, 128, 3.0).recomputed == 100
