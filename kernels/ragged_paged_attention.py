"""Causal attention of ragged query spans over paged keys and values: the fast one, in Triton.

Same promise as ``pensieve.kernels.reference.ragged_paged_attention``. One device function serves prefill, decode and
recomputation; ``attention_plan`` says what its programs do, ``attention_tiles`` with which shapes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pensieve.kernels._check import check_attention
from pensieve.kernels.attention_buffers import AttentionPlan, geometry_of, plan_key
from pensieve.kernels.attention_plan import Geometry
from pensieve.kernels.attention_tiles import Tile, width_of
from pensieve.kernels.span_table import SpanTable

ITEM = tl.constexpr(8)
MERGE = tl.constexpr(5)
LOWEST = tl.constexpr(-1e38)
"""First maximum of a row: below every score but finite, so that a tile without visible keys gives weights of 0."""
MERGED_AT_ONCE = 64
"""Pieces that a merge reads in one go; more take another round trip to memory."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows(base, at, valid, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of DIM values at offsets ``at``, padded with 0 to WIDTH columns; MASKED: invalid rows are 0 and not read."""
    dims = tl.arange(0, WIDTH)
    pointers = base + at[:, None] + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM < WIDTH:
        rows = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    q, seen, acc, top, total, pages, table, k_base, v_base, first, last, end, page_stride, slot_stride, factor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[first, last)``, in units of log2; row i sees the keys below ``seen[i]``.

    ``pages`` holds the page of every key of the coming tile: a page id is loaded one tile before its keys are, because
    the pipeline spends a stage on every link of a chain of loads.
    """
    columns = tl.arange(0, KEYS)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = start + columns
        at = pages.to(tl.int64) * page_stride + (keys % PAGE) * slot_stride
        coming = keys + KEYS
        pages = tl.load(table + coming // PAGE, mask=coming < end, other=0)
        k = _rows(k_base, at, keys < end, DIM, WIDTH, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] < seen[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.math.exp2(scores * factor - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        # Slots beyond the last visible key may hold NaN, which a weight of 0 does not undo.
        v = _rows(v_base, at, keys < end, DIM, WIDTH, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    return acc, top, total, pages


@triton.jit(do_not_specialize=["items_at", "partial_rows", "table_stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, pool, tables, out, lse, words, partial, partial_lse, items_at, partial_rows,
    q_token, q_head, page_stride, value_stride, head_stride, slot_stride, table_stride, out_token, out_head, factor,
    COUNT_AT: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SPLIT_MASK: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Items of one launch: program p takes works p, p + programs, …; a work is an item of one KV head."""
    count = tl.load(words + COUNT_AT)
    # Invariants of the walk, hoisted out of this loop, would take the registers that keep programs resident.
    for work in tl.range(tl.program_id(0), count * KV_HEADS, tl.num_programs(0), disable_licm=True):
        head = work % KV_HEADS
        item = words + items_at + work // KV_HEADS * ITEM
        rows = tl.load(item + 1)
        position = tl.load(item + 2)
        table = tables + tl.load(item + 3).to(tl.int64) * table_stride
        first_row = tl.load(item + 4)
        start = tl.load(item + 5)
        end = tl.load(item + 6)

        row = first_row + tl.arange(0, ROWS)
        token = (tl.load(item) + row // GROUPS).to(tl.int64)
        q_at = token * q_token + (head * GROUPS + row % GROUPS) * q_head
        block = _rows(q, q_at, row < rows, DIM, WIDTH, True)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.zeros([ROWS], tl.float32) + LOWEST

        keys = start + tl.arange(0, KEYS)
        pages = tl.load(table + keys // PAGE, mask=keys < end, other=0)
        k_base = pool + head * head_stride
        v_base = k_base + value_stride
        middle = start
        if SPLIT_MASK:
            plain = tl.minimum(position + first_row // GROUPS + 1, end) // KEYS * KEYS  # all rows see these
            middle = tl.maximum(plain, start)
            acc, top, total, pages = _walk(
                block, row, acc, top, total, pages, table, k_base, v_base, start, middle, end,
                page_stride, slot_stride, factor, DIM, WIDTH, PAGE, KEYS, STAGES, False,
            )  # fmt: skip
        # Read again what the walk before does not need, past the compiler's back: it holds no registers meanwhile.
        seen = tl.load(item + 2, volatile=True) + 1
        seen += (tl.load(item + 4, volatile=True) + tl.arange(0, ROWS)) // GROUPS
        acc, top, total, pages = _walk(
            block, seen, acc, top, total, pages, table, k_base, v_base, middle, end, end,
            page_stride, slot_stride, factor, DIM, WIDTH, PAGE, KEYS, STAGES, True,
        )  # fmt: skip

        divisor = tl.where(total > 0, total, 1.0)
        result = acc / divisor[:, None]
        log2_sum = tl.where(total > 0, top + tl.math.log2(divisor), float("-inf"))
        q_start = tl.load(item, volatile=True)
        row = tl.load(item + 4, volatile=True) + tl.arange(0, ROWS)
        valid = row < tl.load(item + 1, volatile=True)
        scratch = tl.load(item + 7)
        dims = tl.arange(0, WIDTH)
        if scratch < 0:
            token = (q_start + row // GROUPS).to(tl.int64)
            query_head = head * GROUPS + row % GROUPS
            pointers = out + (token * out_token + query_head * out_head)[:, None] + dims[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), mask=valid[:, None] & (dims < DIM)[None, :])
            if LSE:
                tl.store(
                    lse + token * (KV_HEADS * GROUPS) + query_head, log2_sum * 0.6931471805599453, mask=valid
                )
        else:
            at = head.to(tl.int64) * partial_rows + scratch + tl.arange(0, ROWS)
            tl.store(partial + at[:, None] * WIDTH + dims[None, :], result, mask=valid[:, None])
            tl.store(partial_lse + at, log2_sum, mask=valid)


@triton.jit(do_not_specialize=["merges_at", "partial_rows"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, lse, words, partial, partial_lse, merges_at, partial_rows, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Results of an item's pieces, weighted by their softmax denominators; one row of one KV head at a time."""
    dims = tl.arange(0, WIDTH)
    for work in tl.range(tl.program_id(0), tl.load(words + 2) * KV_HEADS, tl.num_programs(0)):
        head = work % KV_HEADS
        merge = words + merges_at + work // KV_HEADS * MERGE
        token = tl.load(merge).to(tl.int64)
        query_head = head * GROUPS + tl.load(merge + 1)
        base = head.to(tl.int64) * partial_rows + tl.load(merge + 2)
        pieces = tl.load(merge + 3)
        apart = tl.load(merge + 4)
        acc = tl.zeros([WIDTH], tl.float32)
        top = LOWEST
        total = 0.0
        for first in tl.range(0, pieces, PIECES):
            piece = first + tl.arange(0, PIECES)
            at = base + piece * apart
            part = tl.load(partial_lse + at, mask=piece < pieces, other=float("-inf"))
            values = tl.load(
                partial + at[:, None] * WIDTH + dims[None, :], mask=(piece < pieces)[:, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(part, 0))
            weights = tl.math.exp2(part - new_top)
            shrink = tl.math.exp2(top - new_top)
            acc = acc * shrink + tl.sum(values * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            top = new_top
        result = (acc / total).to(out.dtype.element_ty)
        tl.store(out + token * out_token + query_head * out_head + dims, result, mask=dims < DIM)
        if LSE:
            value = (top + tl.math.log2(total)) * 0.6931471805599453
            tl.store(lse + token * (KV_HEADS * GROUPS) + query_head, value)


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: SpanTable,
    page_tables: torch.Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of ragged query spans over paged keys and values; see the reference for the whole promise.

    ``q`` [T, Hq, D], pool [P, 2, Hkv, N, D] in float16, bfloat16 or (slow, for tests) float32, D ≤ 256; page tables
    int32 [R, pages]. Returns ``out`` and, if asked for, the log of the softmax denominator, float32 [T, Hq]. The work
    list is made by the first call for a span table. Can be captured in a graph: see ``AttentionPlan``.
    Raises ValueError when the tensors do not fit each other.
    """
    check_attention(q, kv_pool_of_layer, page_tables, out, scale)
    plan = spans.plan(
        plan_key(q, kv_pool_of_layer),
        lambda: AttentionPlan(spans.host, len(q), geometry_of(q, kv_pool_of_layer), q.device),
    )
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty(q.shape[:2] if return_lse else (1, 1), dtype=torch.float32)
    _launch(plan, q, kv_pool_of_layer, page_tables, out, lse, scale, return_lse)
    return (out, lse) if return_lse else out


def constants(tile: Tile, count_at: int, geometry: Geometry, page_tokens: int) -> dict[str, int | bool]:
    """What ``_attend`` is compiled for, ``LSE`` aside."""
    return {
        "COUNT_AT": count_at, "KV_HEADS": geometry.kv_heads, "GROUPS": geometry.groups, "DIM": geometry.head_dim,
        "WIDTH": width_of(geometry.head_dim), "PAGE": page_tokens, "ROWS": tile.rows, "KEYS": tile.keys,
        "STAGES": tile.stages, "SPLIT_MASK": tile.split_mask,
    }  # fmt: skip


def options(tile: Tile) -> dict[str, int]:
    """How ``_attend`` is compiled."""
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"num_warps": tile.warps, "enable_fp_fusion": True, **limit}


def _launch(
    plan: AttentionPlan,
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    return_lse: bool,
) -> None:
    """Both launches of a plan, wide and narrow side by side when there are both, and the merge."""
    processors, kv_heads = plan.geometry.multiprocessors, plan.geometry.kv_heads

    def attend(tile: Tile, count_at: int, items_at: int, programs: int) -> None:
        _attend[(programs,)](
            q, pool, tables, out, lse, plan.words, plan.partial, plan.partial_lse, items_at,
            plan.capacity.partial_rows, q.stride(0), q.stride(1), pool.stride(0), pool.stride(1), pool.stride(2),
            pool.stride(3), tables.stride(0), out.stride(0), out.stride(1), scale * math.log2(math.e),
            **constants(tile, count_at, plan.geometry, pool.shape[3]), LSE=return_lse, **options(tile),
        )  # fmt: skip

    launches = plan.launches()
    if plan.beside and q.is_cuda:
        # The wide launch takes one place on every multiprocessor and keeps it; the narrow one fills the rest. It must
        # not come first, when it would take all: an empty launch holds it back until the other one has been placed.
        (tile, count_at, items_at, _), (narrow, narrow_count_at, narrow_at, most) = launches
        main, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
        side.wait_stream(main)
        attend(tile, count_at, items_at, processors)
        with torch.cuda.stream(side):
            plan.hold.zero_()
            attend(narrow, narrow_count_at, narrow_at, most * kv_heads)
        main.wait_stream(side)
    else:
        for tile, count_at, items_at, most in launches:
            attend(tile, count_at, items_at, most * kv_heads)
    if plan.capacity.merges:
        _merge[(min(plan.capacity.merges * kv_heads, 32 * processors),)](
            out, lse, plan.words, plan.partial, plan.partial_lse, plan.merges_at, plan.capacity.partial_rows,
            out.stride(0), out.stride(1), KV_HEADS=kv_heads, GROUPS=plan.geometry.groups, DIM=q.shape[2],
            WIDTH=width_of(q.shape[2]), PIECES=MERGED_AT_ONCE, LSE=return_lse, enable_fp_fusion=True,
        )  # fmt: skip


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of narrow launches: one per device for the life of the process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
