"""Work lists of the ragged paged attention kernel, made on the CPU once per step.

A span's query tokens times the G query heads of one KV head are its *rows*. A block of rows is an *item*. An
item with many keys may be split into *pieces*, whose results are merged afterwards. Spans with few rows are
*narrow*: they are bound by memory. *Wide* spans are bound by compute. Each has a launch with its own tiles.
The lists contain no heads: a launch takes every item once per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.cuts import fixed_pieces, narrow_pieces, piece_of, piece_start, wide_pieces
from pensieve.kernels.attention.kinds import (
    ENOUGH_TO_READ,
    NARROW_STEP,
    UNSHARED_STEP,
    WIDE_STEP,
    Geometry,
    StepKind,
    is_wide,
)
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.spans import POSITION, Q_LEN, Q_START, TABLE, Ints, Spans

HEADER = 8
"""Words of a plan's header. The wide items follow it, then the narrow ones, then the merges. Words ``NARROW``,
``WIDE`` and ``MERGES`` are the lengths of the lists; words from ``LISTS_AT`` on are their offsets. Word ``SHARE_AT``
is the number of programs that take wide items beside narrow ones. Word ``COPIES`` is the length of the list of copies,
which follows the merges."""
NARROW, WIDE, MERGES = 0, 1, 2
LISTS_AT, SHARE_AT, COPIES = 3, 6, 7
ITEM = 8
"""Words of an item: ``Q_START``, ``POSITION`` and ``TABLE`` of its span, and the columns below."""
ROWS, FIRST_ROW, FIRST_KEY, END_KEY, PARTIAL = 1, 4, 5, 6, 7
"""Rows of the span; first row of the block; its keys from first to end; first partial row, or -1 for a whole
item that writes its result itself."""
MERGE = 6
"""Words of a merge of some rows of a split item: ``Q_START`` of its span, and the columns below."""
MERGE_FIRST, MERGE_END, MERGE_PARTIAL, MERGE_PIECES, MERGE_STRIDE = 1, 2, 3, 4, 5
"""Its rows in the span from first to end; partial row of the first of them in the first piece; number of
pieces; partial rows from piece to piece."""
COPY = 2
"""Words of a copy (``copies``): the ``TABLE`` of its page, and the page's place in that table."""
NO_ITEMS = np.empty((0, ITEM), np.int64)
NO_MERGES = np.empty((0, MERGE), np.int64)
NO_COPIES = np.empty((0, COPY), np.int64)


@dataclass(frozen=True, slots=True)
class WorkLists:
    """The work of one step: items [n, 8] of both launches, and merges [m, 6]."""

    narrow: Ints
    wide: Ints
    merges: Ints
    partial_rows: int
    """Scratch rows per KV head that the pieces write."""
    wide_programs: int
    """Programs that share the wide items."""
    copies: Ints = field(default_factory=lambda: NO_COPIES)
    """[n, 2]: coded pages that wide items read as plain copies."""


def make_work_lists(spans: Spans, num_rows: int, geometry: Geometry, kind: StepKind) -> WorkLists:
    """Return the lists of a step with these spans, for q of ``num_rows`` rows. ``kind`` selects tiles; it
    does not restrict the items. A step whose spans do not suit the kind still gets items for all of them."""
    tiles = geometry.tiles
    narrow, wide = kind.narrow_tile(tiles), tiles.wide
    covered = 0
    if len(spans):
        lengths = spans[:, Q_LEN]
        covered = int((spans[:, Q_START] + lengths).max())
        if not lengths.all():
            spans = spans[lengths > 0]
    small, big = split_by_width(spans, narrow, geometry, kind)
    first, first_merges, used = NO_ITEMS, NO_MERGES, 0
    if len(small):
        items = make_blocks(small, narrow, geometry)
        pieces = narrow_counts(items, narrow, geometry)
        first, first_merges, used = split_items(items, pieces, narrow, 0, kind.merged_rows, geometry.piece)
    second, second_merges = NO_ITEMS, NO_MERGES
    if len(big):
        items = make_blocks(big, wide, geometry)
        pieces = wide_counts(items, wide, geometry)
        second, second_merges, used = split_items(items, pieces, wide, used, kind.merged_rows, geometry.piece)
    programs = geometry.multiprocessors
    if len(second) and (kind.is_mixed or wide.hopper):
        second = longest_first(second)
        if kind.is_mixed and wide.hopper:  # other tiles leave room beside them
            programs = _share_of_wide(first, second, narrow, wide, geometry)
    if num_rows > covered:
        padding = padding_items(
            covered, num_rows - covered, wide if kind.has_wide else narrow, geometry.groups
        )
        if kind.has_wide:
            second = np.concatenate([second, padding])
        else:
            first = np.concatenate([first, padding])
    merges = np.concatenate([first_merges, second_merges]) if len(second_merges) else first_merges
    return WorkLists(first, second, merges, used, programs)


def narrow_counts(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each narrow item, longest first."""
    if geometry.piece:
        return fixed_pieces(items[:, FIRST_KEY : END_KEY + 1], tile, geometry)
    return narrow_pieces(key_tiles(items, tile), tile, geometry)


def wide_counts(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each wide item, longest first."""
    if geometry.piece:
        return fixed_pieces(items[:, FIRST_KEY : END_KEY + 1], tile, geometry)
    return wide_pieces(key_tiles(items, tile), is_only_block(items, tile), tile, geometry)


def split_by_width(spans: Spans, narrow: Tile, geometry: Geometry, kind: StepKind) -> tuple[Spans, Spans]:
    """Split the spans into those of the narrow and those of the wide list."""
    if not kind.has_wide:
        return spans, spans[:0]
    if not kind.has_narrow:
        return spans[:0], spans
    large = is_wide(spans, geometry, narrow)
    return spans[~large], spans[large]


def _share_of_wide(narrow: Ints, wide: Ints, small: Tile, large: Tile, geometry: Geometry) -> int:
    """Return how many multiprocessors are reserved for wide items, so that they end when the narrow ones do. Narrow
    items read at full memory bandwidth unless fewer than ENOUGH_TO_READ of the multiprocessors remain for them."""
    everything = geometry.multiprocessors
    wide_steps, narrow_steps = (
        int(key_tiles(items, tile).sum()) for items, tile in ((wide, large), (narrow, small))
    )
    if not wide_steps or not narrow_steps:
        return everything
    begun = np.count_nonzero(wide[:, FIRST_ROW] == 0)  # blocks that begin a span
    wide_time = wide_steps * (WIDE_STEP + UNSHARED_STEP * begun / len(wide))
    narrow_time = narrow_steps * NARROW_STEP
    share = wide_time / narrow_time
    if share > 1 - ENOUGH_TO_READ:
        share = wide_time / (wide_time + narrow_time * ENOUGH_TO_READ)
    return min(everything, max(1, round(share * everything)))


def padding_items(start: int, tokens: int, tile: Tile, groups: int) -> Ints:
    """Return items for the rows outside every span: blocks without keys, whose results are 0."""
    first = np.arange(0, tokens * groups, tile.rows)
    items = np.zeros((len(first), ITEM), np.int64)
    items[:, Q_START], items[:, ROWS] = start, tokens * groups
    items[:, FIRST_ROW], items[:, PARTIAL] = first, -1
    return items


def make_blocks(spans: Spans, tile: Tile, geometry: Geometry) -> Ints:
    """Return the unsplit items of spans [n, 4]: longest contexts first, blocks of a span adjacent for the L2 cache.
    With a window, the keys of an item begin with the first that its first query sees. The kernel for Hopper and fixed
    pieces need whole tiles and hide the keys before."""
    end = spans[:, Q_LEN] + spans[:, POSITION]
    order = np.argsort(-end, kind="stable")
    spans, end = spans[order], end[order]
    rows = spans[:, Q_LEN] * geometry.groups
    items = items_for(spans, rows)
    items[:, END_KEY], items[:, PARTIAL] = end, -1
    count = -(-rows // tile.rows)
    if len(spans) and int(count.max()) > 1:
        span, block = owners_and_indices(count)
        items = items[span]
        first = (count[span] - 1 - block) * tile.rows  # blocks that see the most keys come first
        last_token = (np.minimum(first + tile.rows, rows[span]) - 1) // geometry.groups
        items[:, FIRST_ROW], items[:, END_KEY] = first, items[:, POSITION] + last_token + 1
    if geometry.window is not None:
        seen = items[:, POSITION] + items[:, FIRST_ROW] // geometry.groups + 1
        first_key = np.maximum(seen - geometry.window, 0)
        items[:, FIRST_KEY] = (
            first_key // tile.keys * tile.keys if tile.hopper or geometry.piece else first_key
        )
    return items


def items_for(spans: Spans, rows: Ints) -> Ints:
    """Return one item per span [n, 4] of ``rows`` [n], without keys yet."""
    items = np.zeros((len(spans), ITEM), np.int64)
    for column in (Q_START, POSITION, TABLE):
        items[:, column] = spans[:, column]
    items[:, ROWS] = rows
    return items


def split_items(
    items: Ints, pieces: Ints, tile: Tile, used: int, merged_rows: int, fixed: int = 0
) -> tuple[Ints, Ints, int]:
    """Split items into ``pieces``; return the parts, their merges, and the partial rows in use after ``used``.
    ``fixed``: see ``make_pieces``."""
    # Items to split; each piece gets a tile's rows of the scratch.
    whole = np.flatnonzero(pieces > 1)
    if not len(whole):
        return items, NO_MERGES, used
    held = pieces[whole] * tile.rows
    first_partial = np.full(len(items), -1)
    first_partial[whole] = used + np.cumsum(held) - held
    parts, item, piece = make_pieces(items, pieces, tile, fixed)
    scratch = first_partial[item]
    parts[:, PARTIAL] = np.where(scratch >= 0, scratch + piece * tile.rows, -1)
    # The last block of a span has fewer rows than its tile; only rows that exist are merged.
    rows = np.minimum(tile.rows, items[whole, ROWS] - items[whole, FIRST_ROW])
    owner, group = owners_and_indices(-(-rows // merged_rows))
    offset, owner = group * merged_rows, whole[owner]
    first = items[owner, FIRST_ROW] + offset
    merges = np.empty((len(owner), MERGE), np.int64)
    block_end = np.minimum(items[owner, ROWS], items[owner, FIRST_ROW] + tile.rows)
    merges[:, Q_START], merges[:, MERGE_FIRST] = items[owner, Q_START], first
    merges[:, MERGE_END] = np.minimum(first + merged_rows, block_end)
    merges[:, MERGE_PARTIAL] = first_partial[owner] + offset
    merges[:, MERGE_PIECES], merges[:, MERGE_STRIDE] = pieces[owner], tile.rows
    return parts, merges, used + int(held.sum())


def make_pieces(items: Ints, pieces: Ints, tile: Tile, fixed: int = 0) -> tuple[Ints, Ints, Ints]:
    """Return the pieces of items, the item of each, and its index in that item. Piece i of n takes key tiles
    ``[i * steps / n, (i + 1) * steps / n)``, rounded down, so that pieces join without a gap. ``fixed``: an item that
    has more than one piece is cut into its fixed pieces (``Geometry.piece``) instead; 0: is not."""
    item, piece = owners_and_indices(pieces)
    parts = items[item]
    first, end, count = parts[:, FIRST_KEY].copy(), parts[:, END_KEY], pieces[item]
    if fixed:
        number, split = piece_of(first, fixed) + piece, count > 1
        parts[:, FIRST_KEY] = np.where(split, np.maximum(first, piece_start(number, fixed)), first)
        parts[:, END_KEY] = np.where(split, np.minimum(piece_start(number + 1, fixed), end), end)
        return parts, item, piece
    steps = -(-(end - first) // tile.keys)
    parts[:, FIRST_KEY] = first + piece * steps // count * tile.keys
    parts[:, END_KEY] = np.minimum(first + (piece + 1) * steps // count * tile.keys, end)
    return parts, item, piece


def longest_first(items: Ints) -> Ints:
    """Sort items, the shortest last. Nearly equal lengths count as equal, so that a span's blocks stay adjacent."""
    size = np.floor(8 * np.log2(items[:, END_KEY] - items[:, FIRST_KEY]))
    return items[np.argsort(-size, kind="stable")]


def key_tiles(items: Ints, tile: Tile) -> Ints:
    steps: Ints = -(-(items[:, END_KEY] - items[:, FIRST_KEY]) // tile.keys)
    return steps


def is_only_block(items: Ints, tile: Tile) -> npt.NDArray[np.bool_]:
    only: npt.NDArray[np.bool_] = items[:, ROWS] <= tile.rows
    return only


def owners_and_indices(counts: Ints) -> tuple[Ints, Ints]:
    """For counts (2, 3) return owners (0, 0, 1, 1, 1) and indices within them (0, 1, 0, 1, 2)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
