"""MLP activation in Triton, fused with the product of a gated MLP.

Matches ``pensieve.kernels.reference.activate``. Computes in float32 and rounds the activation to the tensor's
dtype before the product, as torch does.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl

from pensieve.kernels.arguments import Activation
from pensieve.kernels.checks import FLOAT_DTYPES

FEW_COLUMNS, MANY_COLUMNS = 256, 1024
"""Columns per program: 8 values per thread (16 bytes of a 2-byte type), with 1 or 4 warps."""
LARGE_STEP_VALUES = 1 << 20
"""From this many values on, a step uses large programs: they fill any device, and fewer of them start."""


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    up, out, up_stride, out_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Activate BLOCK of the INNER values of a row."""
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    at = up + row * up_stride + columns
    raw = tl.load(at, mask=inside, other=0.0)
    if GATED:
        factor = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    x = raw.to(tl.float32)
    if KIND == "silu":
        x = x / (1.0 + tl.math.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u)), here with u = sqrt(2/pi) * (x + 0.044715 * x^3).
        x = x / (1.0 + tl.math.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        x = tl.where(x < 0.0, 0.0, x)  # a comparison, since maximum may drop a NaN
        if KIND == "relu2":
            x = x * x
    if GATED:
        x = x.to(raw.dtype).to(tl.float32) * factor
    tl.store(out + row * out_stride + columns, x.to(raw.dtype), mask=inside)


def activate(up: torch.Tensor, gated: bool, activation: Activation) -> torch.Tensor:
    """Return ``act(up)`` [T, I]; gated, with ``up`` [T, 2 * I]: ``act`` of the first half times the second
    half. Takes float16, bfloat16 or float32. Can be captured in a graph. Raises ValueError when ``up`` has
    another shape, dtype or layout."""
    if up.dim() != 2 or up.shape[1] == 0 or (gated and up.shape[1] % 2):
        raise ValueError(f"up is {tuple(up.shape)}, not {'[T, 2 * I]' if gated else '[T, I]'}")
    if up.dtype not in FLOAT_DTYPES:
        raise ValueError(f"up is {up.dtype}: it must be float16, bfloat16 or float32")
    if up.stride(1) != 1 and up.shape[1] > 1:
        raise ValueError("the last dimension of up must be contiguous")
    if activation not in get_args(Activation):
        raise ValueError(f"activation {activation} is none of {', '.join(get_args(Activation))}")
    rows, inner = up.shape[0], up.shape[1] // 2 if gated else up.shape[1]
    out = up.new_empty((rows, inner))
    block = MANY_COLUMNS if out.numel() >= LARGE_STEP_VALUES else FEW_COLUMNS
    if rows:
        _activate[(rows * triton.cdiv(inner, block),)](
            up,
            out,
            up.stride(0),
            out.stride(0),
            **constants(inner, block, gated, activation),
            **options(block),
        )
    return out


def constants(inner: int, block: int, gated: bool, activation: Activation) -> dict[str, int | bool | str]:
    """Compile-time arguments of ``_activate``."""
    return {"INNER": inner, "BLOCK": block, "GATED": gated, "KIND": activation}


def options(block: int) -> dict[str, int]:
    return {"num_warps": block // FEW_COLUMNS, "enable_fp_fusion": True}
