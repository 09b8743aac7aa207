"""Work lists of the ragged paged attention kernel, which are made on the CPU once per step.

A span's query tokens times the G query heads of one KV head are its *rows*. A block of rows is an *item*, and an item
with many keys may be cut into *pieces*, whose results are merged afterwards. Spans with few rows are *narrow* and wait
for memory all the time; *wide* ones compute. Either gets a launch with tiles of its own. The lists hold no heads: a
launch takes every item once per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.kinds import (
    ENOUGH_TO_READ,
    NARROW_STEP,
    UNSHARED_STEP,
    WIDE_STEP,
    Geometry,
    StepKind,
    is_wide,
)
from pensieve.kernels.attention.narrow_cuts import narrow_pieces
from pensieve.kernels.attention.tiles import Tile, TileSet
from pensieve.kernels.attention.wide_cuts import wide_pieces
from pensieve.kernels.span_table import HostSpans, Ints

ITEM = 8
"""An item has these words: first row of q, rows of the span, position, page-table row, first row of the block, first
key, end of keys, first partial row (-1: the item is whole and writes its result itself)."""
MERGE = 6
"""A merge of some rows of a cut item has these words: first row of q of the span, first row of these in the span, their
end, partial row of the first in the first piece, pieces, partial rows from piece to piece."""


@dataclass(frozen=True, slots=True)
class WorkLists:
    """The work of one step: items [n, 8] of both launches, and merges [m, 6]."""

    narrow: Ints
    wide: Ints
    merges: Ints
    partial_rows: int
    """Scratch rows per KV head that the pieces write."""
    wide_programs: int
    """Programs among which the wide items are shared out."""


def make_work_lists(
    host: HostSpans, num_rows: int, geometry: Geometry, tiles: TileSet, kind: StepKind
) -> WorkLists:
    """The lists of a step whose spans are ``host`` int64 [S, 4], for q of ``num_rows`` rows.

    ``kind`` says which tiles are used, not which items there may be: a step with spans that it has no launch for gets
    items for them all the same.
    """
    narrow, wide = kind.narrow_tile(tiles), tiles.wide
    covered = 0
    if len(host):
        lengths = host[:, 1]
        covered = int((host[:, 0] + lengths).max())
        if not lengths.all():
            host = host[lengths > 0]
    small, big = parted(host, narrow, geometry, kind)
    items = blocks(small, narrow, geometry)
    pieces = narrow_pieces(steps_of(items, narrow), narrow, geometry)
    first, first_merges, used = cut(items, pieces, narrow, 0, kind.merged_rows)
    items = blocks(big, wide, geometry)
    pieces = wide_pieces(steps_of(items, wide), alone(items, wide), wide, geometry)
    second, second_merges, used = cut(items, pieces, wide, used, kind.merged_rows)
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


def parted(host: HostSpans, narrow: Tile, geometry: Geometry, kind: StepKind) -> tuple[HostSpans, HostSpans]:
    """Spans of the narrow and of the wide list."""
    if not kind.has_wide:
        many = not len(host) or int(host[:, 1].max()) * geometry.groups <= narrow.rows or kind is StepKind.FEW
        return (host, host[:0]) if many else (host[:0], host)
    if not kind.has_narrow:
        return host[:0], host
    large = is_wide(host, geometry, narrow)
    return host[~large], host[large]


def _share_of_wide(narrow: Ints, wide: Ints, small: Tile, large: Tile, geometry: Geometry) -> int:
    """How many multiprocessors wide items get for themselves, so that they end when the narrow ones do. Narrow items
    read as fast as the memory can, unless fewer multiprocessors than ENOUGH_TO_READ are left to them."""
    everything = geometry.multiprocessors
    wide_steps, narrow_steps = (
        int(steps_of(items, tile).sum()) for items, tile in ((wide, large), (narrow, small))
    )
    if not wide_steps or not narrow_steps:
        return everything
    spans = np.count_nonzero(wide[:, 4] == 0)  # blocks that begin one
    wide_time = wide_steps * (WIDE_STEP + UNSHARED_STEP * spans / len(wide))
    narrow_time = narrow_steps * NARROW_STEP
    share = wide_time / narrow_time
    if share > 1 - ENOUGH_TO_READ:
        share = wide_time / (wide_time + narrow_time * ENOUGH_TO_READ)
    return min(everything, max(1, round(share * everything)))


def padding_items(start: int, tokens: int, tile: Tile, groups: int) -> Ints:
    """Items for the rows outside every span: blocks without keys, whose results are 0."""
    first = np.arange(0, tokens * groups, tile.rows)
    items = np.zeros((len(first), ITEM), np.int64)
    items[:, 0], items[:, 1], items[:, 4], items[:, 7] = start, tokens * groups, first, -1
    return items


def blocks(host: HostSpans, tile: Tile, geometry: Geometry) -> Ints:
    """The items of spans [n, 4] before any cut: longest contexts first, blocks of a span together for the L2 cache."""
    end = host[:, 1] + host[:, 2]
    order = np.argsort(-end, kind="stable")
    host, end = host[order], end[order]
    rows = host[:, 1] * geometry.groups
    items = np.zeros((len(host), ITEM), np.int64)
    items[:, 0], items[:, 1], items[:, 2:4] = host[:, 0], rows, host[:, 2:4]
    items[:, 6], items[:, 7] = end, -1
    count = -(-rows // tile.rows)
    if len(host) and int(count.max()) > 1:
        span, block = ranges(count)
        items = items[span]
        first = (count[span] - 1 - block) * tile.rows  # the blocks that see most keys come first
        last_token = (np.minimum(first + tile.rows, rows[span]) - 1) // geometry.groups
        items[:, 4], items[:, 6] = first, items[:, 2] + last_token + 1
    return items


def cut(items: Ints, pieces: Ints, tile: Tile, used: int, merged_rows: int) -> tuple[Ints, Ints, int]:
    """Items cut into so many pieces each, the merges that this takes, and the partial rows in use after ``used``."""
    # Items that are cut, whole until here: each piece gets a tile's rows of the scratch for itself.
    whole = np.flatnonzero(pieces > 1)
    if not len(whole):
        return items, np.empty((0, MERGE), np.int64), used
    held = pieces[whole] * tile.rows
    first_partial = np.full(len(items), -1)
    first_partial[whole] = used + np.cumsum(held) - held
    parts, item, piece = parts_of(items, pieces, tile)
    scratch = first_partial[item]
    parts[:, 7] = np.where(scratch >= 0, scratch + piece * tile.rows, -1)
    # The last block of a span has fewer rows than its tile, and only rows that exist are merged.
    rows = np.minimum(tile.rows, items[whole, 1] - items[whole, 4])
    owner, group = ranges(-(-rows // merged_rows))
    offset, owner = group * merged_rows, whole[owner]
    first = items[owner, 4] + offset
    merges = np.empty((len(owner), MERGE), np.int64)
    merges[:, 0], merges[:, 1] = items[owner, 0], first
    merges[:, 2] = np.minimum(np.minimum(first + merged_rows, items[owner, 1]), items[owner, 4] + tile.rows)
    merges[:, 3], merges[:, 4], merges[:, 5] = first_partial[owner] + offset, pieces[owner], tile.rows
    return parts, merges, used + int(held.sum())


def parts_of(items: Ints, pieces: Ints, tile: Tile) -> tuple[Ints, Ints, Ints]:
    """The pieces of items, and of which item each is which piece. Piece i of n takes key tiles ``[i * steps / n,
    (i + 1) * steps / n)``: rounded down, so that they join without a gap."""
    item, piece = ranges(pieces)
    parts = items[item]
    first, end, count = parts[:, 5].copy(), parts[:, 6], pieces[item]
    steps = -(-(end - first) // tile.keys)
    parts[:, 5] = first + piece * steps // count * tile.keys
    parts[:, 6] = np.minimum(first + (piece + 1) * steps // count * tile.keys, end)
    return parts, item, piece


def longest_first(items: Ints) -> Ints:
    """Items in the order in which a fixed set of programs should take them: the shortest last. Lengths that are nearly
    equal do not count, so that the blocks of a span stay together."""
    size = np.floor(8 * np.log2(items[:, 6] - items[:, 5]))
    return items[np.argsort(-size, kind="stable")]


def steps_of(items: Ints, tile: Tile) -> Ints:
    """Key tiles of each item."""
    steps: Ints = -(-(items[:, 6] - items[:, 5]) // tile.keys)
    return steps


def alone(items: Ints, tile: Tile) -> npt.NDArray[np.bool_]:
    """Which items are the only one of their span."""
    only: npt.NDArray[np.bool_] = items[:, 1] <= tile.rows
    return only


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """For counts (2, 3): which (0, 0, 1, 1, 1) and index in it (0, 1, 0, 1, 2)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
