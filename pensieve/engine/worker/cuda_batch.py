"""What ``CudaWorker`` runs a plan on: its spans as the arrays that a step uploads. numpy only, no tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pensieve.core import Ints, RequestKey
from pensieve.engine.plan import Plan, SampleSpec
from pensieve.engine.worker.spans import Ints32, SpanColumns

NO_SLOT = -1
"""Where the keys and values of a padding token go."""


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """T concatenated tokens of S spans, over page tables that lie one behind the other."""

    tokens: Ints32
    """[T]; ``PENDING`` where ``source`` says what to take."""
    source: Ints32
    """[T]: row of the step before's samples that is this token, or -1."""
    positions: Ints32
    """[T]"""
    slots: Ints32
    """[T]: where each token's keys and values go, ``page * N + offset``."""
    spans: Ints
    """[S, 4]: first row of q, tokens, position, where its page table begins in ``pages``."""
    pages: Ints32
    sample_rows: Ints32
    """Last token of each span that is sampled, in the plan's order."""
    requests: tuple[RequestKey, ...]
    """Whose samples they are."""
    specs: tuple[SampleSpec, ...]
    longest: int
    """Most tokens that a query sees."""


def make_cuda_batch(plan: Plan, page_tokens: int, sampled: Mapping[RequestKey, int]) -> CudaBatch:
    """The batch of a plan with at least one span; ``sampled``: row of each request in the samples of the step before.

    Raises ValueError when a span is empty or reaches past its page table.
    """
    columns = SpanColumns.of(plan, page_tokens)
    source = np.full(len(columns.tokens), -1, dtype=np.int32)
    for index in columns.pending():
        source[columns.ends[index] - 1] = sampled[plan.spans[index].request]
    asked = [
        (index, span.request, span.sample) for index, span in enumerate(plan.spans) if span.sample is not None
    ]
    first_rows = columns.ends - columns.length
    return CudaBatch(
        tokens=columns.tokens,
        source=source,
        positions=columns.positions.astype(np.int32),
        slots=columns.slots.astype(np.int32),
        spans=np.stack([first_rows, columns.length, columns.start, columns.first_page], axis=1),
        pages=columns.pages,
        sample_rows=(columns.ends[[index for index, _, _ in asked]] - 1).astype(np.int32),
        requests=tuple(request for _, request, _ in asked),
        specs=tuple(spec for _, _, spec in asked),
        longest=int((columns.start + columns.length).max()),
    )
