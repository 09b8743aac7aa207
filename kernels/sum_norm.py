"""All-reduce, residual sum and norm in one kernel, on memory that all GPUs have mapped.

A small all-reduce spends its time waiting: a separate kernel waits for the other ranks before it reads, and
again before its memory may be reused, and the norm is one more launch. Here a program processes one row. It
signals the other ranks that this rank's part is ready and waits for theirs. It adds all parts in the order of
ranks, so the result is the same everywhere to the last bit, and continues as ``pensieve.kernels.norm.add_norm``
does. It does not wait at its end: parts alternate between two buffers, and a rank that has reached the next
sum has finished the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pensieve.kernels.norm import WIDEST, normed, options


@triton.jit  # type: ignore[untyped-decorator]
def _sum_norm_rows(  # type: ignore[no-untyped-def]
    x, parts, arrived, calls, out, weight, bias, eps, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LAYER: tl.constexpr,
    SYNC: tl.constexpr,
):  # fmt: skip
    """Sum and normalise one row. ``arrived[r]`` int32 [rows, RANKS] is on rank r: how often each other rank
    has had its part of a row ready. SYNC off: all parts are ready already."""
    row = tl.program_id(0)
    if SYNC:
        # Counted by an atomic, which one thread executes for all: threads that read a counter while one of
        # them sets it would disagree. It only grows, so it needs no reset, and it may wrap.
        call = tl.atomic_add(calls + row, 1, sem="relaxed", scope="gpu") + 1
        for other in tl.static_range(RANKS):
            if other != RANK:
                tl.atomic_add(arrived[other] + row * RANKS + RANK, 1, sem="release", scope="sys")
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x + row.to(tl.int64) * x_stride + columns
    raw = tl.load(at, mask=inside, other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if SYNC:
        for other in tl.static_range(RANKS):
            if other != RANK:
                mine = arrived[RANK] + row * RANKS + other
                while tl.atomic_add(mine, 0, sem="acquire", scope="sys") - call < 0:
                    pass
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        total += tl.load(parts[other] + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    raw = (raw.to(tl.float32) + total.to(raw.dtype).to(tl.float32)).to(raw.dtype)
    tl.store(at, raw, mask=inside)
    result = normed(raw, columns, inside, scale, bias, eps, WIDTH, LAYER)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, result, mask=inside)


def sum_add_norm(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    arrived: Sequence[torch.Tensor],
    calls: torch.Tensor,
    rank: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    sync: bool = True,
) -> torch.Tensor:
    """``x += sum(parts)`` [T, W] in place; returns the norm of the result (RMS norm, or LayerNorm with a
    ``bias``), in ``out`` if given.

    ``parts``: each rank's [T, W], contiguous, as mapped by this GPU; ``arrived`` likewise, int32 [rows ≥ T,
    ranks]; ``calls`` int32 [rows] is this rank's own. Both begin as zeros. All ranks must call with the same
    T. ``sync`` off: the caller knows that all parts are ready. The sum is rounded to the dtype of ``x``
    before it is added, as by a separate all-reduce. Raises ValueError when the tensors do not fit.
    """
    rows, width = x.shape
    if not 0 < width <= WIDEST:
        raise ValueError(f"x is {tuple(x.shape)}, not [T, W] with W from 1 to {WIDEST}")
    if any(part.shape != x.shape or part.dtype != x.dtype or not part.is_contiguous() for part in parts):
        raise ValueError(f"the parts must be contiguous, {x.dtype} {tuple(x.shape)} like x")
    if len(arrived) != len(parts) or not 0 <= rank < len(parts) or rows > len(calls):
        raise ValueError(f"rank {rank} of {len(parts)} ranks, {rows} rows, counters for {len(calls)}")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    elif out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous, {x.dtype} {tuple(x.shape)} like x")
    if rows:
        _sum_norm_rows[(rows,)](
            x, tuple(parts), tuple(arrived), calls, out, weight, weight if bias is None else bias, eps, x.stride(0),
            WIDTH=width, BLOCK=triton.next_power_of_2(width), RANK=rank, RANKS=len(parts), LAYER=bias is not None,
            SYNC=sync, **options(width),
        )  # fmt: skip
    return out
