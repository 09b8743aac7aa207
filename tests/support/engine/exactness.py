"""Random schedules on a tiny checkpoint of each family, every answer compared with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from pensieve.config import CacheConfig, EngineTuning, PolicyName, SchedulerConfig
from pensieve.engine.plan import StepWorker
from pensieve.engine.worker.sizing import DTYPES, WorkerInfo
from pensieve.engine.worker.torch_worker import TorchWorker
from pensieve.model.folder import load_arch
from pensieve.model.ops import TORCH_OPS, triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hf_oracle import NEAR_TIE, HfOracle

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LIMIT = 160
_MECHANISMS: tuple[Literal["batch", "kernel"], ...] = ("batch", "kernel")


class Bench:
    """One family's model, shared by all schedules, and its oracle."""

    def __init__(
        self,
        family: Family,
        folder: Path,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype: str = "float32",
        near_tie: float = NEAR_TIE,
        **overrides: Any,
    ) -> None:
        """``overrides`` replace values of the checkpoint's config."""
        torch.set_num_threads(1)
        self.device, self.dtype = device, dtype
        checkpoint = tiny_checkpoint(family, folder, **overrides)
        self.oracle = HfOracle(checkpoint, weights=DTYPES[dtype], near_tie=near_tie)
        arch = load_arch(checkpoint)
        weights = load_weights(checkpoint, arch, dtype=DTYPES[dtype], device=device)
        self.model = Transformer(arch, weights, triton_ops() if device == "cuda" else TORCH_OPS)
        self.vocabulary = arch.vocab_size

    def worker(
        self, cache: CacheConfig, scheduler: SchedulerConfig, *, cuda_graphs: bool | None = None
    ) -> StepWorker:
        """A worker of its own; on a GPU with switches that depend on the sizes, unless they are given."""
        info = WorkerInfo(
            self.device, self.dtype, cache.device_chunks, cache.host_chunks, cache.chunk_tokens, LIMIT,
            max_batch_tokens=scheduler.max_batch_tokens, max_running=scheduler.max_running,
        )  # fmt: skip
        if self.device == "cpu":
            return TorchWorker(self.model, info)
        from pensieve.engine.worker.cuda_worker import CudaWorker  # needs a GPU's Triton

        rng = random.Random(cache.device_chunks * 1009 + cache.host_chunks)
        options = EngineTuning(
            pipelined_swap_in=rng.random() < 0.7,
            cuda_graphs=rng.random() < 0.7 if cuda_graphs is None else cuda_graphs,
            swap_mechanism=rng.choice(_MECHANISMS),
            verify_swap=rng.random() < 0.5,
        )
        return CudaWorker(self.model, info, options)


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
    worker = wrap(bench.worker(cache, scheduler))
    engine = make_engine(cache, scheduler, worker, clock, bench.vocabulary, overlapped=seed % 2 == 1)
    limit = min(LIMIT, cache.device_chunks * cache.chunk_tokens)
    driver = Driver(engine, clock, rng, bench.oracle.verify, bench.vocabulary, limit)
    for _ in range(14):
        driver.act()
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run_until_idle()
    engine.close()
    return driver


def run_all(bench: Bench, seeds: Iterable[int]) -> None:
    """Schedules whose receipts reconcile and that together take every path."""
    paths = {"device": 0, "host": 0, "recomputed": 0, "suspended": 0}
    for seed in seeds:
        driver = run_schedule(bench, seed)
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        paths["suspended"] += driver.engine.stats().suspensions_total
    assert all(paths.values()), f"a path was never taken: {paths}"


def caught(bench: Bench, wrap: Callable[[StepWorker], StepWorker], schedules: int = 60) -> bool:
    """Whether some schedule notices the fault."""
    for seed in range(schedules):
        try:
            run_schedule(bench, seed, wrap)
        except AssertionError:
            return True
    return False
