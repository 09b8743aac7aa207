"""Random sessions on models with two KV groups: every answer equals a stateless run, whatever happens to the slices."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.engine.cache import tails
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY
from support.engine.hybrid_worker import HybridOracle, HybridWorker

SIZE = 4
FULL = CacheGroup("full", 0, 2, SIZE, 3)
NONE = CacheGroup("full", 0, 0, 0, 1)


def window(width: int, layers: int = 3, unit: int = 2) -> CacheGroup:
    return CacheGroup("window", width, layers, SIZE, unit)


STATE = CacheGroup("state", 0, 3, 3, 2)
MODELS = {
    "window of 6": (FULL, window(6)),
    "window of 13, one layer": (FULL, window(13, 1, 1)),
    "window alone": (NONE, window(9)),
    "state": (FULL, STATE),
    "state alone": (NONE, STATE),
}


def config(name: str, device: int, host: int) -> CacheConfig:
    return CacheConfig(device, host, SIZE, groups=MODELS[name])


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_a_stateless_run(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", 8)
    rng = random.Random(seed)
    device, host = rng.choice(((26, 20), (26, 0), (40, 60), (20, 8)))
    cache = config(name, device, host)
    scheduler = SchedulerConfig(
        context_limit=48,
        max_batch_tokens=rng.choice((8, 24, 100)),
        max_running=rng.choice((2, 4, 8)),
    )
    clock = Clock()
    engine = make_engine(cache, scheduler, HybridWorker(cache), clock)
    driver = Driver(
        engine, clock, rng, HybridOracle(MODELS[name]).verify, VOCABULARY, engine._scheduler.context_limit
    )
    driver.groups = 0.0 if MODELS[name][1].kind == "state" else 0.1
    for _ in range(120):
        driver.act()
        driver.step()
    driver.run_until_idle()
    failed = Counter(turn.failed for turn in driver.finished)
    usages = [turn.usage for turn in driver.finished]
    print(
        name,
        seed,
        len(usages),
        [
            sum(getattr(u, f"{k}_tokens") for u in usages)
            for k in ("gpu_cached", "swapped_in", "recomputed", "new")
        ],
        engine._scheduler.context_limit,
        sum(len(p.copies) for p in engine._worker.plans),
    )
    assert len(driver.finished) > 10, failed
