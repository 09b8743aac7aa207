"""The programs of a worker: which one a step takes, and the CUDA graphs made of them.

A graph exists per *kind* of attention work and *bucket* of tokens; a step takes the smallest that holds it. Steps that
no graph was made for, and all steps when graphs are switched off, run a program of just their size without a graph:
such steps are so long that the host keeps ahead of the device anyway.

Which buckets there are is measured: a size whose step takes as long as that of a larger one has no graph (``buckets``).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from pensieve.engine.worker.buckets import MEASURED_TOKENS, buckets, in_words, worth_having
from pensieve.engine.worker.cuda_batch import CudaBatch
from pensieve.engine.worker.program import ALIGNMENT, Shared, Size, StepProgram
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.attention.kinds import Capacity, Geometry, StepKind, capacity_for, classify
from pensieve.kernels.attention.plan import PARTY_KIND, DoesNotFit, words_of

log = logging.getLogger(__name__)

GRAPH_PAGES = 1 << 18
"""A graph has room for so many page-table entries, or as many as there are pages: 1 MiB of device memory. Steps of
more, whose requests share very long beginnings, run without a graph."""


_Item = TypeVar("_Item")


class Programs:
    """All programs of a worker: one for each graph that was captured, and one for each step that no graph holds."""

    def __init__(self, shared: Shared, info: WorkerInfo, compute: torch.cuda.Stream, *, graphs: bool) -> None:
        self.shared = shared
        self._info = info
        self._compute = compute
        self._graphs = graphs
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        self._made: dict[tuple[StepKind, int], StepProgram] = {}
        tokens = _most_tokens(info)
        self._buckets = {kind: buckets(kind, tokens, info.max_running, info.ranks) for kind in StepKind}
        self.words = self._most_words()
        """int32 words that any step's upload can have."""

    @staticmethod
    def scratch_rows(info: WorkerInfo, geometry: Geometry) -> int:
        """Rows of the scratch that all programs share."""
        tokens = _most_tokens(info)
        return max(_capacity(kind, tokens, info, geometry).partial_rows for kind in StepKind)

    def pack(self, batch: CudaBatch, staging: npt.NDArray[np.int32]) -> tuple[StepProgram, int]:
        """The program that takes a step, and how many words ``StepProgram.pack`` wrote into ``staging`` for it."""
        ways = [batch]
        if batch.parties is not None:
            # Every span for itself takes more time and less room.
            ways.append(replace(batch, parties=None))
        for way in ways:
            # Graphs overflow by so many short spans of one request, or by so many parties, that few steps have them.
            try:
                program = self._graph_for(way) or (None if self._graphs else self._alone(way))
                if program is not None:
                    return program, program.pack(way, staging)
            except DoesNotFit as error:
                log.debug("step for which another way must be found: %s", error)
        program = self._alone(ways[-1])
        return program, program.pack(ways[-1], staging)

    def capture_all(self) -> None:
        """Capture all graphs, the largest first so that the smaller ones fit into its memory; those up to
        ``MEASURED_TOKENS`` only after it was seen which are worth having."""
        if not self._graphs:
            return
        self._capture((kind, size) for kind, size in self._wanted() if size > MEASURED_TOKENS)
        self._leave_out_slow_sizes()
        self._capture(self._wanted())

    def _capture(self, wanted: Iterable[tuple[StepKind, int]]) -> None:
        missing = sorted((key for key in wanted if key not in self._made), key=lambda key: -key[1])
        for kind, tokens in _shown(missing, "capturing CUDA graphs"):
            self._program(kind, tokens)

    def _leave_out_slow_sizes(self) -> None:
        """Keep of the buckets up to ``MEASURED_TOKENS`` those that are faster than all larger ones, and the last of
        each kind. All ranks come to the same, by the least that each size took on any."""
        sizes = {size for _, size in self._wanted() if size <= MEASURED_TOKENS}
        ordered, taken = sorted(sizes, reverse=True), list[int]()
        for size in _shown(ordered, "timing steps by their size"):
            taken.append(self._program(StepKind.NARROW, size).microseconds(self._compute))
        kept = worth_having(dict(zip(ordered, self.shared.model.together.least(taken), strict=True)))
        for kind, found in self._buckets.items():
            self._buckets[kind] = [
                size for size in found if size > MEASURED_TOKENS or size in kept or size == found[-1]
            ]
        log.info("CUDA graphs: %s", in_words(ordered, kept))
        wanted = set(self._wanted())
        self._made = {key: program for key, program in self._made.items() if key in wanted}

    def close(self) -> None:
        """Release the graphs and their memory."""
        self._made.clear()

    def _wanted(self) -> Iterator[tuple[StepKind, int]]:
        for kind, sizes in self._buckets.items():
            yield from ((kind, size) for size in sizes)

    def _graph_for(self, batch: CudaBatch) -> StepProgram | None:
        if not self._graphs or batch.longest > self._info.context_limit:
            return None
        kind = self._kind(batch)
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
        samples = min(tokens, info.max_running)
        pages = min(most_pages(info, samples), max(GRAPH_PAGES, info.device_chunks))
        return Size(tokens, samples, pages, kind, capacity)

    def _kind(self, batch: CudaBatch) -> StepKind:
        return classify(batch.spans, self.shared.geometry) if batch.parties is None else PARTY_KIND

    def _alone(self, batch: CudaBatch) -> StepProgram:
        """A program without a graph, of just the size of a step."""
        kind, count = self._kind(batch), len(batch.tokens)
        capacity = capacity_for(kind, count, len(batch.spans), batch.longest, self.shared.geometry)
        size = Size(count, max(1, len(batch.sample_rows)), len(batch.pages), kind, capacity)
        return StepProgram(self.shared, size)

    def _most_words(self) -> int:
        info, tokens = self._info, _most_tokens(self._info)
        plan = max(words_of(_capacity(kind, tokens, info, self.shared.geometry)) for kind in StepKind)
        return 5 * tokens + plan + most_pages(info, info.max_running) + 7 * ALIGNMENT


def _shown(items: Sequence[_Item], what: str) -> Iterable[_Item]:
    """With a bar on stderr."""
    return track(items, what, console=Console(stderr=True), transient=True)


def most_pages(info: WorkerInfo, requests: int) -> int:
    """The most page-table entries of a step of so many requests. It does not matter how many pages there are: a page
    that is shared is in the table of each request that shares it."""
    return requests * -(-info.context_limit // info.chunk_tokens)


def _most_tokens(info: WorkerInfo) -> int:
    """The most tokens of a step: every running request decodes one, even where the budget is smaller."""
    return max(info.max_batch_tokens, info.max_running)


def _capacity(kind: StepKind, tokens: int, info: WorkerInfo, geometry: Geometry) -> Capacity:
    # Few requests have more than two spans: a dropped range and the new turn.
    spans = min(tokens, 2 * info.max_running)
    return capacity_for(kind, tokens, spans, info.context_limit, geometry)
