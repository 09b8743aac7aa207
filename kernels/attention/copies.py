"""Plain copies of coded pages, for the wide items of a step.

Codes save memory traffic, and a narrow item, which is bound by memory, decodes them as it reads. A wide item is bound
by compute: each of its blocks would decode the same keys again, and the bulk copies of the kernel for Hopper cannot
decode. So the pages that a step's wide items see are decoded once for each layer. A copy holds the same values exactly:
bfloat16 holds a code of either dtype times a power of two.

``place`` numbers the copies in the order of their pages. The numbers stand in for a page table: entry ``n`` of
``Scratch.numbers`` is ``n``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl

from pensieve.kernels.attention import work_lists
from pensieve.kernels.attention.call import AttentionCall, Scratch
from pensieve.kernels.attention.items import power_of_two
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.tiles import width_of
from pensieve.kernels.attention.work_lists import END_KEY, FIRST_KEY, FIRST_ROW, WorkLists, owners_and_indices
from pensieve.kernels.spans import POSITION, TABLE

COPY = tl.constexpr(work_lists.COPY)
COPIES, MERGES = tl.constexpr(work_lists.COPIES), tl.constexpr(work_lists.MERGES)
LISTS_AT, MERGE = tl.constexpr(work_lists.LISTS_AT), tl.constexpr(work_lists.MERGE)
ROWS_AT_ONCE = 64
PROGRAMS = 8
"""Programs per multiprocessor."""


def place(work: WorkLists, geometry: Geometry) -> WorkLists:
    """Return ``work`` with wide items that read copies, and with the list of these copies. Pages that no query sees are
    not copied: their entries in a page table may be anything."""
    items = work.wide.copy()
    reads = items[:, END_KEY] > items[:, FIRST_KEY]
    if not reads.any():
        return work
    first = items[:, FIRST_KEY]
    if geometry.window is not None:
        seen = items[:, POSITION] + items[:, FIRST_ROW] // geometry.groups + 1
        first = np.maximum(first, seen - geometry.window)
    tables, owner = np.unique(items[reads, TABLE], return_inverse=True)
    begin = np.full(len(tables), np.iinfo(np.int32).max)
    end = np.zeros(len(tables), np.int64)
    np.minimum.at(begin, owner, first[reads] // geometry.copied_page)
    np.maximum.at(end, owner, -(-items[reads, END_KEY] // geometry.copied_page))
    count = end - begin
    items[reads, TABLE] = (np.cumsum(count) - count - begin)[owner]
    which, index = owners_and_indices(count)
    return replace(work, wide=items, copies=np.stack([tables[which], begin[which] + index], axis=1))


@triton.jit(do_not_specialize=["pages", "table_stride"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    pool, tables, words, copies, pages, page_stride, table_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Decode the pages in a plan's list of copies. A page has ROWS vectors, and their exponents behind them."""
    BLOCKS: tl.constexpr = (ROWS + AT_ONCE - 1) // AT_ONCE
    listed = words + tl.load(words + LISTS_AT + MERGES) + tl.load(words + MERGES) * MERGE
    dims = tl.arange(0, WIDTH)
    for work in tl.range(tl.program_id(0), tl.load(words + COPIES) * BLOCKS, tl.num_programs(0)):
        copy = work // BLOCKS
        entry = tl.load(listed + copy * COPY).to(tl.int64) * table_stride + tl.load(listed + copy * COPY + 1)
        page = tl.load(tables + entry)
        row = work % BLOCKS * AT_ONCE + tl.arange(0, AT_ONCE)
        # With windows, entries between those that two spans of a request see may be anything.
        valid = row < tl.where((page >= 0) & (page < pages), ROWS, 0)
        there = valid[:, None] & (dims < DIM)[None, :]
        base = pool + page.to(tl.int64) * page_stride
        at = row[:, None] * DIM + dims[None, :]
        codes = tl.load(base + at, mask=there, other=0.0)
        exponents = base.to(tl.pointer_type(tl.int8)) + ROWS * DIM + row
        exponent = tl.load(exponents, mask=valid, other=0).to(tl.int32)
        values = codes.to(tl.float16).to(tl.float32) * power_of_two(exponent)[:, None]
        tl.store(copies + copy.to(tl.int64) * ROWS * DIM + at, values.to(copies.dtype.element_ty), mask=there)


def decode(
    call: AttentionCall, words: torch.Tensor, scratch: Scratch, *, most: int, programs: int
) -> AttentionCall:
    """Queue the decoding of a plan's copies into ``scratch``; return the call that reads them. ``most``: copies that
    the plan can hold. ``programs``: on the device at once."""
    pool = call.pool
    rows, dim = 2 * pool.shape[2] * pool.shape[3], pool.shape[4]
    _decode[(min(most * triton.cdiv(rows, ROWS_AT_ONCE), programs),)](
        pool, call.tables, words, scratch.copies, len(pool), pool.stride(0), call.table_stride,
        ROWS=rows, DIM=dim, WIDTH=width_of(dim), AT_ONCE=ROWS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return replace(call, pool=scratch.copies, tables=scratch.numbers)
