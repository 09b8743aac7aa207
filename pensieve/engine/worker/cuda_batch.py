"""Batches of ``CudaWorker``: a plan's spans as the arrays that a step uploads. numpy only, no tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pensieve.core import Ints, RequestKey
from pensieve.engine.plan import Plan
from pensieve.engine.worker import spans as span_columns
from pensieve.engine.worker.spans import Ints32, SpanColumns
from pensieve.kernels.attention.prefixes import PrefixGroupRule

NO_SLOT = span_columns.NO_SLOT
"""Slot of a token whose keys and values are not stored."""


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """T concatenated tokens of S spans, over concatenated page tables. Spans of prefix groups come first,
    group by group; the others keep the plan's order."""

    tokens: Ints32
    """[T]; ``PENDING`` where ``source`` names the token."""
    source: Ints32
    """[T]: row of the token in the previous step's samples, or -1."""
    positions: Ints32
    """[T]"""
    slots: Ints32
    """[T]: slot of each token's keys and values in group 0, ``page * N + offset``, or ``NO_SLOT``."""
    spans: Ints
    """[S, 4]: first row of q, tokens, position, start of its page table in ``pages``."""
    pages: Ints32
    """All page tables, then all window tables."""
    sample_rows: Ints32
    """The tokens after which one is chosen, in the order of ``Plan.specs``."""
    max_context: int
    prefix_groups: Ints | None = None
    """[n, 3], see ``kernels.attention.prefixes``; None: every span reads all of its context."""
    window_slots: Ints32 | None = None
    """[T]: as ``slots``, in the window group; None: there is none."""
    window_spans: Ints | None = None
    """[S, 4]: ``spans`` with the starts of their window tables in ``pages``."""
    chains: Ints | None = None
    """See ``SpanColumns.chains``; None: the plan has none."""


def make_cuda_batch(
    plan: Plan, page_tokens: int, sampled: Mapping[RequestKey, int], rule: PrefixGroupRule | None = None
) -> CudaBatch:
    """Return the batch of a plan with at least one span. ``sampled``: row of each request in the previous
    step's samples. ``rule``: decides which spans form prefix groups; None: none do. Raises ValueError like
    ``SpanColumns.from_plan``."""
    columns = SpanColumns.from_plan(plan, page_tokens)
    place: Sequence[int] = range(len(plan.spans))
    host = _span_array(columns)
    # A chain's spans must stay together.
    movable = all(chain.first == chain.last for chain in plan.chains)
    found = rule.find(host, columns.pages) if rule is not None and movable else None
    if found is not None:
        place = np.argsort(found.order).tolist()
        ordered = replace(
            plan,
            spans=tuple(plan.spans[index] for index in found.order.tolist()),
            chains=tuple(
                msgspec.structs.replace(chain, first=place[chain.first], last=place[chain.last])
                for chain in plan.chains
            ),
        )
        columns = SpanColumns.from_plan(ordered, page_tokens)
        host = _span_array(columns)
    source = np.full(len(columns.tokens), -1, dtype=np.int32)
    requests = {at: span.request for at, span in zip(place, plan.spans, strict=True)}
    for row, at in columns.pending():
        source[row] = sampled[requests[at]]
    asked = [
        (at, span.num_chosen) for at, span in zip(place, plan.spans, strict=True) if span.sample is not None
    ]
    chosen = columns.chosen_rows([at for at, _ in asked], [count for _, count in asked])
    pages, window_spans = columns.pages, None
    if columns.window_pages is not None:
        window_spans = host + np.array([0, 0, 0, len(pages)])
        pages = np.concatenate([pages, columns.window_pages])
    return CudaBatch(
        tokens=columns.tokens,
        source=source,
        positions=columns.positions.astype(np.int32),
        slots=columns.slots.astype(np.int32),
        spans=host,
        pages=pages,
        sample_rows=chosen.astype(np.int32),
        max_context=int((columns.start + columns.length).max()),
        prefix_groups=found.table if found is not None else None,
        window_slots=None if columns.window_slots is None else columns.window_slots.astype(np.int32),
        window_spans=window_spans,
        chains=columns.chains if plan.chains else None,
    )


def _span_array(columns: SpanColumns) -> Ints:
    first_rows = columns.ends - columns.length
    return np.stack([first_rows, columns.length, columns.start, columns.first_page], axis=1)
