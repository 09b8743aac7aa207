"""A plan's spans as the tensors that the model and the kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pensieve.core import RequestKey
from pensieve.engine.plan import PENDING, Plan
from pensieve.kernels.span_table import SpanTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T concatenated tokens of S spans over R contexts."""

    tokens: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: where each token's keys and values go, ``page * N + offset``."""
    spans: SpanTable
    page_tables: torch.Tensor
    """int32 [R, most pages of a row]; the unused end of a row names the padding page."""
    sample_rows: torch.Tensor
    """int64: the last token of each span that is sampled, in the plan's order."""


def make_batch(
    plan: Plan,
    *,
    page_tokens: int,
    padding_page: int,
    device: torch.device,
    sampled: Mapping[RequestKey, int],
) -> StepBatch:
    """The batch of a plan with at least one span; ``sampled``: what the plan before it sampled, for pending tokens.

    Raises ValueError when a span is empty or reaches past its page table.
    """
    length = np.array([len(span.tokens) for span in plan.spans], dtype=np.int64)
    start = np.array([span.start for span in plan.spans], dtype=np.int64)
    row = np.array([span.page_table for span in plan.spans], dtype=np.int64)
    pages = np.array([len(table) for table in plan.page_tables], dtype=np.int64)
    if (length < 1).any() or (start + length > pages[row] * page_tokens).any():
        raise ValueError(f"step {plan.step}: a span is empty or reaches past its page table")
    tables = np.full((len(pages), int(pages.max())), padding_page, dtype=np.int32)
    for index, table in enumerate(plan.page_tables):
        tables[index, : len(table)] = table
    ends = np.cumsum(length)
    positions = np.arange(ends[-1]) + np.repeat(start - (ends - length), length)
    page = tables[np.repeat(row, length), positions // page_tokens].astype(np.int64)
    last = [index for index, span in enumerate(plan.spans) if span.sample is not None]
    tokens = np.concatenate([span.tokens for span in plan.spans]).astype(np.int64)
    for index in np.flatnonzero(tokens[ends - 1] == PENDING).tolist():
        tokens[ends[index] - 1] = sampled[plan.spans[index].request]
    return StepBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(page * page_tokens + positions % page_tokens).to(device),
        spans=SpanTable.build(length, start, row, device),
        page_tables=torch.from_numpy(tables).to(device),
        sample_rows=torch.from_numpy(ends[last] - 1).to(device),
    )
