"""Device code that merges the pieces of an item, by a launch of its own or by the program that finishes the last piece.

Either adds pieces up in the order in which they were cut, never in that in which they were finished: results are the
same whichever does it and whoever comes last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from pensieve.kernels.attention import work_lists
from pensieve.kernels.attention.items import LOWEST

MERGE = tl.constexpr(work_lists.MERGE)


@triton.jit  # type: ignore[untyped-decorator]
def merge_rows(  # type: ignore[no-untyped-def]
    merge, head, out, lse, partial, partial_lse, partial_rows, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, LSE: tl.constexpr, WAIT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Add up the results of an item's pieces by their softmax denominators, up to ROWS rows of one KV head. WAIT: until
    the launch before has ended. CACHE: through which caches pieces are read."""
    dims = tl.arange(0, WIDTH)
    row = tl.load(merge + 1) + tl.arange(0, ROWS)
    valid = row < tl.load(merge + 2)
    token = (tl.load(merge) + row // GROUPS).to(tl.int64)
    query_head = head * GROUPS + row % GROUPS
    base = head.to(tl.int64) * partial_rows + tl.load(merge + 3) + tl.arange(0, ROWS)
    pieces = tl.load(merge + 4)
    apart = tl.load(merge + 5)
    if WAIT:  # all of the above was there before the launch that makes the pieces
        gdc_wait()
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.zeros([ROWS], tl.float32) + LOWEST
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        at = base[:, None] + piece[None, :] * apart
        there = valid[:, None] & (piece < pieces)[None, :]
        part = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=CACHE)
        values = tl.load(
            partial + at[:, :, None] * WIDTH + dims[None, None, :], mask=there[:, :, None], other=0.0,
            cache_modifier=CACHE,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(part, 1))
        weights = tl.math.exp2(part - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 1)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    pointers = out + (token * out_token + query_head * out_head)[:, None] + dims[None, :]
    tl.store(pointers, result, mask=valid[:, None] & (dims < DIM)[None, :])
    if LSE:
        value = (top + tl.math.log2(divisor)) * 0.6931471805599453
        tl.store(lse + token * (KV_HEADS * GROUPS) + query_head, value, mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def merge_if_last(  # type: ignore[no-untyped-def]
    join, merges, head, out, lse, partial, partial_lse, finished, partial_rows, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Count a piece that this program has just written; if it is the last one of its item, do the item's merges.

    ``finished`` int32, one for each partial row: at an item's first one, how many of its pieces are written. It is 0
    before a launch and, since whoever comes last sets it back, after it: a graph may be replayed.
    """
    first = tl.load(join)
    end = tl.load(join + 1)
    merge = merges + first * MERGE
    count = finished + head.to(tl.int64) * partial_rows + tl.load(merge + 3)
    # One thread counts for all of the program, so all must have written first. Release: whoever then sees the count
    # sees what they wrote. Acquire: the last one sees what every other program wrote before it counted.
    tl.debug_barrier()
    before = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
    if before == tl.load(merge + 4) - 1:
        tl.store(count, 0)  # nobody else counts this item any more
        for at in tl.range(first, end):
            # Around the first-level cache: each multiprocessor has its own, which what others write does not reach.
            merge_rows(
                merges + at * MERGE, head, out, lse, partial, partial_lse, partial_rows, out_token, out_head,
                KV_HEADS, GROUPS, DIM, WIDTH, ROWS, PIECES, LSE, False, ".cg",
            )  # fmt: skip
