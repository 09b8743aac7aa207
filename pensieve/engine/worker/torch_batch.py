"""Batches of ``TorchWorker``: a plan's spans as tensors for the model and the reference kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pensieve.core import Ints, RequestKey
from pensieve.engine.plan import PageTable, Plan
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
    """int64 [T]: slot of each token's keys and values in group 0, ``page * N + offset``, or ``NO_SLOT``."""
    spans: Spans
    page_tables: torch.Tensor
    """int32 [R, most pages of a row]; the unused end of a row names the padding page."""
    sample_rows: torch.Tensor
    """int64: the tokens after which one is chosen, in the order of ``Plan.specs``."""
    window_slots: torch.Tensor | None
    """As ``slots``, in the window group; None: there is none."""
    window_tables: torch.Tensor | None
    """As ``page_tables``."""
    chains: Ints
    """See ``SpanColumns.chains``."""


def make_torch_batch(
    plan: Plan,
    *,
    page_tokens: int,
    padding_page: int,
    device: torch.device,
    sampled: Mapping[RequestKey, int],
) -> TorchBatch:
    """Return the batch of a plan with at least one span. ``sampled``: token that the previous plan sampled
    per request, for pending tokens. Raises ValueError like ``SpanColumns.from_plan``."""
    columns = SpanColumns.from_plan(plan, page_tokens)

    def padded(tables: tuple[PageTable, ...]) -> torch.Tensor:
        array = np.full((len(tables), max(map(len, tables))), padding_page, dtype=np.int32)
        for index, table in enumerate(tables):
            array[index, : len(table)] = np.maximum(table, 0)
        return torch.from_numpy(array).to(device)

    windows = columns.window_slots
    last = [index for index, span in enumerate(plan.spans) if span.sample is not None]
    chosen = columns.chosen_rows(last, [plan.spans[index].num_chosen for index in last])
    tokens = columns.tokens.astype(np.int64)
    for row, span in columns.pending():
        tokens[row] = sampled[plan.spans[span].request]
    return TorchBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(columns.positions).to(device),
        slots=torch.from_numpy(columns.slots).to(device),
        spans=make_spans(columns.length, columns.start, columns.table),
        page_tables=padded(plan.page_tables),
        sample_rows=torch.from_numpy(chosen).to(device),
        window_slots=None if windows is None else torch.from_numpy(windows).to(device),
        window_tables=padded(plan.window_tables) if plan.window_tables else None,
        chains=columns.chains,
    )
