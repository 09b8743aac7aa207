"""Steps of a worker, made and timed for ``bench/engine.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import PENDING, Copy, PendingStep, Plan, SampleSpec, Span, StepResult
from pensieve.engine.worker.torch_worker import Worker
from pensieve.model.arch import DTYPE_BYTES
from pensieve.model.groups import layer_page_bytes

CHUNK = 32
GREEDY = SampleSpec(Sampling(ignore_eos=True), 0)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of steps in steady state."""

    wall: float
    """Median from one result to the next."""
    wall_p99: float
    device: float
    gap: float
    gap_p99: float


class Bench:
    """A worker and the pages that contexts get."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.arch = worker, worker.arch
        self.bytes_per_token = worker.info.groups[0].page_bytes // CHUNK
        self._steps = 0

    def step_bytes(self, batch: int, context: int) -> float:
        """Least bytes that a step of ``batch`` decodes moves: it reads all weights, of a mixture the experts that so
        many tokens pick by chance, and what each token sees of ``context`` keys and values; it reads and writes states.
        """
        arch, size = self.arch, DTYPE_BYTES[self.worker.info.dtype]
        weights = self.worker.info.weight_bytes / size if self.worker.info.fp8 else float(arch.num_parameters)
        if arch.experts is not None and arch.experts.count > arch.experts.per_token:
            count, picked = arch.experts.count, arch.experts.per_token
            expert = (arch.num_parameters - arch.active_parameters) / (count - picked)
            weights -= expert * count * (1 - picked / count) ** batch
        seen = sum(min(context, layer.window or context) for layer in arch.layers if layer.attends)
        states = 0
        for layer in arch.layers:
            if (state := layer.state) is not None:
                states += 4 * state.heads * state.key_dim * state.value_dim
                states += size * state.conv_channels * (state.conv_width - 1)
        info = self.worker.info
        of_layer = layer_page_bytes(arch, CHUNK, info.dtype, info.kv_dtype) / CHUNK
        return weights * size + batch * (seen * of_layer + 2 * states)

    def plan(self, spans: Sequence[Span], tables: Sequence[Any], **copies: tuple[Copy, ...]) -> Plan:
        self._steps += 1
        return Plan(self._steps, tuple(spans), tuple(tables), **copies)

    def steady(self, plans: Iterator[Plan], skip: int = 6) -> Timed:
        """Run plans with one launched ahead; times of all but the first ``skip``."""
        results: list[StepResult] = []
        times: list[float] = []
        pending = self.worker.launch(next(plans))
        for plan in plans:
            ahead = self.worker.launch(plan)
            results.append(pending.result())
            times.append(time.perf_counter())
            pending = ahead
        results.append(pending.result())
        times.append(time.perf_counter())
        walls = np.diff(times)[skip:]
        device = [result.timings["device"] for result in results[skip:]]
        gaps = [result.timings["gap"] for result in results[skip:]]
        return Timed(
            float(np.median(walls)), float(np.quantile(walls, 0.99)), statistics.median(device),
            statistics.median(gaps), float(np.quantile(gaps, 0.99)),
        )  # fmt: skip

    def decodes(
        self, batch: int, context: int, steps: int, swap_in: int = 0, swap_out: int = 0
    ) -> Iterator[Plan]:
        """Steps of ``batch`` generations from ``context`` tokens on; chunks that are copied beside each step."""
        pages = -(-(context + steps) // CHUNK)
        tables = [np.arange(row * pages, (row + 1) * pages, dtype=np.int32) for row in range(batch)]
        spare = batch * pages
        hosts = self.worker.info.host_chunks
        for step in range(steps):
            token = np.array([1 if step == 0 else PENDING], dtype=np.int32)
            spans = [Span(RequestKey(row + 1), context + step, token, row, GREEDY) for row in range(batch)]
            used = [table[: (context + step) // CHUNK + 1] for table in tables]
            into = tuple(Copy((step * swap_in + n) % (hosts // 2), spare + n) for n in range(swap_in))
            first = spare + swap_in
            out = tuple(
                Copy(first + n, hosts // 2 + (step * swap_out + n) % (hosts // 2)) for n in range(swap_out)
            )
            yield self.plan(spans, used, swap_in=into, swap_out=out)

    def turn(self, history: int, new: int, *, swapped: bool) -> float:
        """Seconds from launch to first token of a turn whose history is on the device, or on the host."""
        pages = np.arange(-(-(history + new) // CHUNK), dtype=np.int32)
        tokens = np.arange(new, dtype=np.int32) + 5
        copies = tuple(Copy(n, n) for n in range(history // CHUNK)) if swapped else ()
        plan = self.plan([Span(RequestKey(1), history, tokens, 0, GREEDY)], [pages], swap_in=copies)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.worker.launch(plan).result()
        return time.perf_counter() - started

    def recomputed(self, history: int, new: int, budget: int) -> float:
        """Seconds to the first token when all history is computed again, in steps of ``budget`` tokens."""
        total = history + new
        torch.cuda.synchronize()
        started = time.perf_counter()
        pending = None
        for start in range(0, total, budget):
            end = min(start + budget, total)
            table = np.arange(-(-end // CHUNK), dtype=np.int32)
            tokens = np.arange(start, end, dtype=np.int32) % 1000
            spec = GREEDY if end == total else None
            ahead = self.worker.launch(self.plan([Span(RequestKey(1), start, tokens, 0, spec)], [table]))
            if pending is not None:
                pending.result()
            pending = ahead
        assert pending is not None
        pending.result()
        return time.perf_counter() - started


@dataclass(slots=True)
class Recorder:
    """The worker, and what came of each of its steps."""

    worker: Worker
    steps: list[Recorded] = field(default_factory=list)
    left: float = 0.0

    def launch(self, plan: Plan) -> PendingStep:
        host = time.perf_counter() - self.left
        started = time.perf_counter()
        step = Recorded(self, plan.num_tokens, self.worker.launch(plan), host)
        step.host += time.perf_counter() - started
        self.steps.append(step)
        return step

    def close(self) -> None: ...


@dataclass(slots=True)
class Recorded:
    """One launched step; ``host``: seconds that Python took for it, waiting left out."""

    recorder: Recorder
    tokens: int
    step: PendingStep
    host: float
    timings: dict[str, float] = field(default_factory=dict)

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        started = time.perf_counter()
        self.step.choose(specs)
        self.host += time.perf_counter() - started

    def result(self) -> StepResult:
        result = self.step.result()
        self.timings = result.timings
        self.recorder.left = time.perf_counter()
        return result
