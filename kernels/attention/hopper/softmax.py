"""Online softmax of one warp group of the Hopper attention kernel: 64 query rows, 128 keys at a time.

Scores stay in the registers where the matrix unit leaves them, and weights return to it from registers.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from pensieve.kernels.attention.hopper.common import KEYS, ROWS, jit

LOG2_E, LN_2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e38)
"""Initial maximum of a row: below every score but finite, so that a tile without visible keys gives weights of 0."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Register layout of scores [ROWS, KEYS]: a lane holds two adjacent columns of every eight."""
PER_ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
PER_KEY = gl.constexpr(gl.SliceLayout(0, SCORES.value))


@jit
def visible(scores, first_key, seen):  # type: ignore[no-untyped-def]
    """Mask scores of the keys from ``first_key`` on: -inf for keys from ``seen`` of their row on."""
    columns = gl.arange(0, KEYS, PER_KEY)
    return gl.where(gl.expand_dims(columns, 0) < gl.expand_dims(seen - first_key, 1), scores, float("-inf"))


@jit
def in_window(scores, first_key, low):  # type: ignore[no-untyped-def]
    """Mask scores of the keys from ``first_key`` on: -inf for keys below ``low`` of their row."""
    columns = gl.arange(0, KEYS, PER_KEY)
    return gl.where(gl.expand_dims(columns, 0) >= gl.expand_dims(low - first_key, 1), scores, float("-inf"))


@jit
def weigh(scores, top, factor):  # type: ignore[no-untyped-def]
    """Return the weights of a tile relative to the rows' new maxima, in units of log2. Returns weights [ROWS,
    KEYS]; their sums per row and lane, [ROWS, 4], to be added over the lanes once at the end; the maxima; the
    factor by which older results shrink."""
    # Reduce along the repeating columns first: two chains of operations per row and lane instead of one.
    tops = gl.max(gl.reshape(scores, [ROWS, KEYS // 8, 8]), 1)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(tops, 1), PER_ROW) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(new_top, 1))
    sums = gl.sum(gl.sum(gl.reshape(weights, [ROWS, KEYS // 8, 4, 2]), 1), 2)
    return weights, sums, new_top, gl.exp2(top - new_top)


@jit
def add_sinks(total, top, sinks, applies):  # type: ignore[no-untyped-def]
    """Add the logit without a value at ``sinks`` to each row's softmax where ``applies``. Returns the denominators,
    the maxima, and the factor by which older results shrink."""
    sink = gl.where(applies, gl.load(sinks).to(gl.float32) * LOG2_E, float("-inf"))
    new_top = gl.maximum(top, sink)
    shrink = gl.exp2(top - new_top)
    return total * shrink + gl.exp2(sink - new_top), new_top, shrink


@jit
def scaled(values, scale):  # type: ignore[no-untyped-def]
    """``values`` [ROWS, n] times ``scale`` [ROWS]."""
    layout: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    return values * gl.expand_dims(gl.convert_layout(scale, layout), 1)


@jit
def packed(weights, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Pack weights as pairs of 16-bit values in int32 [ROWS, KEYS / 2]. Carried through a loop one by one,
    they would be taken apart and reassembled."""
    low, high = gl.split(gl.reshape(weights, [ROWS, KEYS // 2, 2]))
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    return pairs


@jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights of ``pairs`` as the first operand of a matrix product, without moving data."""
    low = (pairs & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [ROWS, KEYS]), layout)
