"""A device tier that grows and shrinks between any two steps: answers stay exact, and memory backs each page in use."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.engine.cache import tails
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.cache.resizing import Ends, Resizer
from pensieve.engine.cache.tiers import Pages
from pensieve.engine.elastic import ElasticTier
from pensieve.engine.messages import Memory, SetMemory
from pensieve.engine.plan import Plan, StepResult
from pensieve.engine.ranks.codec import decode, encode
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY
from support.engine.hybrid_worker import HybridOracle, HybridWorker, held_back
from support.lengths import seeds

SIZE = 4
FULL = CacheGroup("full", 0, 2, SIZE, 3)
NO_LAYERS = CacheGroup("full", 0, 0, 0, 1)
MODELS = {
    "full": (FULL,),
    "window of 6": (FULL, CacheGroup("window", 6, 3, SIZE, 2)),
    "window alone": (NO_LAYERS, CacheGroup("window", 9, 3, SIZE, 2)),
    "state": (FULL, CacheGroup("state", 0, 3, 3, 2)),
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", 2 * SIZE)


def config_of(name: str, chunks: int, host: int) -> CacheConfig:
    """A tier of 10 to ``chunks`` chunks with all that their groups keep."""
    groups = MODELS[name]
    chunk = sum(group.page_bytes for group in groups)
    return CacheConfig(
        chunks, host, SIZE, groups=groups, device_bytes=chunks * chunk + 5, host_bytes=host * chunk,
        device_floor_bytes=10 * chunk + 2,
    )  # fmt: skip


def play(name: str, seed: int, worker_of: Callable[[CacheConfig], HybridWorker] = HybridWorker) -> Driver:
    """One random schedule with resizes, every answer and each step's cache checked; then down to the floor."""
    rng = random.Random(seed)
    cache = config_of(name, rng.choice((14, 26, 60)), rng.choice((0, 8, 60)))
    scheduler = SchedulerConfig(
        48, max_batch_tokens=rng.choice((8, 24, 100)), max_running=rng.choice((2, 4, 8))
    )
    worker, clock, free = worker_of(cache), Clock(), [10_000]
    if seed % 3 == 1:
        worker.allocate = held_back(rng)
    slack, idle = rng.choice((0, 50)), rng.choice((0.0, 60.0))
    engine = make_engine(
        cache,
        scheduler,
        worker,
        clock,
        overlapped=seed % 2 == 1,
        elastic=lambda manager: ElasticTier(
            manager, ranks=2, slack_bytes=slack, idle_release_s=idle, free_memory=lambda: free[0]
        ),
    )
    limit = engine._scheduler.context_limit
    driver = Driver(engine, clock, rng, HybridOracle(MODELS[name]).verify, VOCABULARY, limit)
    driver.tenants = seed % 5 == 0
    driver.groups = 0.15
    ask = engine.stats()
    for _ in range(90):
        if rng.random() < 0.15:
            wanted = rng.choice(
                (ask.device_floor, ask.device_ceiling, rng.randint(ask.device_floor, ask.device_ceiling))
            )
            (answer,) = engine.handle(SetMemory(1, wanted))
            assert isinstance(answer, Memory) and answer.wanted == wanted and not answer.refused
        free[0] = rng.choice((free[0], 20, 90, 10_000))
        driver.act()
        driver.step()
    free[0] = 10_000
    driver.run_until_idle()
    worker.allocate = lambda before, asked: asked
    for wanted in (ask.device_ceiling, ask.device_floor):
        clock.now += 100.0
        engine.handle(SetMemory(1, wanted))
        driver.run_until_idle()
        reached = engine.stats()
        assert reached.device_held == wanted or idle, (reached.device_held, wanted)
        assert worker.device.backed is not None and 2 * sum(worker.device.backed) == reached.device_held
    assert reached.device_held == ask.device_floor
    return driver


@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_a_stateless_run_whatever_the_size(name: str) -> None:
    paths: Counter[str] = Counter()
    for seed in seeds(6, 400):
        driver = play(name, seed)
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        for plan in driver.engine._worker.plans:
            same = decode(encode(plan))
            assert same is not None and same.memory == plan.memory, "another rank would do something else"
            paths["moved while resized"] += len(plan.copies) if plan.memory else 0
            paths["memory alone"] += plan.memory is not None and not plan.spans
    assert set(paths) == set(+paths), f"a path was never taken: {paths}"


class TooEarly(HybridWorker):
    """Gives memory up before the plan's copies have read it."""

    def run(self, plan: Plan) -> StepResult:
        if plan.memory is not None and self.device.backed is not None:
            low, high = zip(plan.memory, self.device.backed, strict=True)
            self.device.back((min(low), min(high)))
        return super().run(plan)


def pinned_cut_off(self: Resizer, target: int, demand: Pages) -> Ends:
    """The tier shrinks below what running requests have pinned or were promised."""
    tiers = self._tiers
    claimed = tiers.pinned, tiers.promised, tiers.repeated
    tiers.pinned, tiers.promised, tiers.repeated = [0, 0], 0, 0
    ends = ends_for(self, target, demand)
    tiers.pinned, tiers.promised, tiers.repeated = claimed
    return ends


def used_before_backed(self: Resizer) -> None:
    """Pages are handed out before a result says that memory backs them."""
    if sum(self._aim) <= self._pool.ceiling_bytes:
        self._pool.limit(self._aim)


ends_for: Callable[..., Ends] = Resizer._ends_for
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "pinned pages cut off": (Resizer, "_ends_for", pinned_cut_off),
    "used before it is backed": (Resizer, "_set_limits", used_before_backed),
    "units in use given up": (PagePool, "extents", property(lambda self: (0, 0))),
}


def is_caught(worker_of: Callable[[CacheConfig], HybridWorker] = HybridWorker) -> bool:
    for seed in range(12):
        for name in ("full", "window of 6"):
            try:
                play(name, seed, worker_of)
            except (AssertionError, ValueError):
                return True
    return False


@pytest.mark.parametrize("fault", MUTANTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken = MUTANTS[fault]
    monkeypatch.setattr(owner, attribute, broken)
    monkeypatch.setattr(Resizer, "check", lambda self: None)  # the answers, or the memory, must tell
    assert is_caught()


def test_memory_given_up_too_early_is_caught() -> None:
    assert is_caught(TooEarly)
