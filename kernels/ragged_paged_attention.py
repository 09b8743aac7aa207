"""Causal attention of ragged query spans over paged keys and values, in Triton.

Matches ``pensieve.kernels.reference.ragged_paged_attention``. One device function serves prefill, decode and
recomputation: ``attention.work_lists`` has the work of its programs, ``attention.tiles`` their shapes.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention import copies, work_lists
from pensieve.kernels.attention.call import AttentionCall, check_attention
from pensieve.kernels.attention.hopper import launch as hopper
from pensieve.kernels.attention.items import LN_2, LOWEST, Q_START, add_sinks, attend_item, fold
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.attention.tiles import Tile, width_of
from pensieve.kernels.spans import Spans

ITEM, MERGE = tl.constexpr(work_lists.ITEM), tl.constexpr(work_lists.MERGE)
LISTS_AT = tl.constexpr(work_lists.LISTS_AT)
FIRST, END = tl.constexpr(work_lists.MERGE_FIRST), tl.constexpr(work_lists.MERGE_END)
PARTIAL, COUNT = tl.constexpr(work_lists.MERGE_PARTIAL), tl.constexpr(work_lists.MERGE_PIECES)
STRIDE = tl.constexpr(work_lists.MERGE_STRIDE)
SERIAL, PRIMARY, SECONDARY, CONCURRENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Order of a launch relative to the previous one, by programmatic dependent launch. SERIAL, PRIMARY: it
begins when the previous launch has ended. SECONDARY: it begins early, but reads the previous launch's results
only after its end. CONCURRENT: it runs beside the previous launch and ends after it. All but SERIAL also let
the next launch begin early, which devices before Hopper cannot."""
MERGE_PROGRAMS = 8
"""Programs of a merge per multiprocessor."""
MERGED_AT_ONCE = 64
"""Rows of pieces that a merge reads at once; more take another round trip to memory."""


@triton.jit(do_not_specialize=["partial_rows", "table_stride", "window"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, pool, tables, out, lse, words, partial, partial_lse, partial_total, partial_rows,
    q_token, q_head, page_stride, value_stride, head_stride, slot_stride, table_stride, out_token, out_head, factor,
    sinks, window,
    LIST: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SPLIT_MASK: tl.constexpr,
    LSE: tl.constexpr, ORDER: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PIECE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Attend the items of one launch; works fall in length, so programs take them in alternating order."""
    programs = tl.num_programs(0)
    if ORDER != SERIAL:
        gdc_launch_dependents()
    works = tl.load(words + LIST) * KV_HEADS
    items = words + tl.load(words + LISTS_AT + LIST)
    place = tl.program_id(0)
    # Loop invariants, hoisted out of this loop, would take the registers that keep programs resident.
    for base in tl.range(0, works, programs, disable_licm=True):
        work = base + place
        place = programs - 1 - place
        if work < works:
            attend_item(
                items + work // KV_HEADS * ITEM, work % KV_HEADS, q, pool, tables, out, lse, partial, partial_lse,
                partial_total, partial_rows, q_token, q_head, page_stride, value_stride, head_stride, slot_stride,
                table_stride, out_token, out_head, factor, sinks, window, KV_HEADS, GROUPS, DIM, WIDTH, PAGE, ROWS,
                KEYS, STAGES, SPLIT_MASK, LSE, WINDOWED, SOFTCAP, SINKS, PIECE, CODED,
            )  # fmt: skip
    # No launch may end before the one it overtook: later launches rely on both.
    if ORDER == CONCURRENT:  # noqa: SIM102 - the outer one is decided when compiling
        if tl.program_id(0) == programs - 1:
            gdc_wait()


@triton.jit(do_not_specialize=["partial_rows"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, lse, words, partial, partial_lse, partial_total, partial_rows, out_token, out_head, sinks,
    LIST: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, LSE: tl.constexpr, ORDER: tl.constexpr, SINKS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Combine an item's pieces by their softmax denominators, ROWS rows of one KV head at a time. With fixed pieces
    (PIECE > 0), one after the other."""
    dims = tl.arange(0, WIDTH)
    merges = words + tl.load(words + LISTS_AT + LIST)
    for work in tl.range(tl.program_id(0), tl.load(words + LIST) * KV_HEADS, tl.num_programs(0)):
        head = work % KV_HEADS
        merge = merges + work // KV_HEADS * MERGE
        row = tl.load(merge + FIRST) + tl.arange(0, ROWS)
        valid = row < tl.load(merge + END)
        token = (tl.load(merge + Q_START) + row // GROUPS).to(tl.int64)
        query_head = head * GROUPS + row % GROUPS
        base = head.to(tl.int64) * partial_rows + tl.load(merge + PARTIAL) + tl.arange(0, ROWS)
        pieces = tl.load(merge + COUNT)
        apart = tl.load(merge + STRIDE)
        if ORDER == SECONDARY:  # everything above was written before the launch that makes the pieces
            gdc_wait()
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.zeros([ROWS], tl.float32) + LOWEST
        total = tl.zeros([ROWS], tl.float32)
        if PIECE > 0:
            for number in tl.range(0, pieces):
                from_row = base + number * apart
                pointers = partial + from_row[:, None] * WIDTH + dims[None, :]
                part = tl.load(pointers, mask=valid[:, None], other=0.0)
                part_top = tl.load(partial_lse + from_row, mask=valid, other=LOWEST)
                part_total = tl.load(partial_total + from_row, mask=valid, other=0.0)
                acc, top, total = fold(acc, top, total, part, part_top, part_total)
        else:
            for first in tl.range(0, pieces, PIECES):
                piece = first + tl.arange(0, PIECES)
                at = base[:, None] + piece[None, :] * apart
                there = valid[:, None] & (piece < pieces)[None, :]
                logs = tl.load(partial_lse + at, mask=there, other=float("-inf"))
                values = tl.load(
                    partial + at[:, :, None] * WIDTH + dims[None, None, :], mask=there[:, :, None], other=0.0
                )
                new_top = tl.maximum(top, tl.max(logs, 1))
                weights = tl.math.exp2(logs - new_top[:, None])
                shrink = tl.math.exp2(top - new_top)
                acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 1)
                total = total * shrink + tl.sum(weights, 1)
                top = new_top
        if SINKS:
            acc, top, total = add_sinks(acc, top, total, sinks, query_head, total > 0)
        divisor = tl.where(total > 0, total, 1.0)
        result = (acc / divisor[:, None]).to(out.dtype.element_ty)
        pointers = out + (token * out_token + query_head * out_head)[:, None] + dims[None, :]
        tl.store(pointers, result, mask=valid[:, None] & (dims < DIM)[None, :])
        if LSE:
            value = (top + tl.math.log2(divisor)) * LN_2
            tl.store(lse + token * (KV_HEADS * GROUPS) + query_head, value, mask=valid)
    if ORDER == SECONDARY:
        gdc_wait()


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    plan: AttentionPlan,
    tables: torch.Tensor,
    logits: Logits,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query spans over paged keys and values; see the reference for the full
    contract.

    ``q`` [T, Hq, D], one layer's ``pool`` [P, 2, Hkv, N, D] in float16, bfloat16 or (slow, for tests)
    float32, or coded (``kv_codec``), D ≤ 256. ``plan`` holds the spans and serves every layer of a step with its
    window. ``tables`` int32 [R, pages]; or page tables of unequal length laid end to end [n], where a span's
    ``TABLE`` is the start of its table. Entries of pages that no query of a span sees are not read. Returns ``out``.
    Can be captured in a graph: see ``AttentionPlan``. Raises ValueError when the tensors fit neither each other nor the
    plan, and with a softcap when the plan is for the kernel for Hopper.
    """
    call = AttentionCall.from_tensors(q, pool, tables, logits, out)
    _launch(plan, call)
    return call.out


def attend_with_lse(
    q: torch.Tensor,
    pool: torch.Tensor,
    plan: AttentionPlan,
    tables: torch.Tensor,
    logits: Logits,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend``, which also returns the natural log of the softmax denominator, float32 [T, Hq]."""
    call = AttentionCall.from_tensors(q, pool, tables, logits, out, with_lse=True)
    _launch(plan, call)
    return call.out, call.lse


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: Spans,
    page_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``attend`` with a plan for this call only: for one layer, or where planning repeatedly does not matter.
    ``return_lse``: return ``(out, lse)``."""
    check_attention(q, kv_pool_of_layer, page_tables, out)
    geometry = replace(geometry_of(q, kv_pool_of_layer), window=window)
    if softcap is not None:
        geometry = replace(geometry, hopper=False)
    plan = AttentionPlan.from_spans(spans, len(q), geometry, q.device)
    run = attend_with_lse if return_lse else attend
    return run(q, kv_pool_of_layer, plan, page_tables, Logits(scale, softcap, sinks), out=out)


def constants(
    tile: Tile,
    which: int,
    geometry: Geometry,
    page_tokens: int,
    *,
    inner_softcap: float = 0.0,
    sinks: bool = False,
) -> dict[str, int | float | bool]:
    """Compile-time arguments of ``_attend``, except ``LSE`` and ``ORDER``. ``inner_softcap``: see ``AttentionCall``."""
    return {
        "LIST": which, "KV_HEADS": geometry.kv_heads, "GROUPS": geometry.groups, "DIM": geometry.head_dim,
        "WIDTH": width_of(geometry.head_dim), "PAGE": page_tokens, "ROWS": tile.rows, "KEYS": tile.keys,
        "STAGES": tile.stages, "SPLIT_MASK": tile.split_mask,
        "WINDOWED": geometry.window is not None, "SOFTCAP": inner_softcap, "SINKS": sinks, "PIECE": geometry.piece,
        "CODED": geometry.kv_heads * page_tokens if geometry.coded else 0,
    }  # fmt: skip


def options(tile: Tile, order: tl.constexpr = SERIAL) -> dict[str, int]:
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    early = order.value >= SECONDARY.value
    return {"num_warps": tile.warps, "enable_fp_fusion": True, "launch_pdl": early, **limit}


def _launch(plan: AttentionPlan, call: AttentionCall) -> None:
    """Queue both launches of a plan, the wide one first, and the merge of split items; before the wide one, the copies
    that it reads."""
    plan.check(call.q, call.pool)
    if call.logits.softcap is not None and plan.geometry.hopper:
        raise ValueError("the kernel for Hopper has no softcap: make the plan for a geometry without it")
    q, out, scratch, capacity = call.q, call.out, plan.scratch, plan.capacity
    kv_heads, processors = plan.geometry.kv_heads, plan.geometry.multiprocessors
    overlaps = q.is_cuda and _may_overlap(q.device)
    beside = overlaps and capacity.narrow > 0 and capacity.wide > 0
    first = PRIMARY if overlaps else SERIAL
    window = plan.geometry.window or 0

    def run(
        call: AttentionCall, geometry: Geometry, tile: Tile, which: int, programs: int, order: tl.constexpr
    ) -> None:
        pool = call.pool
        _attend[(programs,)](
            q, pool, call.tables, out, call.lse, plan.words, scratch.partial, scratch.partial_lse,
            scratch.partial_total, scratch.rows,
            q.stride(0), q.stride(1), pool.stride(0), pool.stride(1), pool.stride(2),
            pool.stride(3), call.table_stride, out.stride(0), out.stride(1), call.factor,
            call.sinks, window,
            **constants(
                tile, which, geometry, pool.shape[3], inner_softcap=call.inner_softcap, sinks=call.has_sinks
            ),
            ORDER=order.value, LSE=call.has_lse, **options(tile, order),
        )  # fmt: skip

    wide, geometry = call, plan.geometry
    if capacity.wide and geometry.copied_page:
        geometry = replace(geometry, coded=False)
        wide = copies.decode(
            call, plan.words, scratch, most=max(1, capacity.copies), programs=copies.PROGRAMS * processors
        )
    if capacity.wide and plan.wide.hopper:
        hopper.attend_wide(wide, plan.words, scratch, programs=processors, beside=beside, window=window)
    elif capacity.wide:
        # Beside narrow items, one program per multiprocessor: more would leave no room.
        programs = processors if beside else capacity.wide * kv_heads
        run(wide, geometry, plan.wide, work_lists.WIDE, programs, first)
    if capacity.narrow:
        # Beside wide items, narrow ones fill the remaining multiprocessors. Launched first, they would take
        # all of them; launched second, they begin when every program of the wide launch has begun.
        programs = (capacity.narrow_programs or capacity.narrow) * kv_heads
        order = CONCURRENT if beside else first
        run(call, plan.geometry, plan.narrow, work_lists.NARROW, programs, order)
    if capacity.merges:
        rows, order = plan.kind.merged_rows, SECONDARY if overlaps else SERIAL
        _merge[(min(capacity.merges * kv_heads, MERGE_PROGRAMS * processors),)](
            out, call.lse, plan.words, scratch.partial, scratch.partial_lse,
            scratch.partial_total, scratch.rows,
            out.stride(0), out.stride(1), call.sinks,
            LIST=work_lists.MERGES, KV_HEADS=kv_heads, GROUPS=plan.geometry.groups, DIM=q.shape[2],
            WIDTH=width_of(q.shape[2]), ROWS=rows, PIECES=MERGED_AT_ONCE // rows, LSE=call.has_lse,
            ORDER=order.value, SINKS=call.has_sinks, PIECE=plan.geometry.piece,
            enable_fp_fusion=True, launch_pdl=overlaps,
        )  # fmt: skip


@functools.cache
def _may_overlap(device: torch.device) -> bool:
    """Return whether a launch can begin before the previous one has ended: from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
