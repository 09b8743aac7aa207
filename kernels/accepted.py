"""Completes the rows of a step by what the step before it chose, in Triton: two small launches at its beginning.

A row may stand for a token that the step before chooses. And a span may be *undecided*: the step before has drafts of
its request, and how many of them it accepts decides where the span starts. The host makes such a step for the case that
none is accepted, and its attention for the case that all are. ``complete_rows`` counts the drafts that are right, and
moves the rows of the span behind them. ``shorten_items`` takes the others from the contexts of its attention, which
then has the items that it would have if the count had been known, and perhaps pieces without keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pensieve.kernels import spans
from pensieve.kernels.attention import work_lists

ENTRY = 6
"""Words of an undecided span; padding is 0."""
FIRST_ROW, ROWS, CHOSEN, DRAFTS, DRAFTS_AT, TABLE = range(ENTRY)
"""Its first row and its rows; the row of the first token that the step before chose for it; its undecided drafts, and
where they begin among those of all spans; the start of its page table."""
MOST_ROWS = 128
"""Most rows of an undecided span, and most of its drafts."""
_BLOCK = 256
_ENTRY, _ITEM = tl.constexpr(ENTRY), tl.constexpr(work_lists.ITEM)
_FIRST_ROW, _ROWS, _CHOSEN = tl.constexpr(FIRST_ROW), tl.constexpr(ROWS), tl.constexpr(CHOSEN)
_DRAFTS, _DRAFTS_AT, _TABLE = tl.constexpr(DRAFTS), tl.constexpr(DRAFTS_AT), tl.constexpr(TABLE)
_Q_START, _POSITION = tl.constexpr(spans.Q_START), tl.constexpr(spans.POSITION)
_SPAN_ROWS, _BLOCK_ROW = tl.constexpr(work_lists.ROWS), tl.constexpr(work_lists.FIRST_ROW)
_FIRST_KEY, _END_KEY = tl.constexpr(work_lists.FIRST_KEY), tl.constexpr(work_lists.END_KEY)
_LISTS_AT = tl.constexpr(work_lists.LISTS_AT)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The T rows of a step, all int32 [T] on its device."""

    tokens: torch.Tensor
    source: torch.Tensor
    """Row of the token among those that the step before chose, or -1 where ``tokens`` has it."""
    positions: torch.Tensor
    slots: torch.Tensor
    """``page * page_tokens + offset``"""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The undecided spans of a step, all int32 on its device."""

    entries: torch.Tensor
    """[n, ENTRY]"""
    drafts: torch.Tensor
    """[m]: the undecided drafts of all spans."""
    rejected: torch.Tensor
    """[T]: 0. ``complete_rows`` stores how many of its span's drafts were not accepted, for rows of undecided spans."""


@triton.jit  # type: ignore[untyped-decorator]
def _complete_rows(  # type: ignore[no-untyped-def]
    tokens, source, positions, slots, count, sampled, entries, drafts, rejected, pages, programs,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, UNDECIDED: tl.constexpr,
):  # fmt: skip
    """The first ``programs`` programs store the tokens of rows with a source, the others complete one entry each."""
    number = tl.program_id(0)
    if number < programs:
        row = number * BLOCK + tl.arange(0, BLOCK)
        chosen = tl.load(source + row, mask=row < count, other=-1)
        token = tl.load(sampled + chosen, mask=chosen >= 0, other=0).to(tl.int32)
        tl.store(tokens + row, token, mask=chosen >= 0)
    elif UNDECIDED:
        entry = entries + (number - programs) * _ENTRY
        rows = tl.load(entry + _ROWS)
        if rows > 0:
            first, num_drafts = tl.load(entry + _FIRST_ROW), tl.load(entry + _DRAFTS)
            chosen = sampled + tl.load(entry + _CHOSEN)
            at = tl.arange(0, MOST)
            there = at < num_drafts
            draft = tl.load(drafts + tl.load(entry + _DRAFTS_AT) + at, mask=there, other=-1)
            token = tl.load(chosen + at, mask=there, other=-1).to(tl.int32)
            accepted = tl.min(tl.where(there & (draft != token), at, num_drafts), 0)
            tl.store(tokens + first, tl.load(chosen + accepted).to(tl.int32))
            inside = at < rows
            position = tl.load(positions + first + at, mask=inside, other=0) + accepted
            page = tl.load(pages + tl.load(entry + _TABLE) + position // PAGE, mask=inside, other=0)
            tl.store(positions + first + at, position, mask=inside)
            tl.store(slots + first + at, page * PAGE + position % PAGE, mask=inside)
            tl.store(rejected + first + at, tl.zeros_like(at) + (num_drafts - accepted), mask=inside)


def complete_rows(
    rows: StepRows, sampled: torch.Tensor, undecided: Undecided | None, pages: torch.Tensor, page_tokens: int
) -> None:
    """Complete tokens, positions and slots of ``rows`` in place. ``sampled`` int64 [s]: what the step before chose.
    ``pages`` int32: all page tables, of pages of ``page_tokens``."""
    tokens, count = rows.tokens, len(rows.tokens)
    programs = triton.cdiv(count, _BLOCK)
    entries = 0 if undecided is None else len(undecided.entries)
    some = undecided or Undecided(tokens, tokens, tokens)  # not read
    _complete_rows[(programs + entries,)](
        tokens, rows.source, rows.positions, rows.slots, count, sampled, some.entries, some.drafts, some.rejected,
        pages, programs, PAGE=page_tokens, BLOCK=_BLOCK, MOST=MOST_ROWS, UNDECIDED=entries > 0,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _shorten_items(  # type: ignore[no-untyped-def]
    words, positions, rejected, NARROW: tl.constexpr, WIDE: tl.constexpr, NARROW_ROWS: tl.constexpr,
    WIDE_ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs along the second axis: the narrow list, then the wide one."""
    which, tile_rows = NARROW, NARROW_ROWS
    if tl.program_id(1) > 0:
        which, tile_rows = WIDE, WIDE_ROWS
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < tl.load(words + which)
    item = words + tl.load(words + _LISTS_AT + which) + number * _ITEM
    row = tl.load(item + _Q_START, mask=valid, other=0)
    fewer = tl.load(rejected + row, mask=valid, other=0)
    start = tl.load(positions + row, mask=valid, other=0)
    # The prefix of a group ends before all of its rows begin, whatever was accepted: it stays whole.
    changed = valid & (fewer > 0)
    last = tl.minimum(
        tl.load(item + _BLOCK_ROW, mask=changed, other=0) + tile_rows,
        tl.load(item + _SPAN_ROWS, mask=changed, other=0),
    )
    end = tl.minimum(tl.load(item + _END_KEY, mask=changed, other=0), start + (last + GROUPS - 1) // GROUPS)
    end = tl.maximum(end, tl.load(item + _FIRST_KEY, mask=changed, other=0))
    tl.store(item + _POSITION, start, mask=changed)
    tl.store(item + _END_KEY, end, mask=changed)


def shorten_items(
    words: torch.Tensor,
    positions: torch.Tensor,
    rejected: torch.Tensor,
    items: tuple[int, int],
    tile_rows: tuple[int, int],
    groups: int,
) -> None:
    """Take the drafts that were not accepted from the items of an attention plan, ``words``, in place. ``positions``
    and ``rejected`` int32 [T]: as ``complete_rows`` has left them. ``items``: most narrow and wide items.
    ``tile_rows``: rows of their tiles. ``groups``: query heads of a KV head."""
    grid = (max(1, triton.cdiv(max(items), _BLOCK)), 2 if items[1] else 1)
    _shorten_items[grid](
        words, positions, rejected, NARROW=work_lists.NARROW, WIDE=work_lists.WIDE, NARROW_ROWS=tile_rows[0],
        WIDE_ROWS=tile_rows[1], GROUPS=groups, BLOCK=_BLOCK,
    )  # fmt: skip
