"""The programs of a worker, their CUDA graphs, and the choice of a program for a step.

There is one graph per *kind* of attention work and *bucket* of tokens; a step takes the smallest that holds
it. Steps without a fitting graph, and all steps when graphs are switched off, run a program of exactly their
size without a graph. Such steps are so long that the host stays ahead of the device anyway.
"""

from __future__ import annotations

import bisect
import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from pensieve.engine.worker.program import ALIGNMENT, CudaBatch, ProgramSize, SharedState, StepProgram
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.accepted import ENTRY
from pensieve.kernels.attention.capacity import Capacity, capacity_for
from pensieve.kernels.attention.group_lists import PREFIX_GROUP_KIND
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.plan import DoesNotFit, words_of
from pensieve.kernels.recurrence import ROWS
from pensieve.kernels.state_chunks import LONG

log = logging.getLogger(__name__)

WIDE_ALONE_LIMIT = 512
"""Steps without decodes get a graph up to this many tokens: longer ones keep the device busy without one."""
WIDE_ALONE_LIMIT_SHORT = 2048
"""The same for several ranks, where each has less work but as many launches, and for FP8 products. (On two H200s a
13B's step of 1,024 tokens took 45.6 ms without a graph, as long as one of 2,048. On one H100 with FP8 products it took
38.0 ms, and one of 2,048 took 52.8.)"""
GRAPH_PAGES = 1 << 18
"""Page-table entries of a graph (1 MiB of device memory), or the number of pages if that is larger. Larger
steps, whose requests share very long prefixes, run without a graph."""


def buckets(kind: StepKind, max_tokens: int, max_running: int, *, short: bool = False) -> list[int]:
    """Return the tokens of the graphs of a kind, ascending. ``short``: steps take the device less time than launching
    takes the host."""
    if kind is StepKind.NARROW:
        most = min(max_running, max_tokens)
        # With drafts, steps have more tokens than requests.
        drafted = _rising_sizes(min(most + most // 2, max_tokens), ((8, 256), (16, 1 << 30)))
        decodes = _rising_sizes(most, ((1, 2), (2, 4), (4, 8), (8, 256), (16, 1 << 30)))
        return decodes + [size for size in drafted if size > most]
    # Decodes beside turns of a few tokens: common on a busy server.
    if kind in (StepKind.SHORT, StepKind.FEW):
        return _rising_sizes(min(max(2 * max_running, 512), max_tokens), ((8, 64), (16, 256), (32, 1 << 30)))
    if kind.is_mixed:
        return _rising_sizes(max_tokens, ((32, 512), (64, 1024), (128, 2048), (512, 1 << 30)))
    limit = WIDE_ALONE_LIMIT_SHORT if short else WIDE_ALONE_LIMIT
    return _rising_sizes(min(max_tokens, limit), ((32, 128), (64, 512), (128, 1 << 30)))


def _rising_sizes(most: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Return sizes that rise by ``step`` up to ``until`` for each (step, until); the last one is ``most``."""
    sizes: list[int] = []
    size = 0
    for step, until in steps:
        while size < min(until, most):
            size = min(size + step, most)
            sizes.append(size)
    return sizes


INVARIANT_ROWS = 16
"""See ``least_rows``. Measured: on an H100 a row has the same bits in products of 16 to 8,192 rows."""


class Programs:
    """All programs of a worker: one per captured graph, and one per step that no graph holds."""

    def __init__(
        self, shared: SharedState, info: WorkerInfo, compute: torch.cuda.Stream, *, graphs: bool
    ) -> None:
        self.shared = shared
        self._info = info
        self._compute = compute
        self._graphs = graphs
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        self._made: dict[tuple[StepKind, int], StepProgram] = {}
        tokens = _max_tokens(info)
        short = info.ranks > 1 or info.fp8
        self._buckets = {
            kind: _not_below(least_rows(info), buckets(kind, tokens, info.max_running, short=short))
            for kind in StepKind
        }
        self._tables = 2 if shared.window_tables else 1
        self.words = self._max_words()
        """Most int32 words of a step's upload."""

    @staticmethod
    def scratch_rows(info: WorkerInfo, geometry: Geometry, windows: tuple[int | None, ...] = (None,)) -> int:
        """Return the partial rows that every plan of a worker fits into; ``windows``: see ``SharedState``."""
        tokens = _max_tokens(info)
        return max(
            capacity.partial_rows
            for kind in StepKind
            for either in {geometry, geometry.without_copies}
            for capacity in _capacities(kind, tokens, info, either, windows)
        )

    def pack(self, batch: CudaBatch, staging: npt.NDArray[np.int32]) -> tuple[StepProgram, int]:
        """Pack a step into ``staging``; return its program and the words written."""
        batches = [batch]
        if batch.prefix_groups is not None:
            # Without prefix groups a step takes more time and less room.
            batches.append(replace(batch, prefix_groups=None))
        for candidate in batches:
            # Graphs overflow only with unusually many short spans of one request, or prefix groups.
            try:
                program = self._graph_for(candidate) or (
                    None if self._graphs else self._without_graph(candidate)
                )
                if program is not None:
                    return program, program.pack(candidate, staging)
            except DoesNotFit as error:
                log.debug("step does not fit its graph: %s", error)
        try:
            program = self._without_graph(batches[-1])
            return program, program.pack(batches[-1], staging)
        except DoesNotFit as error:
            # Its wide spans see more coded pages than there is room for plain copies of.
            log.debug("step is attended without copies: %s", error)
        program = self._without_graph(batches[-1], self.shared.geometry.without_copies)
        return program, program.pack(batches[-1], staging)

    def capture_all(self) -> None:
        """Capture all graphs, the largest first so that the smaller ones reuse its memory."""
        if not self._graphs:
            return
        wanted = [(kind, size) for kind, sizes in self._buckets.items() for size in sizes]
        wanted.sort(key=lambda key: -key[1])
        console = Console(stderr=True)
        for kind, tokens in track(wanted, "capturing CUDA graphs", console=console, transient=True):
            self._program(kind, tokens)

    def close(self) -> None:
        self._made.clear()

    def _graph_for(self, batch: CudaBatch) -> StepProgram | None:
        if not self._graphs or batch.max_context > self._info.context_limit:
            return None
        if batch.chains is not None and int(batch.chains[:, ROWS].max()) >= LONG:
            return None  # long chains are computed by blocks, in launches that depend on them
        kind = _kind(batch, self.shared.geometry)
        if kind is StepKind.NARROW and len(batch.tokens) > self._buckets[kind][-1]:
            kind = classify(batch.spans, self.shared.geometry, narrow=False)
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

    def _size(self, kind: StepKind, tokens: int) -> ProgramSize:
        info = self._info
        capacities = _capacities(kind, tokens, info, self.shared.geometry, self.shared.windows)
        samples = min(tokens, most_samples(info))
        pages = min(max_pages(info, samples), max(GRAPH_PAGES, info.device_chunks)) * self._tables
        chains = _max_spans(tokens, info) if self.shared.states else 0
        drafts = self._max_drafts
        undecided = min(tokens, info.max_running) if drafts else 0
        return ProgramSize(tokens, samples, pages, kind, capacities, chains, undecided, drafts)

    def _without_graph(self, batch: CudaBatch, geometry: Geometry | None = None) -> StepProgram:
        """Return a program of exactly the batch's size, without a graph. ``geometry``: if not the shared one."""
        geometry, least = geometry or self.shared.geometry, least_rows(self._info)
        kind = _kind(batch, geometry)
        count = max(least, len(batch.tokens))
        capacities = tuple(
            capacity_for(kind, count, len(batch.spans), batch.max_context, replace(geometry, window=window))
            for window in self.shared.windows
        )
        samples = max(1, min(count, max(least, len(batch.sample_rows))))
        undecided, drafts = len(batch.undecided), len(batch.drafts)
        size = ProgramSize(
            count, samples, len(batch.pages), kind, capacities, undecided=undecided, drafts=drafts
        )
        return StepProgram(self.shared, size, geometry)

    @property
    def _max_drafts(self) -> int:
        """Most drafts of a step; a model with two KV groups has none."""
        return self._info.max_drafts if self.shared.windows == (None,) and not self.shared.states else 0

    def _max_words(self) -> int:
        info, tokens, shared = self._info, _max_tokens(self._info), self.shared
        plans = max(
            sum(map(words_of, _capacities(kind, tokens, info, geometry, shared.windows)))
            for kind in StepKind
            for geometry in {shared.geometry, shared.geometry.without_copies}
        )
        sections = 9 + self._tables + len(shared.windows)
        pages = self._tables * max_pages(info, info.max_running)
        chains = 6 * _max_spans(tokens, info) if shared.states else 0
        drafts = self._max_drafts
        undecided = ENTRY * info.max_running + drafts + tokens if drafts else 0
        return (4 + self._tables) * tokens + plans + chains + undecided + pages + sections * ALIGNMENT


def least_rows(info: WorkerInfo) -> int:
    """Return the fewest rows of a product. A library may choose another kernel, with another order of additions, for
    very few."""
    return INVARIANT_ROWS if info.is_invariant else 1


def most_samples(info: WorkerInfo) -> int:
    """Return the most rows of the head's product."""
    return max(least_rows(info), info.max_running + info.max_drafts)


def _not_below(least: int, sizes: list[int]) -> list[int]:
    return [size for size in sizes if size >= least] or [least]


def max_pages(info: WorkerInfo, requests: int) -> int:
    """Return the most page-table entries of a step of ``requests`` requests. It does not depend on the number
    of pages: a shared page is in the table of each request that shares it."""
    return requests * -(-info.context_limit // info.chunk_tokens)


def _kind(batch: CudaBatch, geometry: Geometry) -> StepKind:
    return classify(batch.spans, geometry) if batch.prefix_groups is None else PREFIX_GROUP_KIND


def _max_tokens(info: WorkerInfo) -> int:
    """Return the most tokens of a step: every running request decodes one, even where the budget is smaller."""
    return max(info.max_batch_tokens, least_rows(info), info.max_running)


def _capacities(
    kind: StepKind, tokens: int, info: WorkerInfo, geometry: Geometry, windows: tuple[int | None, ...]
) -> tuple[Capacity, ...]:
    """Return the capacities of a graph's plans, one per window."""
    spans = _max_spans(tokens, info)
    return tuple(
        capacity_for(kind, tokens, spans, info.context_limit, replace(geometry, window=window))
        for window in windows
    )


def _max_spans(tokens: int, info: WorkerInfo) -> int:
    """Return the most spans of a graph of that many tokens. Few requests have more than two: a dropped range and the
    new turn."""
    return min(tokens, 2 * info.max_running)
