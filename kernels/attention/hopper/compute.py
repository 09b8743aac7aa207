"""Compute roles of the Hopper attention kernel: two warp groups with the same code and separate rows."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from pensieve.kernels.attention.hopper.common import (
    FIRST_ROW,
    HEADER,
    ITEM,
    K_STAGES,
    KEYS,
    PARTIAL,
    POSITION,
    Q_SLOTS,
    Q_START,
    ROWS,
    SLAB,
    SPAN_ROWS,
    V_STAGES,
    first_seen,
    group_barrier,
    jit,
    next_work,
    program_works,
    tile_range,
)
from pensieve.kernels.attention.hopper.softmax import (
    LN_2,
    LOWEST,
    PER_ROW,
    SCORES,
    add_sinks,
    in_window,
    packed,
    scaled,
    unpacked,
    visible,
    weigh,
)


@jit
def _clear(v_pieces, stage, key, begin, end, DIM: gl.constexpr, PAGE: gl.constexpr, WINDOWED: gl.constexpr):  # type: ignore[no-untyped-def]
    """In the page of ``key``, which is ``begin`` or ``end``, zero the values from ``end`` on and, with WINDOWED, before
    ``begin``: they may be NaN, and a weight of 0 does not remove NaN. Both groups write the same bytes, so neither
    waits for the other; for that, each write of a page that holds both keys must apply both bounds."""
    PIECE: gl.constexpr = min(PAGE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    SLABS: gl.constexpr = DIM // SLAB
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if key % PIECE != 0:
        row = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(1, layout)), 1)
        for slab in gl.static_range(SLABS):
            piece = v_pieces.index((stage * SLABS + slab) * PIECES + key % KEYS // PIECE)
            values = piece.load(layout)
            if WINDOWED:
                at = key - key % PIECE + row
                kept = (at >= begin) & (at < end)
            else:
                kept = row < end % PIECE
            piece.store(gl.where(kept, values, gl.zeros_like(values)))
        fence()
        group_barrier()


@jit
def _walk(  # type: ignore[no-untyped-def]
    q, rings, signals, state, tile, count, seen, low, factor,
    GROUP: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Process ``count`` tiles downwards from ``tile``. Row i sees the keys below ``seen[i]``, with WINDOWED only those
    from ``low[i]`` on. ``state``: the sum so far; the weights of the previous tile,
    which the sum still lacks; maxima and denominators; tiles begun and turns taken since the start of the program."""
    acc, pairs, top, total, at, steps = state
    k_ring, v_ring, _ = rings
    _, _, k_full, k_empty, v_full, v_empty, turns = signals
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for back in range(count):
        k_stage = at % K_STAGES
        v_stage = at % V_STAGES
        last_stage = (at - 1) % V_STAGES
        mbarrier.wait(k_full.index(k_stage), at // K_STAGES & 1)
        # Start both products of a turn together: this tile's scores, and the last tile's weights times
        # values. Then the other group may start its own, and this group's softmax runs beside them.
        mbarrier.wait(turns.index(GROUP), steps & 1 ^ (1 - GROUP))
        none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        scores = mma(q, k_ring.index(k_stage).permute((1, 0)), none, use_acc=False, is_async=True)
        acc = mma(unpacked(pairs, dtype, operand), v_ring.index(last_stage), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - GROUP))
        scores = mma_wait(1, deps=(scores,))  # the scores are ready; the other product may still run
        mbarrier.arrive(k_empty.index(k_stage))
        if MASKED:
            scores = visible(scores, (tile - back) * KEYS, seen)
            if WINDOWED:
                scores = in_window(scores, (tile - back) * KEYS, low)
        weights, sums, top, shrink = weigh(scores, top, factor)
        # Wait for the next turn's values here: only a branch keeps the assembler from moving the wait below
        # in front of the softmax. The pairs are in use until then and must not be written before.
        mbarrier.wait(v_full.index(v_stage), at // V_STAGES & 1)
        acc = mma_wait(0, deps=(acc,))
        pairs = packed(weights, dtype)
        mbarrier.arrive(v_empty.index(last_stage))
        acc = scaled(acc, shrink)
        total = scaled(total, shrink) + sums
        at += 1
        steps += 1
    return acc, pairs, top, total, at, steps


@jit
def _attend_item(  # type: ignore[no-untyped-def]
    item, head, q, q_ready, q_phase, rings, signals, at, steps, factor, sinks, window,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    WINDOWED: gl.constexpr, SINKS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Return an item's weighted values [ROWS, DIM] and the log2 of its denominators, -inf without keys."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    k_ring, v_ring, v_pieces = rings
    _, _, k_full, k_empty, v_full, v_empty, _ = signals
    first, last, end = tile_range(item)
    position = gl.load(item + POSITION)
    first_row = gl.load(item + FIRST_ROW)
    # All rows see the tiles before this one.
    plain = gl.minimum(position + first_row // GROUPS + 1, end) // KEYS
    masked = gl.minimum(last - plain, last - first)
    row = first_row + GROUP * ROWS + gl.arange(0, ROWS, PER_ROW)
    seen = gl.minimum(position + 1 + row // GROUPS, end)
    low = seen
    begin = 0
    if WINDOWED:
        begin = first_seen(item, window, GROUPS)
        low = position + 1 + row // GROUPS - window

    # The last tile comes first, separately: no earlier weights need multiplying, and it may end inside a
    # page.
    k_stage = at % K_STAGES
    v_stage = at % V_STAGES
    mbarrier.wait(q_ready, q_phase)
    mbarrier.wait(k_full.index(k_stage), at // K_STAGES & 1)
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = mma(q, k_ring.index(k_stage).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(k_stage))
    lowest = gl.full([ROWS], LOWEST, gl.float32, PER_ROW)
    scores = visible(scores, (last - 1) * KEYS, seen)
    if WINDOWED:
        scores = in_window(scores, (last - 1) * KEYS, low)
    weights, total, top, _ = weigh(scores, lowest, factor)
    mbarrier.wait(v_full.index(v_stage), at // V_STAGES & 1)
    _clear(v_pieces, v_stage, end, begin, end, DIM, PAGE, WINDOWED)
    acc = gl.zeros([ROWS, DIM], gl.float32, acc_layout)
    state = (acc, packed(weights, dtype), top, total, at + 1, steps)
    state = _walk(
        q, rings, signals, state, last - 2, masked - 1, seen, low, factor, GROUP, True, WINDOWED, dtype
    )
    more = last - first - gl.maximum(masked, 1)
    if WINDOWED:
        # The last query sees nothing of the keys before this one, and the first queries see some of them.
        lowest_key = position + 1 + (first_row + 2 * ROWS - 1) // GROUPS - window
        bottom = gl.minimum(gl.maximum((lowest_key + KEYS - 1) // KEYS - first, 0), more)
        state = _walk(
            q, rings, signals, state, 0, more - bottom, seen, low, factor, GROUP, False, False, dtype
        )
        acc, pairs, top, total, at, steps = _walk(
            q, rings, signals, state, first + bottom - 1, bottom, seen, low, factor, GROUP, True, True, dtype
        )
    else:
        acc, pairs, top, total, at, steps = _walk(
            q, rings, signals, state, 0, more, seen, low, factor, GROUP, False, False, dtype
        )

    # The loop leaves one tile's weights that are still to be multiplied by its values.
    v_stage = (at - 1) % V_STAGES
    if WINDOWED:  # noqa: SIM102 - the outer one is decided when compiling
        if begin // KEYS == first:
            _clear(v_pieces, v_stage, begin, begin, end, DIM, PAGE, WINDOWED)
    acc = mma(unpacked(pairs, dtype, operand), v_ring.index(v_stage), acc, is_async=True)
    acc = mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(v_stage))
    row_total = gl.convert_layout(gl.sum(total, 1), PER_ROW)
    kept = 1.0
    if SINKS:
        # Once per row: here for a whole item, in the merge for pieces, and not where a row sees nothing.
        applies = (row_total > 0) & (gl.load(item + PARTIAL) < 0)
        row_total, top, kept = add_sinks(row_total, top, sinks + head * GROUPS + row % GROUPS, applies)
    divisor = gl.where(row_total > 0, row_total, 1.0)
    log2_sum = gl.where(row_total > 0, top + gl.log2(divisor), float("-inf"))
    return scaled(acc, kept / divisor), log2_sum, at, steps


@jit
def _store_rows(  # type: ignore[no-untyped-def]
    block, out, q_start, first_row, rows, head, out_token, out_head, GROUPS: gl.constexpr, DIM: gl.constexpr
):
    """Store a finished block of rows from shared memory, up to the rows of the span."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = (q_start + row // GROUPS).to(gl.int64)
    at = token * out_token + (head * GROUPS + row % GROUPS) * out_head
    dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    pointers = out + gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)
    gl.store(pointers, block.load(layout), mask=gl.expand_dims(row < rows, 1))


@jit
def compute(  # type: ignore[no-untyped-def]
    q_ring, rings, signals, inputs, GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BESIDE: gl.constexpr, LSE: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Role of one of the two warp groups: attend 64 of the 128 rows of each item."""
    words, out, lse, partial, partial_lse, partial_rows, out_token, out_head, factor, sinks, window = inputs
    dtype: gl.constexpr = out.dtype.element_ty
    works, programs, work = program_works(words, KV_HEADS, BESIDE)
    at = 0
    steps = 0
    turn = 0
    while work < works:
        head = work % KV_HEADS
        item = words + HEADER + work // KV_HEADS * ITEM
        slot = turn % Q_SLOTS
        q = q_ring.index(slot * 2 + GROUP)
        result, log2_sum, at, steps = _attend_item(
            item, head, q, signals[0].index(slot), turn // Q_SLOTS & 1, rings, signals, at, steps, factor, sinks,
            window, GROUP, GROUPS, DIM, PAGE, WINDOWED, SINKS, dtype,
        )  # fmt: skip
        first_row = gl.load(item + FIRST_ROW) + GROUP * ROWS
        rows = gl.load(item + SPAN_ROWS)
        scratch = gl.load(item + PARTIAL)
        row = first_row + gl.arange(0, ROWS, PER_ROW)
        if scratch < 0:
            q_start = gl.load(item + Q_START)
            q.store(result.to(dtype))  # the queries are no longer needed
            _store_rows(q, out, q_start, first_row, rows, head, out_token, out_head, GROUPS, DIM)
            if LSE:
                token = (q_start + row // GROUPS).to(gl.int64)
                at_lse = token * (KV_HEADS * GROUPS) + head * GROUPS + row % GROUPS
                gl.store(lse + at_lse, log2_sum * LN_2, mask=row < rows)
        else:
            layout: gl.constexpr = gl.SliceLayout(1, result.type.layout)
            at_row = head.to(gl.int64) * partial_rows + scratch + GROUP * ROWS + gl.arange(0, ROWS, PER_ROW)
            gl.store(partial_lse + at_row, log2_sum, mask=row < rows)
            at_row = gl.expand_dims(gl.convert_layout(at_row, layout), 1)
            valid = gl.expand_dims(gl.convert_layout(row < rows, layout), 1)
            dims = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, result.type.layout)), 0)
            gl.store(partial + at_row * DIM + dims, result, mask=valid)
        fence()
        mbarrier.arrive(signals[1].index(slot))
        turn += 1
        work = next_work(turn, programs)
