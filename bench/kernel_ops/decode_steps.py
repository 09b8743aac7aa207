"""One decode step of a model with dummy weights, in several ways that take turns.

A way is a setting of torch's products, or a kernel that is left out. Each gets a program of its own, as the worker
makes them, captured in a CUDA graph; all share weights, pages and scratch. Without a GPU a program just runs, under
Triton's interpreter: for a smoke test.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker import program
from pensieve.engine.worker.program import CudaBatch, ProgramSize, SharedState, StepProgram, make_cuda_batch
from pensieve.kernels import ragged_paged_attention as attention_kernels
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import Capacity, capacity_for
from pensieve.kernels.attention.kinds import StepKind
from pensieve.kernels.attention.plan import geometry_of
from pensieve.kernels.attention.work_lists import make_work_lists
from pensieve.model.folder import load_arch
from pensieve.model.ops import triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import Linear, load_weights

CHUNK = 32


class LibraryRow(Transformer):
    """Products of one row are those of the library, like those of more rows."""

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight, linear.bias)


@contextlib.contextmanager
def library(name: str) -> Iterator[None]:
    """Products of any size by this library of torch's."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        # A program chooses by itself otherwise.
        with mock.patch.object(program, "preferred_blas", lambda tokens, device: contextlib.nullcontext()):
            yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def without_merge() -> AbstractContextManager[object]:
    """No launch that merges: wrong results, and the most that can be gained."""
    nothing = mock.MagicMock()
    return mock.patch.object(attention_kernels, "_merge", nothing)


@dataclass(frozen=True, slots=True)
class Way:
    setting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """In force while the graph is captured."""
    model: type[Transformer] = Transformer
    right: bool = True
    """Whether results are those of ``NOW``, up to rounding."""


NOW = "now"
PRODUCTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "cuBLAS": lambda: library("cublas"),
    "cuBLASLt": lambda: library("cublaslt"),
}
"""Settings of torch's products."""
WAYS = {
    NOW: Way(),
    "no merge (wrong)": Way(without_merge, right=False),
    **{name: Way(setting) for name, setting in PRODUCTS.items()},
    "torch's row": Way(model=LibraryRow),
}


def other_size(batch: int) -> int:
    """A batch of another size, for whose rows products are done another way."""
    return max(batch // 2, 1) if batch > 1 else 2


class Steps:
    """A model, its pages, and the steps of one context length that are timed on it."""

    def __init__(
        self, folder: Path, device: str, dtype: torch.dtype, context: int, batches: tuple[int, ...]
    ) -> None:
        """``batches``: requests of the steps that there will be."""
        self.arch = load_arch(folder)
        self.device, self.context = torch.device(device), context
        weights = load_weights(folder, self.arch, dtype=dtype, device=device, load_format="dummy")
        self.layers = weights.layers
        self._weights = weights
        arch, most = self.arch, max(*batches, 2)
        self.pages = most * -(-context // CHUNK)
        shape = (arch.num_layers, self.pages, 2, arch.num_kv_heads, CHUNK, arch.head_dim)
        self._pool = torch.empty(shape, dtype=dtype, device=device)
        for layer in self._pool:
            layer.normal_()
        heads = arch.num_heads + 2 * arch.num_kv_heads
        qkv = torch.empty(1, heads, arch.head_dim, dtype=dtype, device=device)
        self.geometry = geometry_of(qkv[:, : arch.num_heads], self._pool[0])
        rows = max(self._capacity(size).partial_rows for size in (*batches, *map(other_size, batches)))
        self.scratch = Scratch(rows, self.geometry, self.device)
        self._stream = torch.cuda.Stream() if self.on_gpu else None
        self._memory = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._kept = (
            torch.zeros(most, dtype=torch.int64, device=device),
            torch.zeros(most, arch.vocab_size, device=device),
            torch.ones(most, dtype=torch.bool, device=device),
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def least_bytes(self, batch: int) -> int:
        """All weights and all KV of a step, as ``bench/engine.py`` counts them."""
        arch = self.arch
        per_token = 2 * arch.num_kv_heads * arch.head_dim * arch.num_layers
        return (arch.num_parameters + per_token * batch * self.context) * self._pool.element_size()

    def batch(self, size: int) -> CudaBatch:
        """Decodes at the end of contexts of their own."""
        pages = -(-self.context // CHUNK)
        spec, token = SampleSpec(Sampling(), 0), np.array([1], np.int32)
        spans = tuple(Span(RequestKey(row), self.context - 1, token, row, spec) for row in range(size))
        tables = tuple(np.arange(row * pages, (row + 1) * pages, dtype=np.int32) for row in range(size))
        return make_cuda_batch(Plan(1, spans, tables), CHUNK, {})

    def made(self, way: Way, size: int) -> Callable[[], None]:
        """What runs the step of ``size`` decodes that way."""
        batch = self.batch(size)
        sampled, logits, finite = self._kept
        shared = SharedState(
            model=way.model(self.arch, self._weights, triton_ops()), pool=self._pool, wait=lambda layer: None,
            sampled=sampled, logits=logits, finite=finite, scratch=self.scratch, geometry=self.geometry,
            page_tokens=CHUNK,
        )  # fmt: skip
        program = StepProgram(
            shared, ProgramSize(size, size, len(batch.pages), StepKind.NARROW, (self._capacity(size),))
        )
        staging = torch.zeros(program.words, dtype=torch.int32, pin_memory=self.on_gpu)
        words = program.pack(batch, staging.numpy())
        with way.setting():
            if self._stream is not None:
                program.capture(self._memory, self._stream)
            program.upload(staging, words)
            program.run()
        self.finish()

        def run() -> None:
            if self.on_gpu:
                program.run()
            else:
                with way.setting():
                    program.run()

        return run

    def _capacity(self, tokens: int) -> Capacity:
        """As the worker's graphs have it: for contexts of any length."""
        return capacity_for(StepKind.NARROW, tokens, tokens, self.arch.context_limit, self.geometry)

    def merges(self, size: int) -> int:
        """Rows that the pieces of a step are merged for, for each KV head."""
        geometry = self.geometry
        work = make_work_lists(self.batch(size).spans, size, geometry, StepKind.NARROW)
        return len(work.merges)

    def finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def answers(self, run: Callable[[], None], size: int) -> torch.Tensor:
        """Logits of a step, float32 [size, vocab]."""
        run()
        self.finish()
        return self._kept[1][:size].clone()

    def timed(self, ways: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, float]:
        """Median milliseconds of a step each way, over rounds of so many steps in which the ways take turns."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, run in ways.items():
                spent = self._spent(run, steps)
                if turn:
                    taken[name].append(spent)
        return {name: median(values) for name, values in taken.items()}

    def _spent(self, run: Callable[[], None], steps: int) -> float:
        if not self.on_gpu:
            started = time.perf_counter()
            for _ in range(steps):
                run()
            return (time.perf_counter() - started) * 1e3 / steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / steps
