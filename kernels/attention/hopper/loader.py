"""Loader of the Hopper attention kernel: one warp that keeps shared memory filled."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pensieve.kernels.attention.hopper.common import (
    FIRST_ROW,
    HEADER,
    ITEM,
    K_STAGES,
    KEYS,
    Q_SLOTS,
    Q_START,
    ROWS,
    SLAB,
    TABLE,
    V_STAGES,
    bulk_load,
    first_seen,
    jit,
    next_work,
    program_works,
    tile_range,
)

NOWHERE = gl.constexpr(-256)
"""A row outside the pool: a bulk copy from there writes zeros."""


@jit
def load(  # type: ignore[no-untyped-def]
    descriptors, pieces, signals, inputs,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BESIDE: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Role of the loader: load queries one item ahead, and key and value tiles as soon as their slots are free."""
    q_desc, pool_desc = descriptors
    q_pieces, k_pieces, v_pieces = pieces
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = signals
    words, tables, table_stride, page_rows, value_rows, head_rows, window = inputs
    PIECE: gl.constexpr = min(PAGE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    SLABS: gl.constexpr = DIM // SLAB
    works, programs, work = program_works(words, KV_HEADS, BESIDE)
    at = 0
    turn = 0
    while work < works:
        head = work % KV_HEADS
        item = words + HEADER + work // KV_HEADS * ITEM
        token = gl.load(item + Q_START) + gl.load(item + FIRST_ROW) // GROUPS
        table = tables + gl.load(item + TABLE).to(gl.int64) * table_stride
        first, last, end = tile_range(item)
        begin = 0
        if WINDOWED:
            begin = first_seen(item, window, GROUPS)

        slot = turn % Q_SLOTS
        mbarrier.wait(q_empty.index(slot), turn // Q_SLOTS & 1 ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * ROWS * DIM * 2)
        for group in gl.static_range(2):
            for slab in gl.static_range(SLABS):
                bulk_load(
                    q_desc, [token + group * (ROWS // GROUPS), head * GROUPS, slab * SLAB], q_full.index(slot),
                    q_pieces.index((slot * 2 + group) * SLABS + slab),
                )  # fmt: skip
        for back in range(last - first):
            tile = last - 1 - back
            # Rows of this tile's pages in the pool, computed once for keys and values.
            rows = ()
            for piece in gl.static_range(PIECES):
                key = tile * KEYS + piece * PIECE
                there = key < end
                if WINDOWED:
                    there = there & (key + PIECE > begin)
                page = gl.load(table + key // PAGE, mask=there, other=0)
                row = page * page_rows + head * head_rows + key % PAGE
                row = gl.where(there, row, NOWHERE)
                rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - tuples on the device know no stars
            stage = at % K_STAGES
            mbarrier.wait(k_empty.index(stage), at // K_STAGES & 1 ^ 1)
            mbarrier.expect(k_full.index(stage), KEYS * DIM * 2)
            for piece in gl.static_range(PIECES):
                for slab in gl.static_range(SLABS):
                    place = k_pieces.index((stage * SLABS + slab) * PIECES + piece)
                    bulk_load(pool_desc, [rows[piece], slab * SLAB], k_full.index(stage), place)
            stage = at % V_STAGES
            mbarrier.wait(v_empty.index(stage), at // V_STAGES & 1 ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * DIM * 2)
            for piece in gl.static_range(PIECES):
                row = gl.where(rows[piece] < 0, NOWHERE, rows[piece] + value_rows)
                for slab in gl.static_range(SLABS):
                    place = v_pieces.index((stage * SLABS + slab) * PIECES + piece)
                    bulk_load(pool_desc, [row, slab * SLAB], v_full.index(stage), place)
            at += 1
        turn += 1
        work = next_work(turn, programs)
