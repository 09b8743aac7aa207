"""RMS norm and LayerNorm of whole rows, optionally fused with the residual sum before them, in Triton.

They match their namesakes in ``pensieve.kernels.reference``. The sum is rounded to the tensor's dtype before
the norm, as in torch; the norm itself is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_given, check_layout

WIDEST = 16384
PER_THREAD = 32
"""Values of a row per thread: four 16-byte pieces of a 2-byte type, all in flight at once."""


@triton.jit  # type: ignore[untyped-decorator]
def normed(  # type: ignore[no-untyped-def]
    row, columns, inside, scale, bias, eps, WIDTH: tl.constexpr, LAYER: tl.constexpr
):
    """Return the norm of a row, in its dtype. ``row`` is 0 outside of ``inside``; ``scale``: the float32 weight."""
    values = row.to(tl.float32)
    if LAYER:
        values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    result = values * tl.math.rsqrt(tl.sum(values * values, 0) / WIDTH + eps) * scale
    if LAYER:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return result.to(row.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    x, delta, out, weight, bias, eps, x_stride, delta_stride, out_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Normalise one row. ADD: ``x += delta`` first. LAYER: LayerNorm with ``bias``, else RMS norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x + row * x_stride + columns
    raw = tl.load(at, mask=inside, other=0.0)
    if ADD:
        change = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        raw = (raw.to(tl.float32) + change.to(tl.float32)).to(raw.dtype)
        tl.store(at, raw, mask=inside)
    else:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normed(raw, columns, inside, scale, bias, eps, WIDTH, LAYER)
    tl.store(out + row * out_stride + columns, result, mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of the rows of ``x`` [T, W], W ≤ 16384, or LayerNorm when there is a bias; ``weight``, ``bias`` [W].
    Takes float16, bfloat16 or float32; ``weight`` may be float32 beside any. Can be captured in a graph. Raises
    ValueError when the tensors do not fit."""
    _check(x, None, weight, bias)
    return _launch(x, None, weight, bias, eps)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``delta`` to ``x`` [T, W] in place; return ``x`` and its ``norm``. Raises as ``norm`` does."""
    _check(x, delta, weight, bias)
    return x, _launch(x, delta, weight, bias, eps)


def constants(width: int, *, add: bool, layer: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``_norm_rows``."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "ADD": add, "LAYER": layer}


def options(width: int) -> dict[str, int]:
    warps = triton.next_power_of_2(width) // (32 * PER_THREAD)
    return {"num_warps": min(16, max(1, warps)), "enable_fp_fusion": True}


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    rows, width = x.shape
    out = x.new_empty((rows, width))
    if rows:
        # Absent tensors are not read: any pointer stands in for them.
        change = x if delta is None else delta
        _norm_rows[(rows,)](
            x, change, out, weight, weight if bias is None else bias, eps,
            x.stride(0), change.stride(0), out.stride(0),
            **constants(width, add=delta is not None, layer=bias is not None), **options(width),
        )  # fmt: skip
    return out


def _check(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if x.dim() != 2 or not 0 < x.shape[1] <= WIDEST:
        raise ValueError(f"x is {tuple(x.shape)}, not [T, W] with W from 1 to {WIDEST}")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be float16, bfloat16 or float32")
    if delta is not None and (len(x) > 1 and x.stride(0) < x.shape[1]):
        raise ValueError("the rows of x overlap")
    width = (x.shape[1],)
    given = check_given([("delta", delta, tuple(x.shape)), ("bias", bias, width)], x.dtype)
    tensors = [x, *given, *check_given([("weight", weight, width)], x.dtype, torch.float32)]
    check_layout(tensors)
    check_device(tensors)
