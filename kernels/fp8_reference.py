"""Products of 8-bit codes in plain torch, which also bring weights into that form.

A code is a float of 8 bits, e4m3. Each row of inputs and each row of a weight has one scale, so no scale ties a token
to its neighbours. Scales that are made here are powers of two: they divide and multiply exactly, and noise in the
largest value of a row moves no other code. ``fp8_product`` has the same for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

CODES: Final = torch.float8_e4m3fn
PIECE_VALUES: Final = 4 << 20
"""Values of a weight that are brought into codes at once: 16 MiB of float32."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_CARRY: Final = 0x1FFFFF
"""Added to the bits of a float32, carries into its exponent if the mantissa exceeds 1.75: 448, the largest code, is
1.75 * 256."""


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Return the least power of two for each row of ``x`` [R, I] by which the row's largest value becomes at most 448,
    float32 [R]; NaN for a row that is not finite."""
    # Bits of positive floats are ordered like the floats, NaN above all.
    bits = x.float().abs().view(torch.int32).amax(1)
    exponents = (((bits + _CARRY) >> 23) - 8).clamp(min=1)
    return torch.where(bits < _INFINITY, exponents << 23, _NAN).view(torch.float32)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x`` [R, I], e4m3 [R, I], and the scales of its rows, float32 [R]. NaN and infinity make the
    codes of their row NaN."""
    scales = row_scales(x)
    return (x / scales[:, None]).to(CODES), scales


def code_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight's codes are kept for a model in ``dtype``. A CPU has no products of codes, and
    converting them at every step takes longer than the product: there codes are stored as values."""
    return CODES if device.type == "cuda" else dtype


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes of ``values`` [R, I] to ``codes``, of any dtype, and the scales of its rows to ``scales`` [R]."""
    step = max(1, PIECE_VALUES // values.shape[1])
    for some, own, scale in zip(values.split(step), codes.split(step), scales.split(step), strict=True):
        found, rows = quantise_rows(some.to(codes.device))
        own.copy_(found)
        scale.copy_(rows)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Return ``x`` [T, I], by its codes, times the transpose of a weight, plus ``bias`` [O]: [T, O]. ``weight`` [O, I]:
    the values of codes, in any dtype; ``scales`` float32 [O]: of its rows. ``linear`` multiplies codes."""
    # The sums exceed float16.
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    codes, rows = quantise_rows(x)
    sums = linear(codes.to(dtype), weight.to(dtype), None).to(torch.promote_types(dtype, torch.float32))
    out = sums * rows[:, None] * scales
    return (out if bias is None else out + bias).to(x.dtype)
