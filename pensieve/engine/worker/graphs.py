"""The programs of a worker: which one a step takes, and the CUDA graphs made of them.

A graph exists per *kind* of attention work and *bucket* of tokens; a step takes the smallest that holds it. Steps that
no graph was made for, and all steps when graphs are switched off, run a program of just their size without a graph:
such steps are so long that the host keeps ahead of the device anyway.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from pensieve.engine.worker.cuda_batch import CudaBatch
from pensieve.engine.worker.program import ALIGNMENT, Shared, Size, StepProgram
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.attention.kinds import Capacity, Geometry, StepKind, capacity_for, classify
from pensieve.kernels.attention.plan import DoesNotFit, words_of

log = logging.getLogger(__name__)

WIDE_ALONE_LIMIT = 512
"""Tokens up to which steps without any decode get a graph: longer ones keep the device busy without."""


def buckets(kind: StepKind, max_tokens: int, max_running: int) -> list[int]:
    """Tokens of the graphs of a kind, ascending."""
    if kind is StepKind.NARROW:
        return _rising(min(max_running, max_tokens), ((1, 2), (2, 4), (4, 8), (8, 256), (16, 1 << 30)))
    if kind in (
        StepKind.SHORT,
        StepKind.FEW,
    ):  # decodes beside turns of a few tokens: common on a busy server
        return _rising(min(max(2 * max_running, 512), max_tokens), ((8, 64), (16, 256), (32, 1 << 30)))
    if kind.is_mixed:
        return _rising(max_tokens, ((32, 512), (64, 1024), (128, 2048), (512, 1 << 30)))
    return _rising(min(max_tokens, WIDE_ALONE_LIMIT), ((32, 128), (64, 512)))


def _rising(most: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Sizes that rise by ``step`` up to ``until`` for each (step, until), the last one being ``most``."""
    sizes: list[int] = []
    size = 0
    for step, until in steps:
        while size < min(until, most):
            size = min(size + step, most)
            sizes.append(size)
    return sizes


class Programs:
    """All programs of a worker."""

    def __init__(self, shared: Shared, info: WorkerInfo, compute: torch.cuda.Stream, *, graphs: bool) -> None:
        self.shared = shared
        self._info = info
        self._compute = compute
        self._graphs = graphs
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        self._made: dict[tuple[StepKind, int], StepProgram] = {}
        self._buckets = {kind: buckets(kind, _most_tokens(info), info.max_running) for kind in StepKind}
        self._pages = most_pages(info)
        self.words = self._most_words()
        """int32 words that any step's upload can have."""

    @staticmethod
    def scratch_rows(info: WorkerInfo, geometry: Geometry) -> int:
        """Rows of the scratch that all programs share."""
        tokens = _most_tokens(info)
        return max(_capacity(kind, tokens, info, geometry).partial_rows for kind in StepKind)

    def pack(self, batch: CudaBatch, staging: npt.NDArray[np.int32]) -> tuple[StepProgram, int]:
        """The program for a step, and the words of the step as ``StepProgram.pack`` wrote them into ``staging``."""
        program = self._graph_for(batch)
        if program is not None:
            try:
                return program, program.pack(batch, staging)
            except DoesNotFit as error:
                # So many short spans of one request that the attention plan overflows.
                log.debug("step without a graph: %s", error)
        program = StepProgram(self.shared, self._exact(batch))
        return program, program.pack(batch, staging)

    def capture_all(self) -> None:
        """Make all graphs, the largest first so that the smaller ones fit into its memory."""
        if not self._graphs:
            return
        wanted = sorted(self._wanted(), key=lambda key: -key[1])
        console = Console(stderr=True)
        for kind, tokens in track(wanted, "capturing CUDA graphs", console=console, transient=True):
            self._program(kind, tokens)

    def close(self) -> None:
        """Give back graphs and their memory."""
        self._made.clear()

    def _wanted(self) -> Iterator[tuple[StepKind, int]]:
        for kind, sizes in self._buckets.items():
            yield from ((kind, size) for size in sizes)

    def _graph_for(self, batch: CudaBatch) -> StepProgram | None:
        if not self._graphs or batch.longest > self._info.context_limit:
            return None
        kind = classify(batch.spans, self.shared.geometry)
        sizes = self._buckets[kind]
        at = bisect.bisect_left(sizes, len(batch.tokens))
        return self._program(kind, sizes[at]) if at < len(sizes) else None

    def _program(self, kind: StepKind, tokens: int) -> StepProgram:
        if (kind, tokens) not in self._made:
            program = StepProgram(self.shared, self._size(kind, tokens))
            assert self._memory is not None
            program.capture(self._memory, self._compute)
            self._made[kind, tokens] = program
        return self._made[kind, tokens]

    def _size(self, kind: StepKind, tokens: int) -> Size:
        info = self._info
        capacity = _capacity(kind, tokens, info, self.shared.geometry)
        return Size(tokens, min(tokens, info.max_running), self._pages, kind, capacity)

    def _exact(self, batch: CudaBatch) -> Size:
        geometry, count = self.shared.geometry, len(batch.tokens)
        kind = classify(batch.spans, geometry)
        capacity = capacity_for(kind, count, len(batch.spans), batch.longest, geometry)
        return Size(count, max(1, len(batch.sample_rows)), len(batch.pages), kind, capacity)

    def _most_words(self) -> int:
        tokens = _most_tokens(self._info)
        plan = max(words_of(_capacity(kind, tokens, self._info, self.shared.geometry)) for kind in StepKind)
        return 5 * tokens + plan + self._pages + 7 * ALIGNMENT


def most_pages(info: WorkerInfo) -> int:
    """Page-table entries of a step at most: running requests have their pages to themselves, or nearly so."""
    return min(info.device_chunks, info.max_running * -(-info.context_limit // info.chunk_tokens))


def _most_tokens(info: WorkerInfo) -> int:
    """Tokens of a step at most: every running request decodes one even where the budget is smaller."""
    return max(info.max_batch_tokens, info.max_running)


def _capacity(kind: StepKind, tokens: int, info: WorkerInfo, geometry: Geometry) -> Capacity:
    # Few requests have more than two spans: a dropped range and the new turn.
    spans = min(tokens, 2 * info.max_running)
    return capacity_for(kind, tokens, spans, info.context_limit, geometry)
