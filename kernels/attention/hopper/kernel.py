"""Attention kernel for Hopper: one warp loads, and two warp groups compute.

Each multiprocessor runs one program with three roles. A single warp, the loader, keeps rings of key and value
tiles filled with bulk copies of whole pages. Two warp groups of 64 query rows each take the same tiles in the
same order. As in FlashAttention-3 (Shah et al. 2024), a group starts the products of the next tile's scores
and of the last tile's values, and computes its softmax while they run. The groups alternate, so that the
softmax of one overlaps the products of the other (ping-pong). Plain Triton cannot express this, hence Gluon.

Keys are processed from the last to the first, so that only the first few tiles need a mask; with a window the
last few do too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from pensieve.kernels.attention.hopper.common import (
    K_STAGES,
    KEYS,
    Q_SLOTS,
    ROWS,
    SLAB,
    V_STAGES,
    jit,
    seen_as,
)
from pensieve.kernels.attention.hopper.compute import compute
from pensieve.kernels.attention.hopper.loader import load

GROUP_REGISTERS, LOADER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@jit
def _signals(number: gl.constexpr, arrivals: gl.constexpr):  # type: ignore[no-untyped-def]
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(bars.index(index), arrivals)
    return bars


@gluon.jit(do_not_specialize=["partial_rows", "table_stride", "window"])  # type: ignore[untyped-decorator]
def attend_hopper(  # type: ignore[no-untyped-def]
    q_desc, pool_desc, tables, out, lse, words, partial, partial_lse, partial_rows, table_stride,
    out_token, out_head, page_rows, value_rows, head_rows, factor, sinks, window,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BESIDE: gl.constexpr, LSE: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Attend the wide items of a plan (``attention.work_lists``). BESIDE: let the next launch begin at once,
    and leave it the multiprocessors that the plan does not reserve for wide items."""
    if BESIDE:
        gdc_launch_dependents()
    PIECE: gl.constexpr = min(PAGE, KEYS)
    PARTS: gl.constexpr = KEYS // PIECE * (DIM // SLAB)
    dtype: gl.constexpr = out.dtype.element_ty
    # A tile in shared memory is a sequence of 64-column slabs, and a slab is a sequence of pages. It is
    # viewed as one operand, or as the pieces that bulk copies write.
    k_pieces = gl.allocate_shared_memory(dtype, [K_STAGES * PARTS, PIECE, SLAB], pool_desc.layout)
    v_pieces = gl.allocate_shared_memory(dtype, [V_STAGES * PARTS, PIECE, SLAB], pool_desc.layout)
    q_parts: gl.constexpr = Q_SLOTS * 2 * (DIM // SLAB)
    q_pieces = gl.allocate_shared_memory(dtype, [q_parts, ROWS // GROUPS, GROUPS, SLAB], q_desc.layout)
    k_ring = seen_as(k_pieces, dtype, [K_STAGES, KEYS, DIM], TILE)
    v_ring = seen_as(v_pieces, dtype, [V_STAGES, KEYS, DIM], TILE)
    q_ring = seen_as(q_pieces, dtype, [Q_SLOTS * 2, ROWS, DIM], TILE)
    # One full and one empty barrier for each place of the three rings, filled by one loader and emptied by
    # two groups; and the groups' turns.
    signals = (
        _signals(Q_SLOTS, 1), _signals(Q_SLOTS, 2), _signals(K_STAGES, 1), _signals(K_STAGES, 2),
        _signals(V_STAGES, 1), _signals(V_STAGES, 2), _signals(2, 1),
    )  # fmt: skip
    fence()
    rings = (k_ring, v_ring, v_pieces)
    outputs = (
        words, out, lse, partial, partial_lse, partial_rows, out_token, out_head, factor, sinks, window,
    )  # fmt: skip
    inputs = (words, tables, table_stride, page_rows, value_rows, head_rows, window)
    gl.warp_specialize(
        [
            (compute, (
                q_ring, rings, signals, outputs, gl.constexpr(0), KV_HEADS, GROUPS, DIM, PAGE, BESIDE, LSE,
                WINDOWED, SINKS,
            )),
            (compute, (
                q_ring, rings, signals, outputs, gl.constexpr(1), KV_HEADS, GROUPS, DIM, PAGE, BESIDE, LSE,
                WINDOWED, SINKS,
            )),
            (load, (
                (q_desc, pool_desc), (q_pieces, k_pieces, v_pieces), signals, inputs, KV_HEADS, GROUPS, DIM,
                PAGE, BESIDE, WINDOWED,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
