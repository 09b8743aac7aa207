"""A plan's spans as the arrays that a GPU step uploads. numpy only: no tensor is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.core import RequestKey
from pensieve.engine.plan import PENDING, Plan, SampleSpec

Ints32 = npt.NDArray[np.int32]

NO_SLOT = -1
"""Where the keys and values of a padding token go."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T concatenated tokens of S spans, over page tables that lie one behind the other."""

    tokens: Ints32
    """[T]; ``PENDING`` where ``source`` says what to take."""
    source: Ints32
    """[T]: row of the step before's samples that is this token, or -1."""
    positions: Ints32
    """[T]"""
    slots: Ints32
    """[T]: where each token's keys and values go, ``page * N + offset``."""
    spans: npt.NDArray[np.int64]
    """[S, 4]: first row of q, tokens, position, where its page table begins in ``pages``."""
    pages: Ints32
    sample_rows: Ints32
    """Last token of each span that is sampled, in the plan's order."""
    requests: tuple[RequestKey, ...]
    """Whose samples they are."""
    specs: tuple[SampleSpec, ...]
    longest: int
    """Most tokens that a query sees."""


def make_host_batch(plan: Plan, page_tokens: int, sampled: Mapping[RequestKey, int]) -> HostBatch:
    """The batch of a plan with at least one span; ``sampled``: row of each request in the samples of the step before.

    Raises ValueError when a span is empty or reaches past its page table.
    """
    spans = plan.spans
    length = np.array([len(span.tokens) for span in spans], dtype=np.int64)
    start = np.array([span.start for span in spans], dtype=np.int64)
    table = np.array([span.page_table for span in spans], dtype=np.int64)
    pages_of = np.array([len(pages) for pages in plan.page_tables], dtype=np.int64)
    if (length < 1).any() or (start + length > pages_of[table] * page_tokens).any():
        raise ValueError(f"step {plan.step}: a span is empty or reaches past its page table")
    begins = (np.cumsum(pages_of) - pages_of)[table]
    ends = np.cumsum(length)
    pages = np.concatenate(plan.page_tables)
    tokens = np.concatenate([span.tokens for span in spans])
    positions = np.arange(ends[-1]) + np.repeat(start - (ends - length), length)
    page = pages[np.repeat(begins, length) + positions // page_tokens].astype(np.int64)
    source = np.full(len(tokens), -1, dtype=np.int32)
    for index in np.flatnonzero(tokens[ends - 1] == PENDING):
        source[ends[index] - 1] = sampled[spans[index].request]
    asked = [
        (index, span.request, span.sample) for index, span in enumerate(spans) if span.sample is not None
    ]
    return HostBatch(
        tokens=tokens,
        source=source,
        positions=positions.astype(np.int32),
        slots=(page * page_tokens + positions % page_tokens).astype(np.int32),
        spans=np.stack([ends - length, length, start, begins], axis=1),
        pages=pages,
        sample_rows=(ends[[index for index, _, _ in asked]] - 1).astype(np.int32),
        requests=tuple(request for _, request, _ in asked),
        specs=tuple(spec for _, _, spec in asked),
        longest=int((start + length).max()),
    )
