"""Batches of ``TorchWorker``: a plan's spans as tensors for the model and the reference kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pensieve.core import RequestKey
from pensieve.engine.plan import Plan
from pensieve.engine.worker.spans import SpanColumns
from pensieve.kernels.spans import Spans, make_spans


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """T concatenated tokens of S spans over R contexts."""

    tokens: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: slot of each token's keys and values, ``page * N + offset``."""
    spans: Spans
    page_tables: torch.Tensor
    """int32 [R, most pages of a row]; the unused end of a row names the padding page."""
    sample_rows: torch.Tensor
    """int64: the last token of each sampled span, in the plan's order."""


def make_torch_batch(
    plan: Plan,
    *,
    page_tokens: int,
    padding_page: int,
    device: torch.device,
    sampled: Mapping[RequestKey, int],
) -> TorchBatch:
    """Return the batch of a plan with at least one span. ``sampled``: token that the previous plan sampled
    per request, for pending tokens. Raises ValueError when a span is empty or reaches past its page table."""
    columns = SpanColumns.from_plan(plan, page_tokens)
    most_pages = max(len(table) for table in plan.page_tables)
    tables = np.full((len(plan.page_tables), most_pages), padding_page, dtype=np.int32)
    for index, table in enumerate(plan.page_tables):
        tables[index, : len(table)] = table
    last = [index for index, span in enumerate(plan.spans) if span.sample is not None]
    tokens = columns.tokens.astype(np.int64)
    for index in columns.pending():
        tokens[columns.ends[index] - 1] = sampled[plan.spans[index].request]
    return TorchBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(columns.positions).to(device),
        slots=torch.from_numpy(columns.slots).to(device),
        spans=make_spans(columns.length, columns.start, columns.table),
        page_tables=torch.from_numpy(tables).to(device),
        sample_rows=torch.from_numpy(columns.ends[last] - 1).to(device),
    )
