"""The product of one row with a matrix, in Triton: most of a step that decodes for one request.

Such a product reads each weight once and does little else. Libraries compute it as one of many rows, and may split the
sum and add up its parts in a second launch. Here a program computes ROWS values of the result, and programs are many
and small, so that all of the device's memory is read at once.

One decode step of a 13B on an H200 takes 0.89 of the time with cuBLAS (``bench/kernel_ops/step_parts.py``, way
"torch's row"). With 2 rows the same kernel takes longer than cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

ROWS, BLOCK, WARPS = 8, 512, 2
"""Rows of the matrix per program, columns at a time, and warps: 8 pieces of 16 bytes per thread on the way. The fastest
of eight sizes in a decode step of a 13B on an H200."""
DTYPES = (torch.float16, torch.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _row_product(  # type: ignore[no-untyped-def]
    x, weight, bias, out, stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS of the HEIGHT rows of ``weight`` by ``x``, each of WIDTH values. Sums are float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    valid = row < HEIGHT
    at = weight + row.to(tl.int64)[:, None] * stride + columns[None, :]
    WHOLE: tl.constexpr = WIDTH // BLOCK * BLOCK
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    # No weight is read twice in a step, so none need stay in the L2 cache.
    for first in tl.range(0, WHOLE, BLOCK):
        part = tl.load(at + first, mask=valid[:, None], other=0.0, eviction_policy="evict_first")
        total += part.to(tl.float32) * tl.load(x + first + columns).to(tl.float32)[None, :]
    if WHOLE < WIDTH:
        rest = columns < WIDTH - WHOLE
        inside = valid[:, None] & rest[None, :]
        part = tl.load(at + WHOLE, mask=inside, other=0.0, eviction_policy="evict_first")
        total += (
            part.to(tl.float32) * tl.load(x + WHOLE + columns, mask=rest, other=0.0).to(tl.float32)[None, :]
        )
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=valid)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N] if given: one row of float16 or
    bfloat16 by this kernel, anything else by ``torch.nn.functional.linear``. Can be captured in a graph. Raises as
    that function does."""
    height, width = weight.shape
    mine = x.shape == (1, width) and x.dtype in DTYPES and weight.dtype == x.dtype
    if not mine or not height or weight.stride(1) != 1 or x.stride(1) != 1:
        return F.linear(x, weight, bias)
    if bias is not None and (bias.shape != (height,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        return F.linear(x, weight, bias)
    out = x.new_empty((1, height))
    # Absent tensors are not read: any pointer stands in for them.
    _row_product[(triton.cdiv(height, ROWS),)](
        x, weight, weight if bias is None else bias, out, weight.stride(0),
        **constants(height, width, bias=bias is not None), **options(width),
    )  # fmt: skip
    return out


def constants(height: int, width: int, *, bias: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``_row_product``."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return {"HEIGHT": height, "WIDTH": width, "ROWS": ROWS, "BLOCK": block, "BIAS": bias}


def options(width: int) -> dict[str, int]:
    return {"num_warps": WARPS if width >= BLOCK else 1, "enable_fp_fusion": True}
