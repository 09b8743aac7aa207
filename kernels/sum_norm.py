"""The sum over all ranks, the residual sum and the norm after it, in one kernel on memory that all GPUs have mapped.

A small sum over ranks is all waiting: a kernel of its own waits for the others before it reads, and again before its
memory may be used anew, and the norm behind it is one more launch. Here a program takes a row: it tells the other
ranks that this one's part is there, waits until theirs are, adds up all parts in the order of ranks (so the result is
the same everywhere, to the last bit) and goes on as ``pensieve.kernels.norm.add_norm`` does. It does not wait at its
end: parts lie in two rooms in turn, and who has come to the next sum is done with the one before.
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
    """One program sums and norms one row. ``arrived[r]`` int32 [rows, RANKS] lies on rank r: how often each other rank
    has had its part of a row ready. SYNC off: all parts are there already."""
    row = tl.program_id(0)
    if SYNC:
        # Counted by an atomic, which one thread does for all: threads that each read a counter while one of them
        # sets it would not agree. It never goes back, so nothing has to be reset, and it may wrap.
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
    """``x += sum(parts)`` [T, W] in place; returns the norm of that (RMS norm, or LayerNorm when there is a ``bias``),
    in ``out`` if that is given.

    ``parts``: each rank's [T, W], contiguous, as this GPU has it mapped; ``arrived`` likewise, int32 [rows ≥ T, ranks];
    ``calls`` int32 [rows] is this rank's own. Both begin as zeros. All ranks must call with the same T. ``sync`` off:
    the caller knows that all parts are there. The sum is rounded to the dtype of ``x`` before it is added, as a sum by
    itself would be. Raises ValueError when the tensors do not fit.
    """
    rows, width = x.shape
    if not 0 < width <= WIDEST:
        raise ValueError(f"x is {tuple(x.shape)}, not [T, W] with W from 1 to {WIDEST}")
    if any(part.shape != x.shape or part.dtype != x.dtype or not part.is_contiguous() for part in parts):
        raise ValueError(f"the parts must be contiguous, {x.dtype} {tuple(x.shape)} like x")
    if len(arrived) != len(parts) or not 0 <= rank < len(parts) or rows > len(calls):
        raise ValueError(f"rank {rank} of {len(parts)}, {rows} rows, places for {len(calls)}")
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
