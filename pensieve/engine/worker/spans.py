"""A plan's spans as checked arrays, from which both workers make their batches. numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pensieve.core import Ints, TokenArray
from pensieve.engine.plan import NO_PAGE, PENDING, Chain, Plan

Ints32 = npt.NDArray[np.int32]
NO_SLOT = -1
"""Slot of a token whose keys and values are not stored: it is padding, or its KV group holds them already."""
NO_CHAINS: Final = np.empty((0, 6), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """S spans with T tokens in all, over concatenated page tables. Arrays without a shape are [S]."""

    length: Ints
    start: Ints
    """Position of the span's first token in its context; of an undecided one, the least."""
    undecided: Ints
    """How many positions later it may start."""
    table: Ints
    """Row of ``Plan.page_tables``."""
    first_page: Ints
    """Start of that page table in ``pages``."""
    ends: Ints
    """End of the span's tokens among all tokens; they start ``length`` before."""
    pages: Ints32
    """All page tables of the plan, concatenated."""
    tokens: TokenArray
    """[T]"""
    positions: Ints
    """[T]"""
    slots: Ints
    """[T]: slot of each token's keys and values in group 0, ``page * N + offset``, or ``NO_SLOT``."""
    window_pages: Ints32 | None
    """All window tables of the plan, concatenated; each begins and ends where its page table does. None: the plan has
    none."""
    window_slots: Ints | None
    """[T]: as ``slots``, in the window group."""
    chains: Ints
    """[C, 6]: the plan's chains, as ``kernels.recurrence`` describes them: first row, rows, page that is read, page
    of the boundary, rows before the boundary, live page."""

    @classmethod
    def from_plan(cls, plan: Plan, page_tokens: int) -> SpanColumns:
        """Return the columns of a plan with at least one span. Raises ValueError when a span is empty or reaches past
        its page table, a window table is not as long as its page table, or a chain does not follow its spans."""
        rows = [
            (len(span.tokens), span.start, span.page_table, span.latest_end - span.end) for span in plan.spans
        ]
        length, start, table, undecided = np.array(rows, dtype=np.int64).T
        pages_of = np.array([len(pages) for pages in plan.page_tables], dtype=np.int64)
        if (length < 1).any() or (start + length + undecided > pages_of[table] * page_tokens).any():
            raise ValueError(f"step {plan.step}: a span is empty or reaches past its page table")
        first_page = (np.cumsum(pages_of) - pages_of)[table]
        ends = np.cumsum(length)
        pages = np.concatenate(plan.page_tables)
        positions = np.arange(ends[-1]) + np.repeat(start - (ends - length), length)
        window_pages: Ints32 | None = None
        if plan.window_tables:
            if [len(table) for table in plan.window_tables] != pages_of.tolist():
                raise ValueError(f"step {plan.step}: window tables and page tables differ in length")
            # Entries below the window name no page that is read: any number will do, but it must be a page's.
            window_pages = np.maximum(np.concatenate(plan.window_tables), 0)
        places = np.repeat(first_page, length) + positions // page_tokens

        def slots(pages: Ints32, group: int) -> Ints:
            found: Ints = pages[places].astype(np.int64) * page_tokens + positions % page_tokens
            if all(span.stores >> group & 1 for span in plan.spans):
                return found
            stored = np.array([span.stores >> group & 1 for span in plan.spans], dtype=np.bool_)
            return np.where(np.repeat(stored, length), found, NO_SLOT)

        return cls(
            length=length,
            start=start,
            undecided=undecided,
            table=table,
            first_page=first_page,
            ends=ends,
            pages=pages,
            tokens=np.concatenate([span.tokens for span in plan.spans]),
            positions=positions,
            slots=slots(pages, 0),
            window_pages=window_pages,
            window_slots=None if window_pages is None else slots(window_pages, 1),
            chains=_chain_rows(plan, page_tokens, ends, length) if plan.chains else NO_CHAINS,
        )

    def chosen_rows(self, spans: Sequence[int], counts: Sequence[int]) -> Ints:
        """Return the rows after which a token is chosen: the last ``counts[i]`` of each span ``spans[i]``, in this
        order."""
        if len(spans) == sum(counts):
            return self.ends[list(spans)] - 1
        ends = np.cumsum(np.array(counts, dtype=np.int64))
        rows: Ints = np.arange(ends[-1]) + np.repeat(self.ends[list(spans)] - ends, counts)
        return rows

    def pending(self) -> list[tuple[int, int]]:
        """Return the row of each token that is still to come from the previous step's sample, and its span."""
        rows = np.flatnonzero(self.tokens == PENDING)
        spans = np.searchsorted(self.ends, rows, side="right")
        return list(zip(rows.tolist(), spans.tolist(), strict=True))


def _chain_rows(plan: Plan, page_tokens: int, ends: Ints, length: Ints) -> Ints:
    """Return ``SpanColumns.chains``."""
    rows = []
    for chain in plan.chains:
        spans = plan.spans[chain.first : chain.last + 1]
        if not spans or not _follows(chain, plan, page_tokens):
            raise ValueError(f"step {plan.step}: {chain} does not fit its spans")
        first = int(ends[chain.first] - length[chain.first])
        before = chain.boundary_at - spans[0].start if chain.boundary != NO_PAGE else 0
        rows.append((first, int(ends[chain.last]) - first, chain.read, chain.boundary, before, chain.live))
    return np.array(rows, dtype=np.int64)


def _follows(chain: Chain, plan: Plan, page_tokens: int) -> bool:
    """Whether a chain's spans are consecutive, and its boundary lies in them."""
    spans = plan.spans[chain.first : chain.last + 1]
    start, end, at = spans[0].start, spans[-1].end, chain.boundary_at
    joined = all(
        one.request == next_.request and one.end == next_.start for one, next_ in itertools.pairwise(spans)
    )
    return joined and (chain.boundary == NO_PAGE or (start < at <= end and at % page_tokens == 0))
