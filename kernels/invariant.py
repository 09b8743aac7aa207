"""Operations of a decoder on a CPU whose result for a token is the same to the bit in every step.

Libraries choose another order of additions for another number of rows, and compute the last elements of a tensor by
other instructions than the rest. So every operation here runs in calls of one fixed shape, or of a shape that follows
from the token's own position: products in blocks of ``BLOCK_ROWS`` rows, functions in runs of ``RUN`` elements,
attention by token. ``pensieve.kernels.reference`` has the ordinary operations under the same names and documents them.
The worker tests at start-up that this machine's libraries keep the promise
(``pensieve.engine.worker.invariance``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pensieve.kernels import kv_codec
from pensieve.kernels.arguments import ACTIVATIONS, Activation, Logits
from pensieve.kernels.checks import check_logits, check_window
from pensieve.kernels.spans import POSITION, Q_LEN, Q_START, TABLE, Spans

BLOCK_ROWS = 16
"""Rows of every product: few enough that one token costs little more than alone, enough to read weights rarely."""
RUN = 2048
"""Elements of every call of a function. torch gives a call of this size to one thread."""
LANES = 256
"""A run's length is a multiple of this, so that no element is left to instructions for single values."""
KEYS = 64
"""A token attends to its keys, rounded up to a multiple of this many."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [T, I] times the transpose of ``weight`` [O, I], plus ``bias`` [O]: [T, O]."""
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % BLOCK_ROWS)).contiguous()
    out = x.new_empty((len(padded), len(weight)))
    for start in range(0, len(padded), BLOCK_ROWS):
        block, result = padded[start : start + BLOCK_ROWS], out[start : start + BLOCK_ROWS]
        torch.mm(block, weight.t(), out=result)
    return out[:rows] if bias is None else out[:rows] + bias


def pointwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``function(x)``, in the shape of ``x``, for a function of each element alone that keeps the dtype."""
    flat = x.reshape(-1)
    count = len(flat)
    padded = F.pad(flat, (0, -count % LANES))
    if count <= RUN:
        return function(padded)[:count].view(x.shape)
    return torch.cat([function(run) for run in padded.split(RUN)])[:count].view(x.shape)


def activate(up: torch.Tensor, gated: bool, activation: Activation) -> torch.Tensor:
    """See ``reference.activate``."""
    if gated:
        gate, up = up.chunk(2, dim=-1)
        return pointwise(ACTIVATIONS[activation], gate) * up
    return pointwise(ACTIVATIONS[activation], up)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``expert_reference.grouped_product``."""
    rows = x if read is None else x.index_select(0, read)
    out = x.new_empty((len(rows), weight.shape[2]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear(
                rows[start:end], weight[expert].t(), None if bias is None else bias[expert]
            )
            start = end
    if write is None:
        return out
    placed = torch.empty_like(out)
    placed[write.long()] = out
    return placed


def clamped_glu(up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``expert_reference.clamped_glu``."""
    gate, value = up[:, ::2].clamp(max=limit), up[:, 1::2].clamp(-limit, limit)
    return (value + 1) * (gate * pointwise(torch.sigmoid, gate * alpha))


def combine_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``expert_reference.combine_rows``; adds a token's rows in order."""
    each = x.view(*weights.shape, x.shape[1]) * weights[..., None]
    total = each[:, 0].float()
    for index in range(1, each.shape[1]):
        total = total + each[:, index]
    return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tokens of one span whose contexts round up to the same keys."""

    rows: slice
    """Rows of q."""
    pages: torch.Tensor
    """int64 [K]: page of each key."""
    slots: torch.Tensor
    """int64 [K]: its place in the page."""
    hidden: torch.Tensor
    """bool [n, 1, K]: keys that a token does not see."""


def make_plan(
    q: torch.Tensor, pool: torch.Tensor, spans: Spans, page_tables: torch.Tensor, *, window: int | None = None
) -> tuple[Unit, ...]:
    """Return the units of a step; see ``reference.make_plan``. All layers with this window share them."""
    check_window(window)
    page_tokens = pool.shape[3]
    tables, units = page_tables.cpu().numpy(), list[Unit]()
    for span in spans.tolist():
        position, end = span[POSITION], span[POSITION] + span[Q_LEN]
        while position < end:
            last = _run_end(position, end, window)
            row = span[Q_START] + position - span[POSITION]
            units.append(_unit(row, position, last, tables[span[TABLE]], page_tokens, window))
            position = last
    return tuple(units)


def _run_end(position: int, end: int, window: int | None) -> int:
    """Return the end of the positions from ``position`` on that read the same range of keys."""
    run = min(end, (position // KEYS + 1) * KEYS)
    return run if window is None else min(run, _first_key(position, window) + KEYS + window - 1)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _first_key(position: int, window: int | None) -> int:
    return _first_seen(position, window) // KEYS * KEYS


def _unit(
    row: int,
    position: int,
    last: int,
    table: npt.NDArray[np.int32],
    page_tokens: int,
    window: int | None,
) -> Unit:
    """Return the unit of positions ``[position, last)``, the first of which is row ``row`` of q."""
    keys = np.arange(_first_key(position, window), -(-last // KEYS) * KEYS)
    # Slots that no token sees may hold NaN, which a weight of 0 does not undo: read a visible one instead.
    read = keys.clip(_first_seen(position, window), last - 1)
    queries = np.arange(position, last)[:, None]
    hidden = keys[None, :] > queries
    if window is not None:
        hidden |= keys[None, :] <= queries - window
    return Unit(
        slice(row, row + last - position),
        torch.from_numpy(table[read // page_tokens].astype(np.int64)),
        torch.from_numpy(read % page_tokens),
        torch.from_numpy(hidden[:, None]),
    )


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    plan: tuple[Unit, ...],
    logits: Logits,
) -> torch.Tensor:
    """See ``reference.attend``; computes in float32 and rounds once."""
    check_logits(q, logits)
    scale, softcap, sinks = logits
    heads, dim, kv_heads = q.shape[1], q.shape[2], pool.shape[2]
    out, coded = torch.zeros_like(q), kv_codec.is_coded(pool)
    for unit in plan:
        at = (unit.pages, slice(None), slice(None), unit.slots)
        both = kv_codec.read(pool, at, torch.float32) if coded else pool[at].float()  # [K, 2, Hkv, D]
        count = unit.rows.stop - unit.rows.start
        queries = q[unit.rows].float().view(count, kv_heads, heads // kv_heads, dim)
        for head in range(kv_heads):
            # One matrix per token, so that the number of tokens does not matter.
            keys = both[:, 0, head].t().contiguous().expand(count, dim, -1)
            values = both[:, 1, head].contiguous().expand(count, -1, dim)
            scores = torch.bmm(queries[:, head].contiguous(), keys) * scale
            if softcap is not None:
                scores = pointwise(torch.tanh, scores / softcap) * softcap
            scores.masked_fill_(unit.hidden, -torch.inf)
            if sinks is not None:
                of_head = sinks.float().view(kv_heads, 1, -1, 1)[head].expand(count, -1, 1)
                scores = torch.cat([scores, of_head], dim=-1)
            weights = torch.softmax(scores, dim=-1)
            part = torch.bmm(weights[..., : keys.shape[2]].contiguous(), values)
            out[unit.rows].view(count, kv_heads, -1, dim)[:, head] = part.to(q.dtype)
    return out
