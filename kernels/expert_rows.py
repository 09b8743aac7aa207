"""The rows of a mixture of experts in Triton: picked, put in order of their expert, and combined to tokens again.

Match ``pensieve.kernels.expert_reference``. Few, small kernels: with few tokens in a step their starts take longer than
the experts' products. No call waits for the device: a graph can capture them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pensieve.kernels.checks import FLOAT_DTYPES

COMBINED_COLUMNS = 512
"""Results per program of ``combine_rows``."""
ROWS_AT_ONCE = 1024
"""Most rows that a program of ``group_rows`` looks at together."""


@triton.jit  # type: ignore[untyped-decorator]
def _pick_experts(  # type: ignore[no-untyped-def]
    logits, weights, picked, experts, stride,
    PICKED: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, SOFTMAX_FIRST: tl.constexpr,
    RENORMALISED: tl.constexpr
):  # fmt: skip
    """Pick the experts of one token."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    score = tl.load(logits + token * stride + number, mask=number < experts, other=float("-inf")).to(
        tl.float32
    )
    if SOFTMAX_FIRST:
        score = tl.exp(score - tl.max(score, 0))
        score = tl.where(number < experts, score / tl.sum(score, 0), float("-inf"))
    best = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    for index in tl.static_range(PICKED):
        top = tl.max(score, 0)
        # Of equal scores the first. NaN equals nothing: any expert will do, as long as it exists.
        expert = tl.minimum(tl.min(tl.where(score == top, number, EXPERTS), 0), experts - 1)
        best = tl.where(slot == index, top, best)
        chosen = tl.where(slot == index, expert, chosen)
        score = tl.where(number == expert, float("-inf"), score)
    used = slot < PICKED
    if not SOFTMAX_FIRST:
        best = tl.exp(best - tl.max(best, 0))
        best = best / tl.sum(best, 0)
    elif RENORMALISED:
        best = best / tl.sum(tl.where(used, best, 0.0), 0)
    tl.store(weights + token * PICKED + slot, best.to(weights.dtype.element_ty), mask=used)
    tl.store(picked + token * PICKED + slot, chosen, mask=used)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _group_rows(picked, ends, tokens, rows, count, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the rows of one expert, and their place behind those of the experts before it."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    place = 0
    for start in tl.range(0, count, BLOCK):
        row = start + lane
        found = tl.load(picked + row, mask=row < count, other=expert)
        place += tl.sum((found < expert).to(tl.int32), 0)
    for start in tl.range(0, count, BLOCK):
        row = start + lane
        mine = (tl.load(picked + row, mask=row < count, other=-1) == expert).to(tl.int32)
        at = place + tl.cumsum(mine, 0) - 1
        tl.store(rows + at, row, mask=mine > 0)
        tl.store(tokens + at, row // PER_TOKEN, mask=mine > 0)
        place += tl.sum(mine, 0)
    tl.store(ends + expert, place)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_rows(  # type: ignore[no-untyped-def]
    x, weights, out, columns, stride, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, ROUNDED: tl.constexpr
):
    """Add up BLOCK columns of the rows of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + index
        value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.load(weights + row).to(tl.float32)
        if ROUNDED:
            value = value.to(out.dtype.element_ty).to(tl.float32)
        total += value
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def pick_experts(
    logits: torch.Tensor, per_token: int, *, softmax_first: bool, renormalised: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``expert_reference.pick_experts``. Of experts with equal weights the first is picked. Takes float16, bfloat16
    or float32. Raises ValueError when ``logits`` has another shape, dtype or layout."""
    if (
        logits.dim() != 2
        or logits.dtype not in FLOAT_DTYPES
        or (logits.stride(1) != 1 and logits.shape[1] > 1)
    ):
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)}, not [T, E] floats in contiguous rows"
        )
    tokens, experts = logits.shape
    if not 0 < per_token <= experts:
        raise ValueError(f"{per_token} of {experts} experts cannot be picked")
    kept = logits.dtype if rounded or not softmax_first else torch.float32
    weights = torch.empty((tokens, per_token), dtype=kept, device=logits.device)
    picked = torch.empty((tokens, per_token), dtype=torch.int32, device=logits.device)
    if tokens:
        _pick_experts[(tokens,)](
            logits,
            weights,
            picked,
            experts,
            logits.stride(0),
            PICKED=per_token,
            SLOTS=triton.next_power_of_2(per_token),
            EXPERTS=triton.next_power_of_2(experts),
            SOFTMAX_FIRST=softmax_first,
            RENORMALISED=renormalised,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return weights, picked


def group_rows(picked: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``expert_reference.group_rows``. Raises ValueError when ``picked`` is not contiguous int32 [T, K]."""
    if picked.dim() != 2 or picked.dtype != torch.int32 or not picked.is_contiguous():
        raise ValueError(f"picked is {picked.dtype} {tuple(picked.shape)}, not contiguous int32 [T, K]")
    count, per_token = picked.numel(), picked.shape[1]
    ends = torch.empty(experts, dtype=torch.int32, device=picked.device)
    # Not parts of one tensor: an address of another alignment would need a kernel of its own.
    tokens, rows = (torch.empty(count, dtype=torch.int32, device=picked.device) for _ in range(2))
    block = min(ROWS_AT_ONCE, triton.next_power_of_2(max(32, count)))
    _group_rows[(experts,)](picked, ends, tokens, rows, count, PER_TOKEN=per_token, BLOCK=block)
    return ends, tokens, rows


def combine_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``expert_reference.combine_rows``. Raises ValueError when shapes, dtypes or layouts do not fit."""
    if x.dim() != 2 or weights.dim() != 2 or len(x) != weights.numel():
        raise ValueError(
            f"x is {tuple(x.shape)} and weights {tuple(weights.shape)}, not [T * K, W] and [T, K]"
        )
    if x.dtype not in FLOAT_DTYPES or weights.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"x is {x.dtype} and weights {weights.dtype}, not float and the same or float32")
    if not weights.is_contiguous() or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError("weights and the rows of x must be contiguous")
    (tokens, per_token), columns = weights.shape, x.shape[1]
    out = x.new_empty((tokens, columns))
    if tokens:
        _combine_rows[(tokens, triton.cdiv(columns, COMBINED_COLUMNS))](
            x,
            weights,
            out,
            columns,
            x.stride(0),
            PER_TOKEN=per_token,
            BLOCK=COMBINED_COLUMNS,
            ROUNDED=weights.dtype == x.dtype,
            enable_fp_fusion=True,
        )
    return out
