"""The random schedules notice every deliberate fault: what they promise is really tested."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.plan import StepWorker
from support.cache.sharing_mutants import SHARING_MUTANTS
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_tokens
from support.engine.mutants import PLAN_MUTANTS, MutantWorker, SwapOutLastWorker

CACHE = CacheConfig(device_chunks=12, host_chunks=10, chunk_tokens=4)
SCHEDULER = SchedulerConfig(context_limit=48, max_batch_tokens=16, max_running=4)

LARGE_STEPS = replace(SCHEDULER, max_batch_tokens=100, max_running=8)
"""Many requests join one plan."""
RARE = (34, 16, 12)
"""Schedules with ``LARGE_STEPS`` that notice faults which few do."""


def caught(
    wrap: Callable[[StepWorker], StepWorker],
    seeds: int = 12,
    scheduler: SchedulerConfig = SCHEDULER,
    first: Sequence[int] = (),
) -> bool:
    """Whether some schedule gives a wrong answer or breaks an invariant. ``first``: seeds to begin with."""
    for seed in (*first, *range(seeds)):
        rng = random.Random(seed)
        clock = Clock()
        worker = wrap(HashWorker(CACHE.device_chunks, CACHE.host_chunks, CACHE.chunk_tokens))
        engine = make_engine(CACHE, scheduler, worker, clock)
        driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, scheduler.context_limit)
        try:
            for _ in range(100):
                driver.act()
                driver.step()
            driver.run_until_idle()
        except AssertionError:
            return True
    return False


def test_without_a_fault_nothing_is_caught() -> None:
    assert not caught(lambda worker: worker)


@pytest.mark.parametrize("name", PLAN_MUTANTS)
def test_broken_plans_are_caught(name: str) -> None:
    assert caught(lambda worker: MutantWorker(worker, PLAN_MUTANTS[name]))


def test_copy_order_swap_out_after_the_writes_is_caught() -> None:
    assert caught(SwapOutLastWorker)


def test_stale_host_copies_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that grew after its copy must not be restored from that copy."""

    def computed(self: CacheManager, key: SessionKey, start: int, end: int, now: float = 0.0) -> None:
        size = self.config.chunk_tokens
        for index in range(start // size, self.chunks_for(end)):
            self._running[key].chunks[index].filled = min(end - index * size, size)  # and no ``fill``

    monkeypatch.setattr(CacheManager, "computed", computed)
    assert caught(lambda worker: worker, seeds=80)


def test_a_restore_that_evicts_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning only what already has a page lets a restore take the pages that it has just handed out."""
    original = Tiers.pin
    monkeypatch.setattr(
        Tiers, "pin", lambda self, chunks: original(self, [chunk for chunk in chunks if chunk.device >= 0])
    )
    assert caught(lambda worker: worker)


@pytest.mark.parametrize("name", SHARING_MUTANTS)
def test_broken_sharing_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in SHARING_MUTANTS[name]:
        monkeypatch.setattr(fault.owner, fault.name, fault.broken)
    assert caught(lambda worker: worker, seeds=60, scheduler=LARGE_STEPS, first=RARE)
