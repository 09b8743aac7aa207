"""Products of 8-bit codes on a GPU: codes of the inputs, a product with unit scales, and the scales.

Match ``pensieve.kernels.fp8_reference``. The product itself is cuBLASLt's. Unit scales with exact accumulation take
0.51 to 0.58 of bfloat16's time for the wide products of a 13B model; scales by row within the product take up to 0.93
(H100, 16 to 2,048 rows).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_given, check_layout

WIDEST = 65536
UNIT = 16
"""Rows and columns of a product come in multiples of this. Rows of padding cost nothing: a product of few rows takes
the time of reading the weight."""
PER_THREAD = 32
FEW_COLUMNS, MANY_COLUMNS = 256, 1024
LARGE_STEP_VALUES = 1 << 20
"""As in ``activation``."""


@triton.jit
def row_scale(bits):  # type: ignore[no-untyped-def]
    """Return the scale of a row whose largest value has these bits, without its sign, and 1 / scale; see
    ``fp8_reference.row_scales``."""
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    finite = bits < 0x7F800000
    scale = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x, codes, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the codes and the scale of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = row_scale(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    tl.store(codes + row * WIDTH + columns, (values * inverse).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _rescale(  # type: ignore[no-untyped-def]
    sums, out, rows, scales, bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr
):
    """Multiply the scales into BLOCK values of a row of ``sums``, and add the bias."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    value = tl.load(sums + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(rows + row) * tl.load(scales + columns, mask=inside, other=0.0)
    if BIASED:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x`` [T, I], I ≤ 65536, and the scales of its rows: e4m3 [R, I] and float32 [T], where R
    is T rounded up to a multiple of 16. Further rows are not set. Takes float16, bfloat16 or float32; can be captured
    in a graph. Raises ValueError when ``x`` does not fit."""
    if x.dim() != 2 or not 0 < x.shape[1] <= WIDEST:
        raise ValueError(f"x is {tuple(x.shape)}, not [T, I] with I from 1 to {WIDEST}")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be float16, bfloat16 or float32")
    check_layout([x])
    rows, width = x.shape
    codes = torch.empty((-(-rows // UNIT) * UNIT, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _quantise[(rows,)](x, codes, scales, x.stride(0), **row_constants(width), **row_options(width))
    return codes, scales


def rescale(
    sums: torch.Tensor,
    rows: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the first T rows of ``sums`` [R, O] times ``rows`` [T] and ``scales`` [O], plus ``bias`` [O], as
    ``dtype``; in the memory of ``sums`` if that has this dtype."""
    count, width = len(rows), sums.shape[1]
    out = (
        sums[:count] if sums.dtype == dtype else torch.empty((count, width), dtype=dtype, device=sums.device)
    )
    block = MANY_COLUMNS if out.numel() >= LARGE_STEP_VALUES else FEW_COLUMNS
    if count:
        _rescale[(count * triton.cdiv(width, block),)](
            sums, out, rows, scales, scales if bias is None else bias,
            **constants(width, block, biased=bias is not None), **options(block),
        )  # fmt: skip
    return out


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See ``fp8_reference.scaled_linear``; ``weight`` e4m3 [O, I]. The sums are rounded to bfloat16 before the scales
    if ``x`` has that dtype. Can be captured in a graph. Raises ValueError when the tensors do not fit."""
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"the weight is {weight.dtype} {tuple(weight.shape)}, not contiguous e4m3 [O, I]")
    out, inner = weight.shape
    if out % UNIT or inner % UNIT:
        raise ValueError(
            f"fp8 weights: a product of {inner} to {out} values, and a GPU takes multiples of {UNIT} only"
        )
    if x.dim() != 2 or x.shape[1] != inner:
        raise ValueError(f"x is {tuple(x.shape)}, not [T, {inner}]")
    given = check_given([("bias", bias, (out,))], x.dtype)
    check_device([x, weight, *check_given([("scales", scales, (out,))], torch.float32), *given])
    codes, rows = quantise_rows(x)
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32  # the sums exceed float16
    return rescale(multiply(codes, weight, dtype), rows, scales, bias, x.dtype)


def multiply(codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``codes`` [R, I] times the transpose of ``weight`` [O, I], both e4m3, with exact accumulation."""
    if not len(codes):
        return torch.empty((0, len(weight)), dtype=dtype, device=codes.device)
    one = _one(codes.device)
    return torch._scaled_mm(
        codes, weight.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=False
    )


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    """Kept: a graph reads it at every replay."""
    return torch.ones((), dtype=torch.float32, device=device)


def row_constants(width: int) -> dict[str, int]:
    """Compile-time arguments of ``_quantise``."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def row_options(width: int) -> dict[str, int]:
    warps = triton.next_power_of_2(width) // (32 * PER_THREAD)
    return {"num_warps": min(32, max(1, warps)), "enable_fp_fusion": False}


def constants(width: int, block: int, *, biased: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``_rescale``."""
    return {"WIDTH": width, "BLOCK": block, "BIASED": biased}


def options(block: int) -> dict[str, int]:
    return {"num_warps": block // FEW_COLUMNS, "enable_fp_fusion": False}
