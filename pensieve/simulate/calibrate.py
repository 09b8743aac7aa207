"""Fits the step-time formula of a ``Machine`` to timed steps: ``pensieve profile --machine FILE``.

The real engine and scheduler run made-up sessions of two turns each: prefills of several lengths, decodes of
several batch sizes and contexts, and short second turns on long histories. The formula is linear except for
the floor ``weights_s``. For every number of tokens at which the floor may end, a non-negative least squares
fit of the relative errors is solved; the best of these fits is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Floats, RequestKey, Sampling, pack_tokens
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.cost_profiles import HybridPages
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady, Evict, Failed, Output, Submit
from pensieve.engine.plan import Copy, PendingStep, Plan, SampleSpec, Span, StepResult, StepWorker
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.worker.hybrid_sizing import cache_groups
from pensieve.simulate.scenario.machine import Machine, MachineGroup, Work

if TYPE_CHECKING:  # importing it loads torch
    from pensieve.engine.worker.sizing import WorkerInfo
    from pensieve.engine.worker.torch_worker import Worker

REPEATS = 3
ANSWER_TOKENS = 8
NEW_TOKENS = 24
SWAP_PAGES = (128, 256)
"""Two copy sizes, both slower than the step beside them. Their difference gives the copy rate."""
Clock = Callable[[], float]
_TERMS = ("weights_s", "token_s", "kv_s", "pair_s", "row_s", "fixed_s")


@dataclass(frozen=True, slots=True)
class Sample:
    work: Work
    seconds: float


@dataclass(slots=True)
class _TimedWorker:
    worker: StepWorker
    machine: Machine
    clock: Clock
    works: list[Work] = field(default_factory=list)
    end_times: list[float] = field(default_factory=list)

    def launch(self, plan: Plan) -> PendingStep:
        if plan.spans:
            self.works.append(self.machine.work_of(plan))
        return _TimedStep(self, self.worker.launch(plan), bool(plan.spans))

    def close(self) -> None:
        """Do nothing: the caller owns the worker."""


@dataclass(frozen=True, slots=True)
class _TimedStep:
    timed: _TimedWorker
    step: PendingStep
    is_timed: bool

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.step.choose(specs)

    def result(self) -> StepResult:
        result = self.step.result()
        if self.is_timed:
            self.timed.end_times.append(self.timed.clock())
        return result


class Calibrator:
    """Runs designs, pairs of (batch, context tokens), through an engine around a worker."""

    def __init__(self, worker: Worker, machine: Machine, clock: Clock = time.perf_counter) -> None:
        """``machine``: with the KV groups of the worker's model."""
        self._worker, self._clock = worker, clock
        self._info = info = worker.info
        self._timed = _TimedWorker(worker, machine, clock)
        size = info.chunk_tokens
        cost = CostModel(((0, 0.0), (info.context_limit, 1.0)), 1.0, size)
        config = CacheConfig(info.device_chunks, 0, size, swap_watermark=0.0)
        if len(info.groups) > 1:
            config = dataclasses.replace(
                config,
                groups=cache_groups(info.groups, info.device_tier),
                device_bytes=info.device_tier.num_bytes,
                host_bytes=0,
            )
        cache = CacheManager(config, cost)
        limits = SchedulerConfig(
            context_limit=info.context_limit,
            max_batch_tokens=info.max_batch_tokens,
            max_running=info.max_running,
        )
        scheduler = Scheduler(limits, cache)
        ready = EngineReady(
            scheduler.context_limit, worker.arch.vocab_size, info.device, info.dtype, 0, 0, size
        )
        self._engine = Engine(scheduler, self._timed, ready, clock, overlapped=info.device == "cuda")
        self._requests = 0

    def designs(self, longest: int) -> Iterator[tuple[int, int]]:
        """Yield the designs that fit: contexts up to ``longest`` tokens, prefilled in at most 16 steps."""
        info = self._info
        room = 0.8 * min(info.device_chunks * info.chunk_tokens, 16 * info.max_batch_tokens)
        longest = min(longest, info.context_limit - 4 * NEW_TOKENS)
        for batch in (1, 4, 16, 64, 192):
            for context in (16, 64, 256, 1024, 4096, 16384):
                if (
                    batch <= info.max_running
                    and context <= longest
                    and batch * (context + 2 * NEW_TOKENS) <= room
                ):
                    yield batch, context

    def samples(self, batch: int, context: int) -> list[Sample]:
        """Return the steps of one design, with median times over the passes.

        Consecutive steps of the same shape are merged into one sample.
        """
        passes = [self._pass(batch, context) for _ in range(1 + REPEATS)][1:]
        steps = [
            Sample(same[0].work, statistics.median(step.seconds for step in same))
            for same in zip(*passes, strict=True)
        ]
        shapes = itertools.groupby(steps, lambda step: (step.work.tokens, step.work.rows, step.work.pairs))
        return [_median_sample(list(group)) for _, group in shapes]

    def swap_bytes_per_s(self) -> float | None:
        """Rate of host-to-device copies that a step waits for, all ranks together.

        None if there is no host tier, or if the larger copy took no longer than the smaller one.
        """
        plan, copies, page_bytes = self._copies()
        few, many = (min(pages, len(copies)) for pages in SWAP_PAGES)
        if many <= few:
            few = many // 2
        if many <= few:
            return None
        seconds = {
            pages: min(self._swap(plan, copies[:pages]) for _ in range(1 + 2 * REPEATS))
            for pages in (few, many)
        }
        taken = seconds[many] - seconds[few]
        return (many - few) * page_bytes * self._info.ranks / taken if taken > 0 else None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _pass(self, batch: int, context: int) -> list[Sample]:
        rng = np.random.default_rng(context)
        vocabulary = self._worker.arch.vocab_size
        contexts = [rng.integers(0, vocabulary, context, dtype=np.int32) for _ in range(batch)]
        first = self._turn(contexts, context)
        for row, answer in enumerate(first.answers):
            new = rng.integers(0, vocabulary, NEW_TOKENS, dtype=np.int32)
            contexts[row] = np.concatenate([contexts[row], np.array(answer, np.int32), new])
        second = self._turn(contexts, NEW_TOKENS)
        self._engine.handle(Evict(0, ""))
        return [*first.samples, *second.samples]

    def _turn(self, contexts: Sequence[npt.NDArray[np.int32]], new: int) -> _TimedTurn:
        self._timed.works, self._timed.end_times = [], []
        base = self._requests
        self._requests += len(contexts)
        sampling = Sampling(max_output_tokens=ANSWER_TOKENS, ignore_eos=True)
        for row, context in enumerate(contexts):
            self._engine.handle(Submit(base + row + 1, str(row), pack_tokens(context), new, sampling))
        answers: list[list[int]] = [[] for _ in contexts]
        began = self._clock()
        while self._engine.has_work:
            for event in self._engine.step():
                match event:
                    case Output(key, tokens, _):
                        answers[key - base - 1].extend(tokens)
                    case Failed(_, reason, message):
                        raise ValueError(f"a timed step failed: {reason}: {message}")
        times = np.diff([began, *self._timed.end_times]).tolist()
        return _TimedTurn(answers, [Sample(*pair) for pair in zip(self._timed.works, times, strict=True)])

    def _copies(self) -> tuple[Plan, tuple[Copy, ...], int]:
        """Return the plan of a one-token step, copies beside it, as many as both tiers have pages for, and the bytes of
        one, of one rank."""
        info, most = self._info, max(SWAP_PAGES)
        span = Span(RequestKey(1), 0, np.zeros(1, np.int32), 0, SampleSpec(Sampling(), 0))
        if len(info.groups) < 2:
            count = min(most, info.host_chunks, info.device_chunks - 1)
            plan = Plan(1, (span,), (np.zeros(1, np.int32),))
            return plan, tuple(Copy(page, page) for page in range(count)), info.groups[0].page_bytes
        group = 0 if info.groups[0].layers else 1
        device = HybridPages(info.groups, info.device_tier, info.chunk_tokens)
        plan = device.plan(1, span)
        host = HybridPages(info.groups, info.host_tier, info.chunk_tokens)
        pairs = zip(host.take(group, most), device.take(group, most), strict=False)
        copies = tuple(Copy(source, target, group) for source, target in pairs)
        return plan, copies, info.groups[group].page_bytes

    def _swap(self, plan: Plan, copies: tuple[Copy, ...]) -> float:
        """Seconds of the step when it waits for these copies."""
        began = self._clock()
        self._worker.launch(dataclasses.replace(plan, swap_in=copies)).result()
        return self._clock() - began


@dataclass(frozen=True, slots=True)
class _TimedTurn:
    answers: list[list[int]]
    samples: list[Sample]


def _median_sample(group: Sequence[Sample]) -> Sample:
    works = [sample.work for sample in group]
    kv_read = statistics.fmean(work.kv_read for work in works)
    work = Work(works[0].tokens, works[0].rows, kv_read, works[0].pairs)
    return Sample(work, statistics.median(sample.seconds for sample in group))


# -- the fit ---------------------------------------------------------------------------------------------------------


def fit(machine: Machine, samples: Sequence[Sample]) -> Machine:
    """Return ``machine`` with terms fitted to ``samples``, and the errors of the fit.

    Raises ValueError when steps of more tokens took no longer.
    """
    candidates = list(_candidates(machine, samples))
    if not candidates:
        raise ValueError("steps of more tokens took no longer: try longer contexts, or an idle machine")
    best = min(candidates, key=lambda found: float(np.mean(relative_errors(found, samples) ** 2)))
    wrong = np.abs(relative_errors(best, samples))
    return msgspec.structs.replace(best, mean_error=float(wrong.mean()), worst_error=float(wrong.max()))


def relative_errors(machine: Machine, samples: Sequence[Sample]) -> Floats:
    expected = [
        machine.step_seconds(tokens=work.tokens, rows=work.rows, kv_read=work.kv_read, pairs=work.pairs)
        for work in (sample.work for sample in samples)
    ]
    return np.array(expected) / [sample.seconds for sample in samples] - 1


def _candidates(machine: Machine, samples: Sequence[Sample]) -> Iterator[Machine]:
    """Yield the best fit for each number of tokens at which the floor may end."""
    works = [sample.work for sample in samples]
    tokens = np.array([work.tokens for work in works], dtype=np.float64)
    others = np.array([[work.kv_read, work.pairs, work.rows, 1.0] for work in works])
    seconds = np.array([sample.seconds for sample in samples])
    for last in (0.0, *np.unique(tokens)[:-1]):
        floor = tokens <= last
        columns = np.column_stack([floor, np.where(floor, 0.0, tokens), others]) / seconds[:, None]
        terms = dict(zip(_TERMS, _solve_non_negative(columns), strict=True))
        if terms["token_s"] > 0:
            yield msgspec.structs.replace(machine, **terms)


def _solve_non_negative(columns: Floats) -> list[float]:
    """Solve ``min |columns x - 1|`` for non-negative x, trying every subset of the few terms."""
    count = columns.shape[1]
    best, least = [0.0] * count, np.inf
    for used in itertools.product((False, True), repeat=count):
        found = np.zeros(count)
        found[list(used)] = np.linalg.lstsq(columns[:, list(used)], np.ones(len(columns)), rcond=None)[0]
        residual = float(np.sum((columns @ found - 1) ** 2))
        if found.min() >= 0 and residual < least:
            best, least = found.tolist(), residual
    return best


def calibrate_machine(
    worker: Worker, name: str, longest: int, progress: Callable[[str], None], clock: Clock = time.perf_counter
) -> Machine:
    """Measure the machine that ``worker`` runs on, with contexts of up to ``longest`` tokens. Raises ValueError when
    nothing can be fitted."""
    info, arch = worker.info, worker.arch
    overlapped = info.device == "cuda"
    machine = Machine(
        name=name,
        kv_bytes=max(1, info.groups[0].page_bytes // info.chunk_tokens * info.ranks),
        groups=machine_groups(info),
        layers=arch.num_layers if overlapped else 1,
        overlapped=overlapped,
    )
    runs = Calibrator(worker, machine, clock)
    samples: list[Sample] = []
    for batch, context in runs.designs(longest):
        samples += runs.samples(batch, context)
        progress(f"{batch} x {context} tokens")
    rate = runs.swap_bytes_per_s() or machine.swap_bytes_per_s
    return fit(msgspec.structs.replace(machine, swap_bytes_per_s=rate), samples)


def machine_groups(info: WorkerInfo) -> tuple[MachineGroup, ...]:
    """Return a model's KV groups for ``Machine.groups``."""
    if len(info.groups) < 2:
        return ()
    return tuple(
        MachineGroup(
            kind=group.kind,
            layers=len(group.layers),
            layer_bytes=group.layer_page_bytes
            * info.ranks
            // (1 if group.kind == "state" else info.chunk_tokens),
            window=group.window or 0,
        )
        for group in info.groups
    )
