"""The products of a mixture of experts in Triton. Match ``pensieve.kernels.expert_reference``.

One program computes a tile of rows of one expert by a block of columns. Only the device knows how many rows each expert
has, so the grid has as many row tiles as there can be, and the programs beyond the last tile return. No call waits for
the device: a graph can capture them.

``torch.nn.functional.grouped_mm`` (torch 2.11) is not used: with float32 and float16 it waits for the device, it has no
bias, and at decode it takes 1.4 to 1.6 times as long (``bench/results/experts.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pensieve.kernels.checks import FLOAT_DTYPES

GLU_COLUMNS = 512
"""Results per program of ``clamped_glu``."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sizes of the product kernel."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


TILINGS = (
    (8, Tiling(16, 128, 128, 4, 3)),
    (24, Tiling(32, 64, 128, 4, 4)),
    (64, Tiling(64, 128, 64, 4, 3)),
)
"""By the largest average of rows per expert. With few rows, reading the weights takes the time; a tile has room for the
rows of most experts, or their weights would be read twice."""
MANY_ROWS = Tiling(128, 256, 64, 8, 3)
EXACT = Tiling(16, 64, 32, 4, 3)
"""float32, which is computed without TF32."""
TILES_TOGETHER = 8
"""Row tiles that go through all columns side by side, so that their rows stay in the L2 cache."""


@triton.jit  # type: ignore[untyped-decorator]
def _grouped_product(  # type: ignore[no-untyped-def]
    x, weight, bias, ends, read, write, out, experts, inputs, columns,
    x_stride, expert_stride, input_stride, column_stride, bias_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_READ: tl.constexpr, HAS_WRITE: tl.constexpr
):  # fmt: skip
    """Compute the rows of one tile and COLUMNS columns. WHOLE: INPUTS divides the inputs."""
    program = tl.program_id(0)
    blocks = tl.cdiv(columns, COLUMNS)
    tile = program // (TOGETHER * blocks) * TOGETHER + program % TOGETHER
    block = program % (TOGETHER * blocks) // TOGETHER
    number = tl.arange(0, EXPERTS)
    known = number < experts
    end = tl.load(ends + number, mask=known, other=0)
    start = tl.load(ends + number - 1, mask=known & (number > 0), other=0)
    tiles = tl.where(known, (end - start + ROWS - 1) // ROWS, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    if expert >= experts:  # beyond the last tile
        return
    mine = number == expert
    first = tl.sum(tl.where(mine, start + (tile - tiles_up_to + tiles) * ROWS, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    row = first + tl.arange(0, ROWS)
    inside = row < last
    source = row.to(tl.int64)
    if HAS_READ:
        source = tl.load(read + row, mask=inside, other=0).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    existing = column < columns
    step = tl.arange(0, INPUTS)
    x_at = x + source[:, None] * x_stride + step[None, :]
    weight_at = weight + expert.to(tl.int64) * expert_stride
    weight_at += step[:, None].to(tl.int64) * input_stride + column[None, :].to(tl.int64) * column_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in tl.range(0, inputs, INPUTS):
        if WHOLE:
            left = tl.load(x_at, mask=inside[:, None], other=0.0)
            right = tl.load(weight_at, mask=existing[None, :], other=0.0)
        else:
            left = tl.load(x_at, mask=inside[:, None] & (step[None, :] < inputs - done), other=0.0)
            right = tl.load(weight_at, mask=existing[None, :] & (step[:, None] < inputs - done), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_at += INPUTS
        weight_at += INPUTS * input_stride
    result = total.to(out.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + expert.to(tl.int64) * bias_stride + column, mask=existing, other=0.0)
        result = (result.to(tl.float32) + added.to(tl.float32)[None, :]).to(out.dtype.element_ty)
    target = row.to(tl.int64)
    if HAS_WRITE:
        target = tl.load(write + row, mask=inside, other=0).to(tl.int64)
    out_at = out + target[:, None] * columns + column[None, :]
    tl.store(out_at, result, mask=inside[:, None] & existing[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _clamped_glu(  # type: ignore[no-untyped-def]
    up, out, alpha, limit, up_stride, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute BLOCK of the INNER results of a row."""
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    at = up + row * up_stride + 2 * columns
    raw = tl.load(at, mask=inside, other=0.0)
    kind = raw.dtype
    gate = raw.to(tl.float32)
    value = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    # Comparisons, since minimum may drop a NaN.
    gate = tl.where(gate > limit, limit, gate)
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    scaled = (gate * alpha).to(kind).to(tl.float32)
    share = (1.0 / (1.0 + tl.math.exp(-scaled))).to(kind).to(tl.float32)
    gated = (gate * share).to(kind).to(tl.float32)
    result = (value + 1.0).to(kind).to(tl.float32) * gated
    tl.store(out + row * INNER + columns, result.to(kind), mask=inside)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``expert_reference.grouped_product``. Takes float16, bfloat16 or float32. Raises ValueError when shapes,
    dtypes or layouts do not fit."""
    _check(x, weight, bias, ends, read, write)
    rows = len(x) if read is None else len(read)
    experts, inputs, columns = weight.shape
    out = x.new_empty((rows, columns))
    if not rows:
        return out
    tiling = tiling_of(rows, experts, x.dtype)
    # Each expert has at most one tile that is not full.
    tiles = min(rows, experts) + rows // tiling.rows
    groups = triton.cdiv(tiles, TILES_TOGETHER)
    _grouped_product[(groups * TILES_TOGETHER * triton.cdiv(columns, tiling.columns),)](
        x,
        weight,
        bias,
        ends,
        read,
        write,
        out,
        experts,
        inputs,
        columns,
        x.stride(0),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        **constants(
            inputs, experts, tiling, bias=bias is not None, read=read is not None, write=write is not None
        ),
        **options(tiling),
    )
    return out


def constants(
    inputs: int, experts: int, tiling: Tiling, *, bias: bool, read: bool, write: bool
) -> dict[str, int | bool]:
    """Compile-time arguments of ``_grouped_product``."""
    return {
        "EXPERTS": triton.next_power_of_2(experts),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "INPUTS": tiling.inputs,
        "TOGETHER": TILES_TOGETHER,
        "WHOLE": inputs % tiling.inputs == 0,
        "HAS_BIAS": bias,
        "HAS_READ": read,
        "HAS_WRITE": write,
    }


def options(tiling: Tiling) -> dict[str, int | bool]:
    return {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": True}


def tiling_of(rows: int, experts: int, dtype: torch.dtype) -> Tiling:
    """Return the block sizes for this many rows over all experts."""
    if dtype == torch.float32:
        return EXACT
    return next((tiling for most, tiling in TILINGS if rows <= most * experts), MANY_ROWS)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    read: torch.Tensor | None,
    write: torch.Tensor | None,
) -> None:
    """Raises ValueError when the arguments of a product do not fit."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, not [rows, I] and [E, I, O]"
        )
    if x.dtype not in FLOAT_DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype} and weight {weight.dtype}: both must be float16, bfloat16 or float32"
        )
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError("the last dimension of x must be contiguous")
    if ends.shape != weight.shape[:1] or ends.dtype != torch.int32 or not ends.is_contiguous():
        raise ValueError(f"ends is {ends.dtype} {tuple(ends.shape)}, not int32 {tuple(weight.shape[:1])}")
    if bias is not None and (bias.shape != weight.shape[::2] or bias.dtype != x.dtype or bias.stride(1) != 1):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}, not {x.dtype} {tuple(weight.shape[::2])}"
        )
    rows = len(x) if read is None else len(read)
    for name, index in (("read", read), ("write", write)):
        if index is not None and (index.shape != (rows,) or not index.is_contiguous()):
            raise ValueError(f"{name} is {tuple(index.shape)}, not contiguous [{rows}]")


def clamped_glu(up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``expert_reference.clamped_glu``. Takes float16, bfloat16 or float32. Raises ValueError when ``up`` has
    another shape, dtype or layout."""
    if up.dim() != 2 or up.shape[1] % 2 or not up.shape[1] or up.stride(1) != 1:
        raise ValueError(
            f"up is {tuple(up.shape)}, strides {up.stride()}, not [T, 2 * I] with contiguous rows"
        )
    if up.dtype not in FLOAT_DTYPES:
        raise ValueError(f"up is {up.dtype}: it must be float16, bfloat16 or float32")
    rows, inner = up.shape[0], up.shape[1] // 2
    out = up.new_empty((rows, inner))
    if rows:
        grid = (rows * triton.cdiv(inner, GLU_COLUMNS),)
        _clamped_glu[grid](
            up, out, alpha, limit, up.stride(0), INNER=inner, BLOCK=GLU_COLUMNS, enable_fp_fusion=True
        )
    return out
