"""Device code for one attention item: the loop over its keys, and the store of its result.

CODED: the pool holds codes (``kv_codec``). A tile decodes them to float16, which holds the codes of either dtype
exactly; queries have it too, divided by a power of two for each row, ``lift``. The exponent of a key and the lift
multiply the scores. The exponent of a value is added to the score of its key, whose unit is log2: weights are then
relative to the largest contribution, and fit float16 whatever the exponents are. Sums of weights undo it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pensieve.kernels import kv_codec, spans
from pensieve.kernels.attention import work_lists

Q_START, POSITION, TABLE = (
    tl.constexpr(spans.Q_START),
    tl.constexpr(spans.POSITION),
    tl.constexpr(spans.TABLE),
)
SPAN_ROWS, FIRST_ROW = tl.constexpr(work_lists.ROWS), tl.constexpr(work_lists.FIRST_ROW)
FIRST_KEY, END_KEY = tl.constexpr(work_lists.FIRST_KEY), tl.constexpr(work_lists.END_KEY)
PARTIAL = tl.constexpr(work_lists.PARTIAL)
"""Columns of an item."""
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NOT_FINITE = tl.constexpr(kv_codec.NOT_FINITE)
LOWEST = tl.constexpr(-1e38)
"""Initial maximum of a row: below every score but finite, so that a tile without visible keys gives weights of 0."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows(base, at, valid, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows of DIM values at ``at``, padded with 0 to WIDTH columns. MASKED: invalid rows are 0 and not read."""
    dims = tl.arange(0, WIDTH)
    pointers = base + at[:, None] + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM < WIDTH:
        rows = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2**exponent, float32; NaN for an exponent that says so."""
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == NOT_FINITE, float("nan"), power)


@triton.jit  # type: ignore[untyped-decorator]
def _lifted(block, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide the rows of ``block`` by powers of two, so that float16 holds them. Returns them, float32 if EXACT, and
    the powers."""
    wide = block.to(tl.float32)
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(tl.maximum((largest >> 23) - 127, -100), 100)
    scaled = wide * power_of_two(-exponent)[:, None]
    if not EXACT:
        scaled = scaled.to(tl.float16)
    return scaled, power_of_two(exponent)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Accurate to a few units of float32's precision of 1."""
    decay = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def add_sinks(acc, top, total, sinks, query_head, applies):  # type: ignore[no-untyped-def]
    """Add the sink of each row's query head to its softmax, as a logit without a value, where ``applies``."""
    sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
    sink = tl.where(applies, sink, float("-inf"))
    new_top = tl.maximum(top, sink)
    shrink = tl.math.exp2(top - new_top)
    return acc * shrink[:, None], new_top, total * shrink + tl.math.exp2(sink - new_top)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_by_pairs(x, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the columns of ``x``, neighbours first, so that the order does not depend on where a tile holds them."""
    ROWS: tl.constexpr = x.shape[0]
    for level in tl.static_range(1, 12):
        if COLUMNS >> level > 0:
            left, right = tl.split(tl.reshape(x, [ROWS, COLUMNS >> level, 2]))
            x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit
def fold(acc, top, total, part, part_top, part_total):  # type: ignore[no-untyped-def]
    """Add a piece to the sum of those before it; either has a weighted sum of values, the largest score and the sum of
    weights. Written with explicit fused operations, so that every kernel rounds alike."""
    new_top = tl.maximum(top, part_top)
    weight = tl.math.exp2(part_top - new_top)
    shrink = tl.math.exp2(top - new_top)
    acc = tl.fma(part, tl.broadcast_to(weight[:, None], part.shape), acc * shrink[:, None])
    return acc, new_top, tl.fma(part_total, weight, total * shrink)


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    q, seen, acc, top, total, pages, table, k_base, v_base, first, last, end, page_stride, slot_stride, factor, window,
    least, exponents, lift,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PIECE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[first, last)``, in units of log2. Row i sees the keys below ``seen[i]``, with
    WINDOWED the last ``window`` of them. Some row sees the first key of an item, so none lies below every window; with
    fixed pieces, those below ``least`` do.
    ``pages`` holds the page of every key of the next tile. A page id is loaded one tile before its keys,
    because the pipeline spends a stage on every link of a chain of loads. PIECE: ``total`` is [ROWS, KEYS],
    one sum for each column: its additions have one order in every tile, those of a row do not.
    CODED: exponents of keys begin at ``exponents`` in page 0, those of values CODED further."""
    columns = tl.arange(0, KEYS)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = start + columns
        at = pages.to(tl.int64) * page_stride + (keys % PAGE) * slot_stride
        if CODED > 0:
            exponents_at = exponents + pages.to(tl.int64) * page_stride + keys % PAGE
        coming = keys + KEYS
        pages = tl.load(table + coming // PAGE, mask=coming < end, other=0)
        k = _rows(k_base, at, keys < end, DIM, WIDTH, False)
        if CODED > 0:
            k_exponent = tl.load(exponents_at, mask=keys < end, other=0).to(tl.int32)
            v_exponent = tl.load(exponents_at + CODED, mask=keys < end, other=0).to(tl.int32)
            k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CODED > 0:
            scores = scores * power_of_two(k_exponent)[None, :] * lift[:, None]
        if SOFTCAP > 0:
            scores = _tanh(scores * SOFTCAP)
        if MASKED:
            scores = tl.where(keys[None, :] < seen[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(keys[None, :] >= seen[:, None] - window, scores, float("-inf"))
        # Weights are relative to the largest score so far. When it grows, the sums shrink with it.
        if CODED > 0:
            if PIECE > 0 and WINDOWED:
                v_exponent = tl.where(keys >= least, v_exponent, 0)
            added = tl.where(v_exponent == NOT_FINITE, float("nan"), v_exponent.to(tl.float32))
            scores = scores * factor + added[None, :]
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.math.exp2(scores - new_top[:, None])
            counted = weights * power_of_two(-v_exponent)[None, :]
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            weights = tl.math.exp2(scores * factor - new_top[:, None])
            counted = weights
        shrink = tl.math.exp2(top - new_top)
        # Slots beyond the last visible key may hold NaN, which a weight of 0 does not undo.
        if PIECE > 0 and WINDOWED:
            v = _rows(v_base, at, (keys < end) & (keys >= least), DIM, WIDTH, MASKED)
        else:
            v = _rows(v_base, at, keys < end, DIM, WIDTH, MASKED)
        if CODED > 0:
            v = v.to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        if PIECE > 0:
            total = tl.fma(total, tl.broadcast_to(shrink[:, None], weights.shape), counted)
        else:
            total = total * shrink + tl.sum(counted, 1)
        top = new_top
    return acc, top, total, pages


@triton.jit  # type: ignore[untyped-decorator]
def _attend_keys(  # type: ignore[no-untyped-def]
    item, block, row, table, k_base, v_base, start, end, page_stride, slot_stride, factor, window, exponents, lift,
    GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, SPLIT_MASK: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    PIECE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Attend a block of queries to the keys ``[start, end)``. Returns the weighted sum of values, the largest score and
    the sum of weights of each row."""
    position = tl.load(item + POSITION)
    first_row = tl.load(item + FIRST_ROW)
    keys = start + tl.arange(0, KEYS)
    pages = tl.load(table + keys // PAGE, mask=keys < end, other=0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if PIECE > 0:  # noqa: SIM108 - the shapes differ
        total = tl.zeros([ROWS, KEYS], tl.float32)
    else:
        total = tl.zeros([ROWS], tl.float32)
    top = tl.zeros([ROWS], tl.float32) + LOWEST
    least = position + first_row // GROUPS + 1 - window
    middle = start
    if SPLIT_MASK:
        plain = tl.minimum(position + first_row // GROUPS + 1, end)  # visible to all rows
        if WINDOWED:
            # Keys begin anywhere. Rows of later tokens do not see all of the first tiles.
            hidden = tl.maximum(position + (first_row + ROWS - 1) // GROUPS + 1 - window - start, 0)
            alike = start + (hidden + KEYS - 1) // KEYS * KEYS  # from here on, all windows have begun
            acc, top, total, pages = _walk(
                block, position + 1 + row // GROUPS, acc, top, total, pages, table, k_base, v_base, start,
                tl.minimum(alike, end), end, page_stride, slot_stride, factor, window, least, exponents, lift,
                DIM, WIDTH, PAGE, KEYS, STAGES, True, True, SOFTCAP, PIECE, CODED,
            )  # fmt: skip
            middle = tl.maximum(start + tl.maximum(plain - start, 0) // KEYS * KEYS, alike)
            start = alike
        else:
            middle = tl.maximum(plain // KEYS * KEYS, start)
        acc, top, total, pages = _walk(
            block, row, acc, top, total, pages, table, k_base, v_base, start, middle, end,
            page_stride, slot_stride, factor, window, least, exponents, lift,
            DIM, WIDTH, PAGE, KEYS, STAGES, False, False, SOFTCAP, PIECE, CODED,
        )  # fmt: skip
    # Load again: volatile, so that the compiler holds no registers for these during the first loop.
    seen = tl.load(item + POSITION, volatile=True) + 1
    seen += (tl.load(item + FIRST_ROW, volatile=True) + tl.arange(0, ROWS)) // GROUPS
    acc, top, total, pages = _walk(
        block, seen, acc, top, total, pages, table, k_base, v_base, middle, end, end,
        page_stride, slot_stride, factor, window, least, exponents, lift,
        DIM, WIDTH, PAGE, KEYS, STAGES, True, WINDOWED, SOFTCAP, PIECE, CODED,
    )  # fmt: skip
    if PIECE > 0:
        total = _sum_by_pairs(total, KEYS)
    return acc, top, total


@triton.jit  # type: ignore[untyped-decorator]
def attend_item(  # type: ignore[no-untyped-def]
    item, head, q, pool, tables, out, lse, partial, partial_lse, partial_total, partial_rows,
    q_token, q_head, page_stride, value_stride, head_stride, slot_stride, table_stride, out_token, out_head, factor,
    sinks, window, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SPLIT_MASK: tl.constexpr,
    LSE: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PIECE: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """Attend one item of one KV head. A whole item is stored to ``out``, a piece to the scratch. PIECE: the keys of a
    fixed piece, see ``kinds.Geometry``; 0: there are none. CODED: exponents of a page's keys; 0: the pool is plain."""
    rows = tl.load(item + SPAN_ROWS)
    table = tables + tl.load(item + TABLE).to(tl.int64) * table_stride
    first_row = tl.load(item + FIRST_ROW)
    start = tl.load(item + FIRST_KEY)
    end = tl.load(item + END_KEY)

    # The query heads of one KV head are rows of one block, so keys are read once for all of them.
    row = first_row + tl.arange(0, ROWS)
    token = (tl.load(item + Q_START) + row // GROUPS).to(tl.int64)
    q_at = token * q_token + (head * GROUPS + row % GROUPS) * q_head
    block = _rows(q, q_at, row < rows, DIM, WIDTH, True)
    k_base = pool + head * head_stride
    v_base = k_base + value_stride
    exponents, lift = k_base, row
    if CODED > 0:
        exponents = pool.to(tl.pointer_type(tl.int8)) + 2 * value_stride + head * PAGE
        block, lift = _lifted(block, q.dtype.element_ty == tl.float32)
    if PIECE > 0:
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.zeros([ROWS], tl.float32) + LOWEST
        first = tl.where(start < 2 * PIECE, start // PIECE, start // (2 * PIECE) + 1)
        beyond = tl.where(
            end <= 2 * PIECE, (end + PIECE - 1) // PIECE, (end + 2 * PIECE - 1) // (2 * PIECE) + 1
        )
        for number in tl.range(first, beyond, num_stages=1):
            begin = tl.maximum(start, tl.where(number < 2, number, 2 * number - 2) * PIECE)
            stop = tl.minimum(end, tl.where(number < 1, number + 1, 2 * number) * PIECE)
            part, part_top, part_total = _attend_keys(
                item, block, row, table, k_base, v_base, begin, stop,
                page_stride, slot_stride, factor, window, exponents, lift, GROUPS, DIM, WIDTH, PAGE, ROWS, KEYS,
                STAGES, SPLIT_MASK, WINDOWED, SOFTCAP, PIECE, CODED,
            )  # fmt: skip
            acc, top, total = fold(acc, top, total, part, part_top, part_total)
    else:
        acc, top, total = _attend_keys(
            item, block, row, table, k_base, v_base, start, end, page_stride, slot_stride, factor, window,
            exponents, lift, GROUPS, DIM, WIDTH, PAGE, ROWS, KEYS, STAGES, SPLIT_MASK, WINDOWED, SOFTCAP, PIECE, CODED,
        )  # fmt: skip

    if SINKS:
        # Once per row: here for a whole item, in the merge for pieces, and not where a row sees nothing.
        query_head = head * GROUPS + (tl.load(item + FIRST_ROW, volatile=True) + tl.arange(0, ROWS)) % GROUPS
        applies = (total > 0) & (tl.load(item + PARTIAL) < 0)
        acc, top, total = add_sinks(acc, top, total, sinks, query_head, applies)
    divisor = tl.where(total > 0, total, 1.0)
    result = acc / divisor[:, None]
    log2_sum = tl.where(total > 0, top + tl.math.log2(divisor), float("-inf"))
    q_start = tl.load(item + Q_START, volatile=True)
    row = tl.load(item + FIRST_ROW, volatile=True) + tl.arange(0, ROWS)
    valid = row < tl.load(item + SPAN_ROWS, volatile=True)
    scratch = tl.load(item + PARTIAL)
    dims = tl.arange(0, WIDTH)
    if scratch < 0:
        token = (q_start + row // GROUPS).to(tl.int64)
        query_head = head * GROUPS + row % GROUPS
        pointers = out + (token * out_token + query_head * out_head)[:, None] + dims[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=valid[:, None] & (dims < DIM)[None, :])
        if LSE:
            tl.store(lse + token * (KV_HEADS * GROUPS) + query_head, log2_sum * LN_2, mask=valid)
    else:
        at = head.to(tl.int64) * partial_rows + scratch + tl.arange(0, ROWS)
        if PIECE > 0:
            tl.store(partial + at[:, None] * WIDTH + dims[None, :], acc, mask=valid[:, None])
            tl.store(partial_lse + at, top, mask=valid)
            tl.store(partial_total + at, total, mask=valid)
        else:
            tl.store(partial + at[:, None] * WIDTH + dims[None, :], result, mask=valid[:, None])
            tl.store(partial_lse + at, log2_sum, mask=valid)
