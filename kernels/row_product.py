"""The product of one row with a matrix, in Triton: most of a step that decodes for one request.

Such a product reads each weight once and does little else. Libraries compute it as one of many rows, and may split the
sum and add up its parts in a second launch. Here a program computes ROWS values of the result, and programs are many
and small, so that all of the device's memory is read at once.

A thread has the weights of a block on the way before it multiplies any. A mask of their rows would undo that: the
assembler then multiplies after each load, and a step takes nearly twice as long. So a program has ROWS whole rows.

A decode step of a 13B on an H200 takes 0.89 of the time with cuBLAS (bench/results/step_parts_13b_h200.md). For 2 rows
such a kernel takes longer than cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

ROWS, BLOCK, WARPS = 8, 512, 2
"""Rows of the matrix per program, columns at a time, and warps. The fastest of eight sizes in that step."""
LEAST_HEIGHT = 1024
"""Fewer rows are fewer programs than multiprocessors, such as those of a router of experts."""
DTYPES = (torch.float16, torch.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _row_product(  # type: ignore[no-untyped-def]
    x, weight, bias, out, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Multiply ROWS rows of ``weight`` by ``x``, each of WIDTH values. Sums are float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = weight + row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    WHOLE: tl.constexpr = WIDTH // BLOCK * BLOCK
    # No weight is read twice in a step, so none need stay in the L2 cache.
    first = tl.load(at, eviction_policy="evict_first")
    total = first.to(tl.float32) * tl.load(x + columns).to(tl.float32)[None, :]
    for begin in tl.range(BLOCK, WHOLE, BLOCK):
        part = tl.load(at + begin, eviction_policy="evict_first").to(tl.float32)
        total += part * tl.load(x + begin + columns).to(tl.float32)[None, :]
    if WHOLE < WIDTH:
        inside = columns < WIDTH - WHOLE
        part = tl.load(at + WHOLE, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        total += part * tl.load(x + WHOLE + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N] if given.

    This kernel multiplies one row of float16 or bfloat16 if N is a multiple of ROWS from LEAST_HEIGHT on, K at least
    BLOCK, and the weights contiguous. Anything else goes to ``torch.nn.functional.linear``. Can be captured in a graph.
    Raises as that function does.
    """
    if not _is_mine(x, weight, bias):
        return F.linear(x, weight, bias)
    height, width = weight.shape
    out = x.new_empty((1, height))
    # Absent tensors are not read: any pointer stands in for them.
    _row_product[(height // ROWS,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        **constants(width, bias=bias is not None),
        **options(),
    )
    return out


def _is_mine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    height, width = weight.shape
    given = (x, weight) if bias is None else (x, weight, bias)
    return (
        x.shape == (1, width)
        and x.dtype in DTYPES
        and height % ROWS == 0
        and height >= LEAST_HEIGHT
        and width >= BLOCK
        and (bias is None or bias.shape == (height,))
        and all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in given)
    )


def constants(width: int, *, bias: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``_row_product``."""
    return {"WIDTH": width, "ROWS": ROWS, "BLOCK": BLOCK, "BIAS": bias}


def options() -> dict[str, int]:
    return {"num_warps": WARPS, "enable_fp_fusion": True}
