"""Random schedules on a tiny checkpoint of each family, every answer compared with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from pensieve.config import CacheConfig, EngineOptions, PolicyName, SchedulerConfig
from pensieve.engine.plan import StepWorker
from pensieve.engine.worker import TorchWorker, WorkerInfo, build_worker
from pensieve.model.transformer import Transformer
from support.checkpoints import Family, tiny_checkpoint
from support.engine_driver import Clock, Driver, make_engine
from support.hf_oracle import HfOracle

POLICIES: tuple[PolicyName, ...] = ("retention", "lru", "trailing-half", "whole-session")
LIMIT = 160


class Bench:
    """One family's model, shared by all schedules, and its oracle."""

    def __init__(self, family: Family, folder: Path, device: Literal["cpu", "cuda"] = "cpu") -> None:
        torch.set_num_threads(1)
        self.device = device
        checkpoint = tiny_checkpoint(family, folder)
        self.oracle = HfOracle(checkpoint)
        worker = build_worker(
            EngineOptions(
                model=str(checkpoint), device=device, dtype="float32", device_cache="64tokens", host_cache="0"
            )
        )
        self.model: Transformer = worker._model
        self.vocabulary = worker.arch.vocab_size

    def worker(self, cache: CacheConfig) -> TorchWorker:
        info = WorkerInfo(
            self.device, "float32", cache.device_chunks, cache.host_chunks, cache.chunk_tokens, LIMIT
        )
        return TorchWorker(self.model, info)


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
