"""Cost profiles: how they are measured and stored, and which one an engine uses.

``Cost(l) = Cost_attention(l) + c`` of recomputing one chunk is measured with the worker that will do it, on
one conversation that grows in the KV pool. At each measured context length *l* the chunk that ends there is
computed several times; the fastest is the total cost at *l*. ``c`` is the total at context length 0, by the
line through the two shortest contexts; the rest is attention. ``CostModel.from_json`` reads the profiles.

They are stored in the user's cache folder, by model, device, dtype and chunk size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from pensieve.config import EngineOptions, KvDtypeName
from pensieve.core import RequestKey, Sampling, TokenArray
from pensieve.engine.cache.pages import PagePool, PageSize
from pensieve.engine.cost import FORMAT, CostModel, CostProfileError
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.plan import NO_PAGE, Chain, Plan, SampleSpec, Span, StepWorker
from pensieve.machine import usable_cores, user_directory
from pensieve.model.arch import Arch
from pensieve.model.groups import LEAST_SPAN, KvGroup, context_pages, kv_groups

log = logging.getLogger(__name__)

REQUEST: Final = RequestKey(1)
MAX_CONTEXT: Final = 16384
"""Default limit of measured contexts, in tokens: beyond, a cost model continues the line."""
FILL_TOKENS: Final = 512
"""Most tokens per step while the context grows between two measurements."""
QUICK_SECONDS: Final = 3.0
"""Approximate limit of the measurement at a server's first start."""
QUICK_GROWTH: Final = 4
"""Ratio of each context of it to the one before."""
QUICK_REPEATS: Final = 3


class Info(Protocol):
    """The part of ``WorkerInfo`` that a measurement needs."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def fp8(self) -> bool: ...
    @property
    def kv_dtype(self) -> KvDtypeName: ...
    @property
    def device_chunks(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def context_limit(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def device_tier(self) -> TierLayout: ...
    @property
    def device_floor(self) -> int | None: ...


class ProbedWorker(StepWorker, Protocol):
    @property
    def arch(self) -> Arch: ...
    @property
    def info(self) -> Info: ...


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Seconds to compute the chunk that ends at ``context`` tokens, with all tokens before it cached."""

    context: int
    seconds: float


class HybridPages:
    """The pages of one growing context of a model with two KV groups."""

    def __init__(self, groups: tuple[KvGroup, ...], tier: TierLayout, chunk_tokens: int) -> None:
        self._pool = PagePool(tier.num_bytes, tier.sizes)
        self._group = groups[1]
        self._chunk_tokens = chunk_tokens
        # As many as a context of any length needs.
        self._most = context_pages(groups, chunk_tokens, 1 << 40)[1]
        self._first: list[int] = []
        self._second: list[int] = []

    def take(self, group: int, most: int) -> list[int]:
        """Return up to ``most`` further pages of a group."""
        taken: list[int] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self._pool.take(group))
        return taken

    def plan(self, step: int, span: Span) -> Plan:
        """Return the plan of a step that computes ``span``, of at most ``LEAST_SPAN`` tokens. Raises IndexError when
        the tier is too small."""
        chunks = -(-span.end // self._chunk_tokens)
        while len(self._first) < chunks:
            self._first.append(self._pool.take(0))
        while len(self._second) < min(chunks, self._most):
            self._second.append(self._pool.take(1))
        table = np.array(self._first[:chunks], dtype=np.int32)
        if self._group.window is None:
            state = self._second[0]
            chain = Chain(0, 0, state if span.start else NO_PAGE, NO_PAGE, 0, state)
            return Plan(step, (span,), (table,), chains=(chain,))
        # Pages that the window has left behind are used again.
        window = np.resize(np.array(self._second, dtype=np.int32), chunks)
        return Plan(step, (span,), (table,), window_tables=(window,))


class ElasticPages(HybridPages):
    """The same in an elastic tier: each plan has the memory of its pages backed."""

    def __init__(self, groups: tuple[KvGroup, ...], tier: TierLayout, chunk_tokens: int) -> None:
        # A single group's pages lie in units too.
        none = KvGroup("window", (), 0, 1)
        sizes = tier.sizes if len(groups) > 1 else (*tier.sizes, PageSize(0, 0, 1))
        super().__init__((*groups, none)[:2], TierLayout(tier.num_bytes, sizes), chunk_tokens)
        self._single = len(groups) == 1

    def plan(self, step: int, span: Span) -> Plan:
        """See ``HybridPages.plan``."""
        plan = super().plan(step, span)
        ends = [
            -(-used // size.unit_pages) * size.unit_bytes
            for used, size in zip((len(self._first), len(self._second)), self._pool.groups, strict=True)
        ]
        return replace(
            plan, memory=(ends[0], ends[1]), window_tables=() if self._single else plan.window_tables
        )


class Prober:
    """Runs one growing context through a worker. Overwrites the first pages of its pool."""

    def __init__(
        self,
        worker: StepWorker,
        *,
        chunk_tokens: int,
        vocab_size: int,
        fill_tokens: int = FILL_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
        pages: HybridPages | None = None,
    ) -> None:
        """``pages``: for a model with two KV groups."""
        self._worker = worker
        self._chunk_tokens = chunk_tokens
        self._vocab_size = vocab_size
        self._fill_tokens = fill_tokens
        self._clock = clock
        self._pages = pages
        self._step = 0

    def measure(self, longest: int, repeats: int, growth: int = 2) -> Iterator[CostPoint]:
        """Yield points from one chunk to ``longest`` tokens, each ``growth`` times as long as the one before."""
        chunk, done, context = self._chunk_tokens, 0, self._chunk_tokens
        while context <= longest:
            # Everything before the measured chunk must be cached, as it would be while serving.
            while done < context - chunk:
                end = min(done + self._fill_tokens, context - chunk)
                self._run(done, end)
                done = end
            self._run(context - chunk, context)  # not measured: it compiles kernels and fills caches
            times = [self._timed(context - chunk, context) for _ in range(repeats)]
            done = context
            yield CostPoint(context, min(times))  # the fastest: other load on the machine only adds time
            context *= growth

    def _timed(self, start: int, end: int) -> float:
        before = self._clock()
        self._run(start, end)
        return self._clock() - before

    def _run(self, start: int, end: int) -> None:
        """Compute tokens ``[start, end)`` and sample one after them, so that a GPU has finished when this returns."""
        tokens: TokenArray = (np.arange(start, end, dtype=np.int64) * 7919 % self._vocab_size).astype(
            np.int32
        )
        sample = SampleSpec(Sampling(), output_index=0)
        self._step += 1
        span = Span(REQUEST, start, tokens, 0, sample)
        if self._pages is not None:
            plan = self._pages.plan(self._step, span)
        else:
            pages = np.arange(-(-end // self._chunk_tokens), dtype=np.int32)
            plan = Plan(step=self._step, spans=(span,), page_tables=(pages,))
        self._worker.launch(plan).result()


def prober(worker: ProbedWorker, clock: Callable[[], float] = time.perf_counter) -> Prober:
    """Return a prober for this worker, within its limits. Raises ValueError when a step cannot hold a chunk."""
    info = worker.info
    if info.max_batch_tokens < info.chunk_tokens:
        raise ValueError(
            f"a step of at most {info.max_batch_tokens} tokens cannot compute a chunk of {info.chunk_tokens} at once"
        )
    fill = min(FILL_TOKENS, info.max_batch_tokens)
    pages: HybridPages | None = None
    groups = kv_groups(worker.arch, info.chunk_tokens, info.dtype, info.kv_dtype)
    if info.device_floor is not None:
        fill = min(fill, LEAST_SPAN)
        pages = ElasticPages(groups, info.device_tier, info.chunk_tokens)
    elif len(groups) > 1:
        fill = min(fill, LEAST_SPAN)
        pages = HybridPages(groups, info.device_tier, info.chunk_tokens)
    return Prober(
        worker,
        chunk_tokens=info.chunk_tokens,
        vocab_size=worker.arch.vocab_size,
        fill_tokens=fill,
        clock=clock,
        pages=pages,
    )


def quick_points(
    worker: ProbedWorker, *, seconds: float = QUICK_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[CostPoint]:
    """Measure a few points, at least two, in about ``seconds``. Raises ValueError when the pool is too small."""
    info, started, points = worker.info, clock(), list[CostPoint]()
    longest = min(info.context_limit, info.device_chunks * info.chunk_tokens, MAX_CONTEXT)
    if longest < QUICK_GROWTH * info.chunk_tokens:
        raise ValueError(f"contexts of at most {longest} tokens are too short to measure a cost by length")
    for point in prober(worker, clock).measure(longest, QUICK_REPEATS, QUICK_GROWTH):
        points.append(point)
        # The next point takes longer in proportion to its context.
        if len(points) > 1 and (clock() - started) * QUICK_GROWTH > seconds:
            break
    return points


def split_attention(points: list[CostPoint]) -> tuple[list[tuple[int, float]], float]:
    """Split points into attention cost by context and ``c``; both are at least 0, and attention never falls.
    Raises ValueError for fewer than two points."""
    if len(points) < 2:
        raise ValueError("at least two points are needed")
    first, second = points[:2]
    slope = max(0.0, (second.seconds - first.seconds) / (second.context - first.context))
    other = min(max(0.0, first.seconds - slope * first.context), min(point.seconds for point in points))
    attention: list[tuple[int, float]] = []
    highest = 0.0
    for point in points:
        highest = max(highest, point.seconds - other)
        attention.append((point.context, highest))
    return attention, other


def describe(
    worker: ProbedWorker, model: str, points: list[CostPoint], *, device_name: str, repeats: int
) -> dict[str, Any]:
    """Return the profile's file content: what was measured, and on what machine."""
    attention, other = split_attention(points)
    return {
        "format": FORMAT,
        "model": model,
        "family": worker.arch.family,
        "device": worker.info.device,
        "device_name": device_name,
        "dtype": worker.info.dtype,
        "kv_dtype": worker.info.kv_dtype,
        "chunk_tokens": worker.info.chunk_tokens,
        "attention": attention,
        "other_seconds": other,
        "repeats": repeats,
        "versions": {name: _version(name) for name in ("pensieve", "torch", "numpy")},
        "machine": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


_NOT_COMPUTED = ("bos_token_id", "eos_token_ids", "generation", "dtype")
"""Fields of an ``Arch`` that do not affect the cost of a step. The dtype in use is part of the file name itself."""


def profile_directory() -> Path:
    """``$XDG_CACHE_HOME/pensieve/profiles`` or ``~/.cache/pensieve/profiles``."""
    return user_directory("XDG_CACHE_HOME", ".cache") / "profiles"


def fingerprint(arch: Arch) -> str:
    """Return a name for the computation that ``arch`` describes: 12 hex digits."""
    values = {name: value for name, value in dataclasses.asdict(arch).items() if name not in _NOT_COMPUTED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def device_name(info: Info) -> str:
    """Return the device that a profile is for: the GPU's name or a description of the CPU, with the number of
    ranks."""
    several = f"{info.ranks} x " if info.ranks > 1 else ""
    if info.device == "cuda":
        import torch

        return several + str(torch.cuda.get_device_name())
    return f"{several}{platform.machine()} cpu {usable_cores()} cores"


def profile_path(worker: ProbedWorker, name_of_device: str) -> Path:
    """Return the path of this worker's profile, which need not exist."""
    info = worker.info
    device = re.sub(r"[^a-z0-9]+", "-", name_of_device.lower()).strip("-")
    chunk = f"chunk{info.chunk_tokens}"
    dtype = info.dtype + "-fp8" * info.fp8 + ("" if info.kv_dtype == "auto" else f"-kv-{info.kv_dtype}")
    parts = (worker.arch.family, fingerprint(worker.arch), device, dtype, chunk)
    return profile_directory() / ("-".join(parts) + ".json")


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write the profile atomically, since other servers may read it meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(profile, indent=2) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_or_measure_cost(options: EngineOptions, worker: ProbedWorker) -> CostModel:
    """Return the cost model that ``options.cost_profile`` asks for.

    A file name: that file; raises CostProfileError when it cannot be used. ``estimate``: an estimate from the
    architecture. ``auto``: the stored profile of this model and machine, if there is one; else a GPU is
    measured for a few seconds and the result stored, and a CPU gets the estimate. Call this before the cache
    holds anything: measuring writes into the KV pool.
    """
    if options.cost_profile == "estimate":
        return estimate(worker)
    if options.cost_profile != "auto":
        return from_file(Path(options.cost_profile), options.chunk_tokens)
    name = device_name(worker.info)
    path = profile_path(worker, name)
    if path.exists():
        try:
            cost = from_file(path, worker.info.chunk_tokens)
        except CostProfileError as error:
            log.warning("replacing the stored cost profile, which cannot be used: %s", error)
        else:
            log.info("cost profile: %s", path)
            return cost
    if worker.info.device != "cuda":
        return estimate(worker)
    return _quick(options, worker, name, path)


def estimate(worker: ProbedWorker) -> CostModel:
    arch = worker.arch
    return CostModel.estimate(
        windows=[arch.layers[layer].window for layer in arch.attention_layers],
        query_heads=arch.num_heads,
        head_dim=arch.head_dim,
        parameters=arch.active_parameters,
        chunk_tokens=worker.info.chunk_tokens,
        context_limit=arch.context_limit,
    )


def from_file(path: Path, chunk_tokens: int) -> CostModel:
    """Read a profile, which must be measured with chunks of this size. Raises CostProfileError."""
    cost = CostModel.from_json(path)
    if cost.chunk_tokens != chunk_tokens:
        raise CostProfileError(
            f"{path} was measured with chunks of {cost.chunk_tokens} tokens, not {chunk_tokens}: profile again with "
            f"--chunk-tokens {chunk_tokens}"
        )
    return cost


def _quick(options: EngineOptions, worker: ProbedWorker, name: str, path: Path) -> CostModel:
    log.info("cost profile: none stored for this model on %s; measuring one for a few seconds", name)
    try:
        points = quick_points(worker)
    except ValueError as error:
        log.info("cost profile: estimated, because %s", error)
        return estimate(worker)
    profile = describe(worker, options.model, points, device_name=name, repeats=QUICK_REPEATS)
    try:
        write_profile(path, profile)
    except OSError as error:
        log.warning("the cost profile cannot be stored, so the next start will measure again: %s", error)
    else:
        log.info("cost profile: stored as %s; `pensieve profile` makes a finer one", path)
    return CostModel(tuple(profile["attention"]), profile["other_seconds"], worker.info.chunk_tokens)
