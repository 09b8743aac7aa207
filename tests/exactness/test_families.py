"""Rule one: whatever happened to the cache, the answer is what transformers gives on the whole history.

For each family, hundreds of random schedules on a tiny random checkpoint in float32: sessions and turns, tiers down to
the minimum, chunks of 1, 8 and 32 tokens, all policies and off switches, suspensions, cancels, edits, evictions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pensieve.config import CacheConfig, EngineOptions, PolicyName, SchedulerConfig
from pensieve.engine.plan import StepWorker
from pensieve.engine.transfer import LayerTransfers
from pensieve.engine.worker import TorchWorker, WorkerInfo, build_worker
from pensieve.model.transformer import Transformer
from support.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.engine_driver import Clock, Driver, make_engine
from support.hf_oracle import HfOracle
from support.mutants import PLAN_MUTANTS, MutantWorker, SwapOutLastWorker

SCHEDULES = 220
"""Per family."""
POLICIES: tuple[PolicyName, ...] = ("retention", "lru", "trailing-half", "whole-session")
LIMIT = 160


class Bench:
    """One family's model, shared by all schedules, and its oracle."""

    def __init__(self, family: Family, folder: Path) -> None:
        torch.set_num_threads(1)
        checkpoint = tiny_checkpoint(family, folder)
        self.oracle = HfOracle(checkpoint)
        worker = build_worker(EngineOptions(model=str(checkpoint), device_cache="64tokens", host_cache="0"))
        self.model: Transformer = worker._model
        self.vocabulary = worker.arch.vocab_size

    def worker(self, cache: CacheConfig) -> TorchWorker:
        info = WorkerInfo("cpu", "float32", cache.device_chunks, cache.host_chunks, cache.chunk_tokens, LIMIT)
        return TorchWorker(self.model, info)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Bench]:
    made: dict[Family, Bench] = {}

    def bench(family: Family) -> Bench:
        if family not in made:
            made[family] = Bench(family, tmp_path_factory.mktemp("models"))
        return made[family]

    return bench


def random_setup(rng: random.Random) -> tuple[CacheConfig, SchedulerConfig]:
    size = rng.choice((1, 8, 32))
    device = max(2, rng.choice((40, 64, 96, 200)) // size)
    cache = CacheConfig(
        device_chunks=device,
        host_chunks=rng.choice((0, 1, device // 2, 3 * device)),
        chunk_tokens=size,
        policy=rng.choice(POLICIES),
        swap_watermark=rng.choice((0.0, 0.25, 1.0)),
        decode_reserve=rng.choice((0.0, 0.1)),
    )
    scheduler = SchedulerConfig(
        context_limit=LIMIT,
        max_batch_tokens=rng.choice((5, 32, 300)),
        max_running=rng.choice((1, 4, 16)),
        stateless=rng.random() < 0.05,
        unified_batch=rng.random() < 0.8,
        swap_in_first=rng.random() < 0.5,
    )
    return cache, scheduler


def run_schedule(
    bench: Bench, seed: int, wrap: Callable[[StepWorker], StepWorker] = lambda worker: worker
) -> Driver:
    """One random schedule, every answer checked."""
    rng = random.Random(seed)
    cache, scheduler = random_setup(rng)
    clock = Clock()
    engine = make_engine(cache, scheduler, wrap(bench.worker(cache)), clock, bench.vocabulary)
    limit = min(LIMIT, cache.device_chunks * cache.chunk_tokens)
    driver = Driver(engine, clock, rng, bench.oracle.verify, bench.vocabulary, limit)
    for _ in range(14):
        driver.act()
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run_until_idle()
    return driver


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(2))
def test_answers_equal_transformers(family: Family, part: int, benches: Callable[[Family], Bench]) -> None:
    bench = benches(family)
    paths = {"device": 0, "host": 0, "recomputed": 0, "suspended": 0}
    for seed in range(part * SCHEDULES // 2, (part + 1) * SCHEDULES // 2):
        driver = run_schedule(bench, seed)
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        paths["suspended"] += driver.engine.stats().suspensions_total
    assert all(paths.values()), f"a path was never taken: {paths}"
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


def caught(bench: Bench, wrap: Callable[[StepWorker], StepWorker], schedules: int = 60) -> bool:
    """Whether some schedule notices the fault."""
    for seed in range(schedules):
        try:
            run_schedule(bench, seed, wrap)
        except (AssertionError, IndexError):
            return True
    return False


@pytest.mark.parametrize("name", PLAN_MUTANTS)
def test_broken_plans_are_caught(name: str, benches: Callable[[Family], Bench]) -> None:
    assert caught(benches("llama3"), lambda worker: MutantWorker(worker, PLAN_MUTANTS[name]))


def test_copy_order_swap_out_after_the_writes_is_caught(benches: Callable[[Family], Bench]) -> None:
    assert caught(benches("llama3"), SwapOutLastWorker)


def test_copy_order_swap_in_of_the_last_layer_missing_is_caught(
    benches: Callable[[Family], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of the last layer runs before that layer's copies have come."""
    original = LayerTransfers.wait
    last = benches("llama3").model.arch.num_layers - 1
    monkeypatch.setattr(
        LayerTransfers, "wait", lambda self, layer: None if layer == last else original(self, layer)
    )
    monkeypatch.setattr(LayerTransfers, "finish", lambda self: None)
    assert caught(benches("llama3"), lambda worker: worker)
