"""Work lists of the ragged paged attention kernel: made on the CPU once per step.

A span's query tokens times the G query heads of one KV head are its rows; a block of rows is an item, and an item with
many keys may be cut into pieces that are merged afterwards. Spans with few rows are *narrow* and wait for memory all
the time; *wide* ones compute. Either kind gets a launch with tiles of its own. The lists hold no heads: a launch takes
every item once per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention_tiles import Tile, TileSet
from pensieve.kernels.span_table import HostSpans

Ints = npt.NDArray[np.int64]

ITEM = 8
"""Words of an item: first row of q, rows of the span, position, page-table row, first row of the block, first key,
end of keys, first partial row (-1: the item is whole and writes its result itself)."""
MERGE = 5
"""Words of a merge: row of q, query head within the KV head, its partial row in the first piece, pieces, rows
between pieces."""
ENOUGH = 0.8
"""Share of the resident programs that blocks of long spans must fill to be left whole."""
EVEN_PROGRAMS = 2 / 3
"""Share of the resident programs that an even cut aims at: more pieces cost more in merging than they hide."""
LONG = 64
"""Key tiles per resident program from which the end of a list is cut finer still."""


@dataclass(frozen=True, slots=True)
class Geometry:
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    multiprocessors: int

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Work:
    """One step: items [n, 8] of both launches, merges [m, 5]."""

    narrow: Ints
    wide: Ints
    merges: Ints
    partial_rows: int
    """Scratch rows per KV head that the pieces write."""


def is_wide(host: HostSpans, geometry: Geometry, tiles: TileSet) -> npt.NDArray[np.bool_]:
    """Which spans have more rows than a narrow tile."""
    wide: npt.NDArray[np.bool_] = host[:, 1] * geometry.groups > tiles.narrow.rows
    return wide


def choose_wide(host: HostSpans, geometry: Geometry, tiles: TileSet) -> Tile:
    """The tile of a step's wide spans: large if some span needs it and the device cannot start all of them at once."""
    rows = host[is_wide(host, geometry, tiles), 1] * geometry.groups
    room = tiles.wide.resident * geometry.multiprocessors
    programs = int((-(-rows // tiles.wide.rows)).sum()) * geometry.kv_heads
    few = programs <= room or int(rows.max(initial=0)) <= tiles.wide_few.rows
    return tiles.wide_few if few else tiles.wide


def make_work(
    host: HostSpans, num_rows: int, geometry: Geometry, tiles: TileSet, narrow: Tile, wide: Tile
) -> Work:
    """The lists of a step whose spans are ``host`` int64 [S, 4], for q of ``num_rows`` rows."""
    covered = int((host[:, 0] + host[:, 1]).max(initial=0))
    host = host[host[:, 1] > 0]
    is_large = is_wide(host, geometry, tiles)
    narrow_blocks = _blocks(host[~is_large], narrow, geometry.groups)
    wide_blocks = _blocks(host[is_large], wide, geometry.groups)
    # Rows outside every span: blocks without keys, which come out as 0.
    rest = np.array([[covered, num_rows - covered, 0, 0]])
    padding = _blocks(rest, narrow, geometry.groups) if num_rows > covered else np.empty((0, ITEM), np.int64)
    padding[:, 6] = 0
    first, first_merges, used = _cut(narrow_blocks, narrow, geometry, 0, is_narrow=True)
    second, second_merges, used = _cut(wide_blocks, wide, geometry, used, is_narrow=False)
    if len(narrow_blocks) and len(
        wide_blocks
    ):  # beside narrow items, wide ones are taken by a fixed set of programs
        second = _dealt(second, max(1, round(geometry.multiprocessors / geometry.kv_heads)))
    return Work(
        narrow=np.concatenate([first, padding]),
        wide=second,
        merges=np.concatenate([first_merges, second_merges]),
        partial_rows=used,
    )


def _blocks(host: HostSpans, tile: Tile, groups: int) -> Ints:
    """Uncut items of spans [n, 4]: longest contexts first, and the blocks of a span together, for the L2 cache."""
    rows = host[:, 1] * groups
    span, block = _ranges(-(-rows // tile.rows))
    start, _, position, row = host[span].T
    first = block * tile.rows
    last_token = (np.minimum(first + tile.rows, rows[span]) - 1) // groups
    seen = position + last_token + 1
    zero = np.zeros_like(seen)
    items = np.stack([start, rows[span], position, row, first, zero, seen, zero - 1], axis=1)
    return items[np.lexsort((-seen, span, -(position + host[span, 1])))]


def _cut(
    items: Ints, tile: Tile, geometry: Geometry, used: int, *, is_narrow: bool
) -> tuple[Ints, Ints, int]:
    """Items cut into pieces, the merges that this takes, and the partial rows in use after ``used``."""
    steps = -(-items[:, 6] // tile.keys)
    pieces = np.maximum(1, _pieces(items, steps, tile, geometry, is_narrow=is_narrow))
    cut = pieces > 1
    held = np.where(cut, pieces * tile.rows, 0)
    first_partial = used + np.cumsum(held) - held
    item, piece = _ranges(pieces)
    parts = items[item]
    parts[:, 5] = piece * steps[item] // pieces[item] * tile.keys
    parts[:, 6] = np.minimum((piece + 1) * steps[item] // pieces[item] * tile.keys, items[item, 6])
    parts[:, 7] = np.where(cut[item], first_partial[item] + piece * tile.rows, -1)
    whole = np.flatnonzero(cut)
    owner, offset = _ranges(np.minimum(tile.rows, items[whole, 1] - items[whole, 4]))
    owner = whole[owner]
    row = items[owner, 4] + offset
    groups = geometry.groups
    columns = [items[owner, 0] + row // groups, row % groups, first_partial[owner] + offset, pieces[owner]]
    merges = np.stack([*columns, np.full_like(row, tile.rows)], axis=1)
    return parts, merges, used + int(held.sum())


def _pieces(items: Ints, steps: Ints, tile: Tile, geometry: Geometry, *, is_narrow: bool) -> Ints:
    """Into how many pieces each item is cut.

    Items that start all at once are cut evenly, and so that their pieces still do: whatever starts later would find
    every multiprocessor half idle. A longer list fills the device by itself; only its end is cut, ever finer.
    """
    programs = tile.resident * geometry.multiprocessors / geometry.kv_heads
    least = max(1, tile.least_keys // tile.keys)
    total = int(steps.sum())
    may_cut = np.ones(len(items), bool)
    even = bool(len(items) <= programs)
    if not is_narrow and not (items[:, 1] <= tile.rows).all():
        # Blocks of long spans end at different times by themselves, and merging them costs much.
        even, may_cut = len(items) < ENOUGH * programs, items[:, 1] <= tile.rows
    if even:
        even_pieces: Ints = (steps / max(least, total / (EVEN_PROGRAMS * programs))).astype(np.int64)
        return even_pieces
    remaining = total - np.cumsum(steps) + steps
    finer = 1 if total >= LONG * programs else 2
    pieces = np.rint(steps / np.maximum(max(least, 4), finer * remaining / programs))
    chosen: Ints = np.where(may_cut, pieces, 1).astype(np.int64)
    return chosen


def _dealt(items: Ints, hands: int) -> Ints:
    """Items in an order that makes equal hands when every ``hands``-th goes to one program: there and back again."""
    order = np.argsort(items[:, 5] - items[:, 6], kind="stable")
    turns = [order[first : first + hands] for first in range(0, len(order), hands)]
    dealt: Ints = items[np.concatenate([part[:: 1 - 2 * (turn % 2)] for turn, part in enumerate(turns)])]
    return dealt


def _ranges(counts: Ints) -> tuple[Ints, Ints]:
    """For counts (2, 3): which (0, 0, 1, 1, 1) and index in it (0, 1, 0, 1, 2)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
