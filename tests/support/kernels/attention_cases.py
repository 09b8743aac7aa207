"""Attention inputs with everything that must not be read poisoned, and a slow oracle in float64.

For every implementation of ``ragged_paged_attention``: nothing here knows how one works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.kernels import spans as span_rows
from pensieve.kernels.arguments import Logits

Spans = Sequence[tuple[int, int, int]]
"""(page-table row, position, query tokens)"""


@dataclass(frozen=True, slots=True)
class Case:
    q: torch.Tensor
    pool: torch.Tensor
    """[P, 2, Hkv, N, D]: NaN in every slot that no query sees, and in a page before and after those in use."""
    page_tables: torch.Tensor
    spans: span_rows.Spans
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """float32 [Hq]"""

    @property
    def logits(self) -> Logits:
        return Logits(self.scale, self.softcap, self.sinks)


def make_case(
    spans: Spans,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    magnitude: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Case:
    """Random queries and KV. Rows have pages of their own in random order. Slots that no query sees are NaN; table
    entries of pages that no query sees name a page full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(row for row, _, _ in spans) + 1
    context = [max((p + n for r, p, n in spans if r == row), default=0) for row in range(rows)]
    pages = [-(-length // page) for length in context]
    order = torch.randperm(sum(pages), generator=generator) + 1
    total = sum(pages) + 2
    pool = torch.full((total, 2, kv_heads, page, dim), torch.nan)
    tables = torch.full((rows, max(pages) + 2), total - 1, dtype=torch.int32)
    used = 0
    for row, (count, length) in enumerate(zip(pages, context, strict=True)):
        own = order[used : used + count].int()
        used += count
        seen = _seen(row, spans, length, window)
        for position in range(length):
            values = torch.randn(2, kv_heads, dim, generator=generator) * magnitude
            if position in seen:
                pool[int(own[position // page]), :, :, position % page] = values
        for index in {position // page for position in seen}:
            tables[row, index] = own[index]
    rows_of = span_rows.make_spans(
        [n for _, _, n in spans], [p for _, p, _ in spans], [r for r, _, _ in spans]
    )
    q = torch.randn(span_rows.num_tokens(rows_of), heads, dim, generator=generator) * magnitude
    logits = torch.randn(heads, generator=generator) * 2 if sinks else None
    return Case(q.to(dtype), pool.to(dtype), tables, rows_of, dim**-0.5, window, softcap, logits)


def _seen(row: int, spans: Spans, length: int, window: int | None) -> set[int]:
    """Positions of a row's context that some query sees."""
    if window is None:
        return set(range(length))
    own = [(position, count) for at, position, count in spans if at == row and count]
    return {at for position, count in own for at in range(max(0, position - window + 1), position + count)}


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, Hq, D] and log of the softmax denominator [T, Hq], float64: one query token after the other."""
    heads, kv_heads, page = case.q.shape[1], case.pool.shape[2], case.pool.shape[3]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    lse = torch.full(case.q.shape[:2], -torch.inf, dtype=torch.float64)
    for start, length, position, row in case.spans.tolist():
        kv = [
            case.pool[int(case.page_tables[row, at // page]), :, :, at % page]
            for at in range(position + length)
        ]
        for index in range(length):
            end = position + index + 1
            first = 0 if case.window is None else max(0, end - case.window)
            seen = torch.stack(kv[first:end]).double()  # [k, 2, Hkv, D]
            keys, values = seen[:, 0], seen[:, 1]
            query = case.q[start + index].double().view(kv_heads, heads // kv_heads, -1)
            scores = torch.einsum("hgd,khd->hgk", query, keys) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if case.sinks is not None:
                sinks = case.sinks.double().view(kv_heads, -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
                values = torch.cat([values, torch.zeros_like(values[:1])])
            weights = torch.softmax(scores, dim=-1)
            out[start + index] = torch.einsum("hgk,khd->hgd", weights, values).reshape(heads, -1)
            lse[start + index] = torch.logsumexp(scores, dim=-1).reshape(heads)
    return out, lse


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN when ``got`` has one."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
