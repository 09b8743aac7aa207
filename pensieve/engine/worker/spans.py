"""A plan's spans as checked arrays, from which both workers make their batches. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.core import Ints, TokenArray
from pensieve.engine.plan import PENDING, Plan

Ints32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """S spans with T tokens in all, over concatenated page tables. Arrays without a shape are [S]."""

    length: Ints
    start: Ints
    """Position of the span's first token in its context."""
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
    """[T]: slot of each token's keys and values, ``page * N + offset``."""

    @classmethod
    def from_plan(cls, plan: Plan, page_tokens: int) -> SpanColumns:
        """Return the columns of a plan with at least one span. Raises ValueError when a span is empty or
        reaches past its page table."""
        length = np.array([len(span.tokens) for span in plan.spans], dtype=np.int64)
        start = np.array([span.start for span in plan.spans], dtype=np.int64)
        table = np.array([span.page_table for span in plan.spans], dtype=np.int64)
        pages_of = np.array([len(pages) for pages in plan.page_tables], dtype=np.int64)
        if (length < 1).any() or (start + length > pages_of[table] * page_tokens).any():
            raise ValueError(f"step {plan.step}: a span is empty or reaches past its page table")
        first_page = (np.cumsum(pages_of) - pages_of)[table]
        ends = np.cumsum(length)
        pages = np.concatenate(plan.page_tables)
        positions = np.arange(ends[-1]) + np.repeat(start - (ends - length), length)
        page = pages[np.repeat(first_page, length) + positions // page_tokens].astype(np.int64)
        return cls(
            length=length,
            start=start,
            table=table,
            first_page=first_page,
            ends=ends,
            pages=pages,
            tokens=np.concatenate([span.tokens for span in plan.spans]),
            positions=positions,
            slots=page * page_tokens + positions % page_tokens,
        )

    def pending(self) -> list[int]:
        """Return the spans whose last token is still to come from the previous step's sample."""
        found: list[int] = np.flatnonzero(self.tokens[self.ends - 1] == PENDING).tolist()
        return found
