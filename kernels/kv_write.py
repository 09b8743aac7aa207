"""Prepares heads for attention and stores keys and values in their pages: one launch, in Triton.

Matches ``pensieve.kernels.reference.kv_write``, including its rounding: each operation is computed in float32
and rounded to the tensor's dtype after the norm and after each product and sum of the rotation. Without head
norms the results equal the reference's bit for bit; with them, up to the order of one sum. In a coded pool
(``kv_codec``) the result of that is encoded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pensieve.kernels import kv_codec
from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.attention.tiles import width_of
from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_given, check_layout

PER_WARP = 256
"""Columns of each half of a head per warp: 16 bytes of a 2-byte type per thread."""
FEW_WARPS, MANY_WARPS = 1, 4
LEAST, MOST = tl.constexpr(kv_codec.LEAST), tl.constexpr(kv_codec.MOST)
NOT_FINITE = tl.constexpr(kv_codec.NOT_FINITE)
LARGE_STEP_VALUES = 1 << 22
"""From this many values on, a step uses large programs: they fill any device, and fewer of them start."""


@triton.jit
def _rotated(x, y, cos, sin):  # type: ignore[no-untyped-def]
    """``x * cos + y * sin`` in float32, with every product and the sum rounded to the dtype of ``x``."""
    dtype = x.dtype
    first = (x.to(tl.float32) * cos).to(dtype).to(tl.float32)
    second = (y.to(tl.float32) * sin).to(dtype).to(tl.float32)
    return (first + second).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(query_norm, key_norm, head, valid, dims, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the norm weights of each head. Two loads, each for its own heads: through a pointer chosen per
    head, a load would read value by value."""
    at = tl.broadcast_to(dims[None, :], valid.shape)
    query_weights = tl.load(query_norm + at, mask=valid & (head < HEADS)[:, None], other=0.0)
    key_weights = tl.load(key_norm + at, mask=valid & (head >= HEADS)[:, None], other=0.0)
    return query_weights.to(tl.float32) + key_weights.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _encoded(left, right, code: tl.constexpr, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of both halves of heads [BLOCK, WIDTH], and the exponents int32 [BLOCK]."""
    x, y = left.to(tl.float32), right.to(tl.float32)
    # As integers: NaN is then the largest of all.
    largest = tl.max((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1)
    largest = tl.maximum(largest, tl.max((y.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1))
    exponent = (largest >> 23) - 127 - TOP
    known = exponent <= MOST
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    x, y = tl.where(known[:, None], x, 0.0) * scale, tl.where(known[:, None], y, 0.0) * scale
    if code == tl.int8:
        # Adding and subtracting 1.5 * 2**23 rounds to an integer, ties to even.
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
        y = tl.minimum(tl.maximum((y + 12582912.0) - 12582912.0, -127.0), 127.0)
    if code == tl.int8:
        left_codes, right_codes = x.to(code), y.to(code)
    else:
        left_codes, right_codes = x.to(code, "rtne"), y.to(code, "rtne")
    return left_codes, right_codes, tl.where(known, exponent, NOT_FINITE)


@triton.jit  # type: ignore[untyped-decorator]
def _prepare_and_store(  # type: ignore[no-untyped-def]
    qkv, pool, slots, cos, sin, query_norm, key_norm, eps,
    token_stride, head_stride, page_stride, value_stride, pool_head_stride, slot_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Process BLOCK heads of one token, as two halves of WIDTH columns of which DIM // 2 count. TOP: of a coded pool,
    see ``kv_codec``; 0: the pool is plain."""
    # Unchanged queries are not touched.
    FIRST: tl.constexpr = 0 if NORM or TURN else HEADS
    LAST: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    BLOCKS: tl.constexpr = (LAST - FIRST + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // BLOCKS).to(tl.int64)
    head = FIRST + program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, WIDTH)
    valid = (head < LAST)[:, None] & (dims < HALF)[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    at = qkv + token * token_stride + (head * head_stride)[:, None] + dims[None, :]
    left = tl.load(at, mask=valid, other=0.0)
    right = tl.load(at + HALF, mask=valid, other=0.0)
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    new_left, new_right = left, right
    if NORM:
        x, y = left.to(tl.float32), right.to(tl.float32)
        mean_square = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM
        factor = tl.math.rsqrt(mean_square + eps)[:, None]
        weights = _weights(query_norm, key_norm, head, valid, dims, HEADS)
        new_left = (x * factor * weights).to(left.dtype)
        weights = _weights(query_norm + HALF, key_norm + HALF, head, valid, dims, HEADS)
        new_right = (y * factor * weights).to(left.dtype)
    if TURN:
        # Read once per head, in the layout of the heads: cheaper than spreading one copy through shared
        # memory.
        angle = tl.broadcast_to(token * cos_stride + dims[None, :], [BLOCK, WIDTH])
        cosine = tl.load(cos + angle, mask=valid, other=0.0).to(tl.float32)
        angle = tl.broadcast_to(token * sin_stride + dims[None, :], [BLOCK, WIDTH])
        sine = tl.load(sin + angle, mask=valid, other=0.0).to(tl.float32)
        before = new_left
        new_left = _rotated(before, new_right, cosine, -sine)
        new_right = _rotated(new_right, before, cosine, sine)
    if NORM or TURN:
        new_left = tl.where(is_value, left, new_left)
        new_right = tl.where(is_value, right, new_right)
        queries = valid & (head < HEADS)[:, None]
        tl.store(at, new_left, mask=queries)
        tl.store(at + HALF, new_right, mask=queries)
    stored = head - HEADS
    to = pool + slot // PAGE * page_stride + slot % PAGE * slot_stride
    to += (stored // KV_HEADS).to(tl.int64)[:, None] * value_stride
    to += (stored % KV_HEADS).to(tl.int64)[:, None] * pool_head_stride + dims[None, :]
    stays = (head < LAST) & (tl.where(head >= HEADS, slot, -1) >= 0)
    kept = valid & stays[:, None]
    if TOP > 0:
        new_left, new_right, exponent = _encoded(new_left, new_right, pool.dtype.element_ty, TOP)
        behind = pool.to(tl.pointer_type(tl.int8)) + slot // PAGE * page_stride + 2 * KV_HEADS * PAGE * DIM
        tl.store(behind + stored * PAGE + slot % PAGE, exponent.to(tl.int8), mask=stays)
    tl.store(to, new_left, mask=kept)
    tl.store(to + HALF, new_right, mask=kept)


def kv_write(
    kv_pool_of_layer: torch.Tensor,
    qkv: torch.Tensor,
    slots: torch.Tensor,
    prep: HeadPrep,
    *,
    one_size: bool = False,
) -> torch.Tensor:
    """Prepare query and key heads in place and store keys and values. Returns the queries, a view of ``qkv``.

    See the reference for the full contract. D even, at most 256; ``cos`` and ``sin`` have the dtype of ``qkv``:
    float16, bfloat16 or float32. The pool has it unless it is coded. Norm weights have it, too, or are float32.
    ``one_size``: programs of one size in every step, so that the sums of head norms have one order. Can be captured in
    a graph.
    Raises ValueError when the tensors do not fit each other.
    """
    _check(kv_pool_of_layer, qkv, slots, prep)
    pool, (tokens, all_heads, dim) = kv_pool_of_layer, qkv.shape
    kv_heads = pool.shape[2]
    heads = all_heads - 2 * kv_heads
    norm, turn = prep.query_norm is not None, prep.cos is not None
    block = heads_per_program(qkv, one_size=one_size)
    touched = all_heads if norm or turn else 2 * kv_heads
    if tokens:
        # Absent tensors are not read: any pointer stands in for them.
        cos, sin = _or_unused(prep.cos, qkv), _or_unused(prep.sin, qkv)
        _prepare_and_store[(tokens * triton.cdiv(touched, block),)](
            qkv, pool, slots, cos, sin, _or_unused(prep.query_norm, qkv), _or_unused(prep.key_norm, qkv), prep.eps,
            qkv.stride(0), qkv.stride(1), *pool.stride()[:4], cos.stride(0), sin.stride(0),
            **constants(pool, heads, block, norm=norm, turn=turn), **options(block, dim),
        )  # fmt: skip
    return qkv[:, :heads]


def heads_per_program(qkv: torch.Tensor, *, one_size: bool = False) -> int:
    warps = MANY_WARPS if qkv.numel() >= LARGE_STEP_VALUES and not one_size else FEW_WARPS
    return warps * PER_WARP // _half_width(qkv.shape[2])


def constants(pool: torch.Tensor, heads: int, block: int, *, norm: bool, turn: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``_prepare_and_store``; of ``pool``, only shape and dtype matter."""
    _, _, kv_heads, page_tokens, dim = pool.shape
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": _half_width(dim), "PAGE": page_tokens,
        "BLOCK": block, "NORM": norm, "TURN": turn, "TOP": kv_codec.TOP.get(pool.dtype, 0),
    }  # fmt: skip


def options(block: int, dim: int) -> dict[str, int]:
    """Compiler options of ``_prepare_and_store``: without fused multiply-add, which would skip a rounding."""
    return {"num_warps": block * _half_width(dim) // PER_WARP, "enable_fp_fusion": False}


def _half_width(dim: int) -> int:
    return width_of(dim) // 2


def _or_unused(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def _check(pool: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor, prep: HeadPrep) -> None:
    if pool.dim() != 5 or pool.shape[1] != 2 or qkv.dim() != 3:
        raise ValueError("the pool must be [P, 2, Hkv, N, D], qkv [T, Hq + 2 * Hkv, D]")
    tokens, all_heads, dim = qkv.shape
    width_of(dim)
    heads, kv_heads = all_heads - 2 * pool.shape[2], pool.shape[2]
    if pool.shape[4] != dim or dim % 2 or heads < 1 or heads % kv_heads:
        raise ValueError(f"{all_heads} heads of {dim} values do not fit a pool of {tuple(pool.shape)}")
    kv_codec.check_pool(pool, qkv.dtype, FLOAT_DTYPES)
    if slots.shape != (tokens,) or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(
            f"slots are {slots.dtype} {tuple(slots.shape)}, not contiguous int32 or int64 [{tokens}]"
        )
    if (prep.cos is None) != (prep.sin is None) or (prep.query_norm is None) != (prep.key_norm is None):
        raise ValueError("cos and sin, and the norms of queries and keys, are given together or not at all")
    angles = [("cos", prep.cos, (tokens, dim // 2)), ("sin", prep.sin, (tokens, dim // 2))]
    norms = [("query_norm", prep.query_norm, (dim,)), ("key_norm", prep.key_norm, (dim,))]
    tensors = [qkv, pool, *check_given(angles, qkv.dtype), *check_given(norms, qkv.dtype, torch.float32)]
    check_layout(tensors)
    check_device([*tensors, slots])
