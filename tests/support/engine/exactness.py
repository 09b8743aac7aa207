"""Random schedules on a tiny checkpoint of each family, every answer compared with transformers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch

from pensieve.config import (
    CacheConfig,
    CacheGroup,
    EngineTuning,
    KvDtypeName,
    PolicyName,
    SchedulerConfig,
    WeightsName,
)
from pensieve.engine.cache.pages import PageSize
from pensieve.engine.elastic import ElasticTier
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.messages import SetMemory
from pensieve.engine.plan import Plan, StepWorker
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.worker.hybrid_sizing import NO_TIER
from pensieve.engine.worker.invariance import with_even_head
from pensieve.engine.worker.sizing import DTYPES, WorkerInfo
from pensieve.engine.worker.torch_worker import TorchWorker
from pensieve.kernels.kv_codec import CODES
from pensieve.model.arch import DTYPE_BYTES, Arch
from pensieve.model.folder import load_arch
from pensieve.model.groups import KvGroup, kv_groups
from pensieve.model.ops import INVARIANT_OPS, TORCH_OPS, triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.adversary import Adversary
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.fp8_oracle import as_fp8
from support.engine.hf_oracle import NEAR_TIE, HfOracle
from support.model import recurrent_models

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LIMIT = 160
DTYPES.setdefault("float64", torch.float64)
DTYPE_BYTES.setdefault("float64", torch.float64.itemsize)
SPAN = 24
"""What a step can always compute of one request, for models with windows, in tests that set it so low."""
_MECHANISMS: tuple[Literal["batch", "kernel"], ...] = ("batch", "kernel")


def checkpoint_of(family: Family | recurrent_models.Family, folder: Path, **overrides: Any) -> Path:
    if family not in recurrent_models.FAMILIES:
        return tiny_checkpoint(family, folder, **overrides)
    made = folder / family
    recurrent_models.make_model(family, made, **overrides)
    return made


class Bench:
    """One family's model, shared by all schedules, and its oracle."""

    def __init__(
        self,
        family: Family | recurrent_models.Family,
        folder: Path,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        dtype: str = "float32",
        near_tie: float = NEAR_TIE,
        invariant: bool = False,
        weights: WeightsName = "full",
        kv_dtype: KvDtypeName = "auto",
        **overrides: Any,
    ) -> None:
        """``invariant``, ``weights``, ``kv_dtype``: the options. ``overrides`` replace values of the checkpoint's
        config. A ``dtype`` of float64 is for tests: only there no rounding moves a value over the edge between two
        codes."""
        torch.set_num_threads(1)
        self.kv_dtype: KvDtypeName = kv_dtype
        self.device, self.dtype, self.near_tie, self.invariant = device, dtype, near_tie, invariant
        checkpoint = checkpoint_of(family, folder, **overrides)
        if weights == "fp8":
            self.oracle = HfOracle(checkpoint, near_tie=near_tie, change=as_fp8)
        else:
            self.oracle = HfOracle(
                checkpoint, weights=DTYPES[dtype], near_tie=near_tie, code=CODES.get(kv_dtype)
            )
        arch = load_arch(checkpoint)
        loaded = load_weights(checkpoint, arch, dtype=DTYPES[dtype], device=device, weights=weights)
        if invariant and device == "cuda":
            loaded = with_even_head(loaded)
        ops = INVARIANT_OPS if invariant else TORCH_OPS
        self.model = Transformer(arch, loaded, triton_ops(invariant=invariant) if device == "cuda" else ops)
        self.vocabulary = arch.vocab_size

    @property
    def cached_arch(self) -> Arch:
        """The architecture whose pages one worker has."""
        return self.model.arch

    def groups(self, chunk_tokens: int) -> tuple[KvGroup, ...]:
        return kv_groups(self.cached_arch, chunk_tokens, self.dtype, self.kv_dtype)

    def info(self, cache: CacheConfig, scheduler: SchedulerConfig, ranks: int = 1) -> WorkerInfo:
        in_bytes = len(cache.groups) > 1 or cache.device_floor_bytes is not None
        host_bytes, host_units = cache.host_bytes, [1, 1]
        if len(cache.groups) == 1:  # one unit, also beside an elastic tier
            host_bytes = cache.host_chunks * cache.groups[0].page_bytes if in_bytes else None
            host_units = [max(1, cache.host_chunks)]
        return WorkerInfo(
            self.device, self.dtype, cache.device_chunks, cache.host_chunks, cache.chunk_tokens, LIMIT,
            max_batch_tokens=scheduler.max_batch_tokens, max_running=scheduler.max_running, ranks=ranks,
            groups=self.groups(cache.chunk_tokens) if in_bytes else (),
            device_tier=_layout(cache, cache.device_bytes, [group.device_unit for group in cache.groups]),
            host_tier=_layout(cache, host_bytes, host_units),
            device_floor=cache.device_floor_bytes, is_invariant=self.invariant,
            kv_dtype=self.kv_dtype,
            max_drafts=scheduler.max_drafts,
        )  # fmt: skip

    def worker(
        self, cache: CacheConfig, scheduler: SchedulerConfig, *, cuda_graphs: bool | None = None
    ) -> StepWorker:
        """A worker of its own; on a GPU with switches that depend on the sizes, unless they are given."""
        info = self.info(cache, scheduler)
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


def _layout(cache: CacheConfig, num_bytes: int | None, units: list[int]) -> TierLayout:
    if num_bytes is None:
        return NO_TIER
    sizes = [
        PageSize(group.layers, group.layer_page_bytes, unit)
        for group, unit in zip(cache.groups, units, strict=True)
    ]
    return TierLayout(num_bytes, tuple(sizes))


def with_groups(bench: Bench, cache: CacheConfig, rng: random.Random) -> CacheConfig:
    """The same tiers for a model with two KV groups: the chunks of the first, and pages of the second for a context or
    two."""
    groups = bench.groups(cache.chunk_tokens)
    if len(groups) < 2:
        return cache
    full, second = groups
    unit = rng.choice((1, 2))
    parts = (
        CacheGroup(
            full.kind, 0, len(full.layers), full.layer_page_bytes, rng.choice((1, 3)) if full.layers else 1
        ),
        CacheGroup(second.kind, second.window or 0, len(second.layers), second.layer_page_bytes, unit),
    )
    # As much as the longest context takes at once, with what one step computes.
    least = (
        4
        if second.kind == "state"
        else -(-(parts[0].window + parts[1].window + SPAN) // cache.chunk_tokens) + 2
    )
    more = rng.choice((0, 1, 2) if second.kind == "state" else (2 + 2 * unit, least + 2 * unit))
    pages = [least + more, rng.choice((1, least, 3 * least)) if cache.host_chunks else 0]
    chunks = cache.device_chunks, cache.host_chunks
    sizes = [
        count * full.page_bytes + others * second.page_bytes
        for count, others in zip(chunks, pages, strict=True)
    ]
    sizes[0] = max(sizes[0], sum(part.device_unit * part.page_bytes for part in parts))
    step = second.layer_page_bytes
    device, host = (-(-size // step) * step for size in sizes)
    return replace(cache, groups=parts, device_bytes=device, host_bytes=host)


def with_range(bench: Bench, cache: CacheConfig, rng: random.Random) -> CacheConfig:
    """The device tier may grow to twice its size."""
    groups, floor = cache.groups, cache.device_bytes
    if floor is None:
        (full,) = bench.groups(cache.chunk_tokens)
        one = CacheGroup(full.kind, 0, len(full.layers), full.layer_page_bytes, rng.choice((1, 2)))
        unit = one.device_unit * one.page_bytes
        groups, floor = (one,), -(-cache.device_chunks * one.page_bytes // unit) * unit
    return replace(
        cache, device_chunks=2 * cache.device_chunks, groups=groups, device_bytes=2 * floor, device_floor_bytes=floor,
    )  # fmt: skip


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
    bench: Bench,
    seed: int,
    wrap: Callable[[StepWorker], StepWorker] = lambda worker: worker,
    *,
    elastic: bool = False,
    max_drafts: int = 0,
) -> Driver:
    """One random schedule, every answer checked. ``elastic``: the device tier changes its size on the way.

    An invariant worker checks the chunks that it computes again.
    """
    rng = random.Random(seed)
    cache, scheduler = random_setup(rng)
    cache = replace(with_groups(bench, cache, rng), check_recomputed=bench.invariant)
    scheduler = replace(scheduler, max_drafts=max_drafts)
    if cache.groups[-1].kind == "state":
        least = cache.chunk_tokens + scheduler.max_running
        scheduler = replace(scheduler, max_batch_tokens=max(least, scheduler.max_batch_tokens))
    if elastic:
        cache = with_range(bench, cache, rng)
    clock = Clock()
    worker = wrap(bench.worker(cache, scheduler))
    engine = make_engine(
        cache,
        scheduler,
        worker,
        clock,
        bench.vocabulary,
        overlapped=seed % 2 == 1,
        elastic=ElasticTier if elastic else None,
    )
    sizes = engine.stats()
    limit = min(LIMIT, engine._ready.context_limit)
    driver = Driver(engine, clock, rng, bench.oracle.verify, bench.vocabulary, limit)
    for _ in range(14):
        driver.act()
        for _ in range(rng.randrange(4)):
            if elastic and rng.random() < 0.3:
                engine.handle(SetMemory(1, rng.randint(sizes.device_floor, sizes.device_ceiling)))
            driver.step()
    driver.run_until_idle()
    for wanted in (sizes.device_ceiling, sizes.device_floor) if elastic else ():
        engine.handle(SetMemory(1, wanted))
        driver.run_until_idle()
        assert engine.stats().device_held == wanted
    engine.close()
    return driver


def run_with_drafts(bench: Bench, seeds: Iterable[int]) -> Counter[str]:
    """Schedules whose answers are drafted by an adversary that has seen them before; the drafts by what became of them,
    and the spans behind undecided drafts if a seed gives an overlapped engine."""
    seeds = list(seeds)
    totals, answers = Counter({"accepted": 0, "rejected": 0}), dict[bytes, list[int]]()
    if any(seed % 2 for seed in seeds):
        totals["undecided"] = 0
    launched = Scheduler.on_launched

    def counted(self: Scheduler, plan: Plan) -> None:
        undecided = sum(span.undecided is not None for span in plan.spans)
        if undecided:
            totals["undecided"] += undecided
        launched(self, plan)

    def answer(request: Request, known: Sequence[int], count: int) -> Sequence[int]:
        right = answers.get(request.tokens[: request.prompt_tokens].tobytes(), [])
        return right[len(known) :][:count]

    for seed in seeds:
        for turn in run_schedule(bench, seed).finished:
            answers[np.array(turn.context, np.int32).tobytes()] = turn.outputs[0]
        with pytest.MonkeyPatch.context() as patch:
            Adversary(random.Random(seed), answer, bench.vocabulary).install(patch)
            patch.setattr(Scheduler, "on_launched", counted)
            stats = run_schedule(bench, seed, max_drafts=40).engine.stats()
        totals["accepted"] += stats.accepted_total
        totals["rejected"] += stats.drafted_total - stats.accepted_total
    return totals


EVERY_PATH = (12, 14, 41)
"""Random schedules that together take every path, some of them with steps planned ahead."""


def run_all(bench: Bench, seeds: Iterable[int] = ()) -> None:
    """Schedules whose receipts reconcile and that together take every path, with some of ``EVERY_PATH`` if need be."""
    paths = paths_of(bench, seeds)
    for seed in EVERY_PATH:
        if not all(paths.values()):
            paths.update(paths_of(bench, [seed]))
    assert all(paths.values()), f"a path was never taken: {paths}"


def paths_of(bench: Bench, seeds: Iterable[int]) -> Counter[str]:
    """Schedules whose receipts reconcile; how often they took each path."""
    paths = Counter({"device": 0, "host": 0, "recomputed": 0, "suspended": 0})
    for seed in seeds:
        driver = run_schedule(bench, seed)
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        paths["suspended"] += driver.engine.stats().suspensions_total
    return paths


def caught(bench: Bench, wrap: Callable[[StepWorker], StepWorker], schedules: int = 60) -> bool:
    """Whether some schedule notices the fault; those that take every path come first, as they most often do."""
    for seed in (*EVERY_PATH, *range(schedules)):
        try:
            run_schedule(bench, seed, wrap)
        except AssertionError:
            return True
    return False
