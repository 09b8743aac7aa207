"""Work lists of a step with prefix groups (``prefixes``): each common prefix is read once for all its
queries.

The kernels know nothing of prefix groups. A group's queries are one span of rows right behind the common
prefix, so that all of them see all of it: wide items. Each member's own keys, the *suffix*, are narrow items.
All of these are pieces, and the merge launch adds them up. A group's part of the scratch consists of *layers*
of one partial row per query row: one layer for each piece of the prefix and for each piece of a suffix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.cuts import fixed_count, narrow_pieces
from pensieve.kernels.attention.kinds import (
    ENOUGH_TO_READ,
    NARROW_STEP,
    UNSHARED_STEP,
    WIDE_STEP,
    Geometry,
    StepKind,
)
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.attention.work_lists import (
    END_KEY,
    FIRST_KEY,
    FIRST_ROW,
    ITEM,
    MERGE,
    MERGE_END,
    MERGE_FIRST,
    MERGE_PARTIAL,
    MERGE_PIECES,
    MERGE_STRIDE,
    PARTIAL,
    ROWS,
    WorkLists,
    items_for,
    key_tiles,
    longest_first,
    make_blocks,
    make_pieces,
    narrow_counts,
    owners_and_indices,
    padding_items,
    split_by_width,
    split_items,
    wide_counts,
)
from pensieve.kernels.spans import POSITION, Q_LEN, Q_START, TABLE, Ints, Spans

PREFIX_GROUP_KIND = StepKind.MIXED
"""Kind of every step with prefix groups."""
PIECE_COUNTS = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of pieces to try for the longest prefix."""
SHARE_STEPS = 8
"""Wide items may get any number of eighths of the multiprocessors."""
TIE_RATIO = 0.995
"""Estimates closer than this ratio count as equal."""
LAYER_STEP = NARROW_STEP / 32
"""Microseconds to write and read a partial row: it moves a 32nd of the bytes of a narrow item's key tile."""
UNLIMITED = Capacity(*[1 << 40] * 4)


def make_group_lists(
    spans: Spans,
    prefix_groups: Ints,
    num_rows: int,
    geometry: Geometry,
    room: Capacity = UNLIMITED,
) -> WorkLists:
    """Return the lists of a step with these spans, for q of ``num_rows`` rows.

    ``prefix_groups`` int64 [n, 3]: first span, number of spans, and common tokens. The common tokens are
    whole key tiles of both launches, and no query of the group lies before their end; query rows of a group
    are adjacent. ``room`` limits the pieces, unless even the fewest do not fit.
    """
    narrow, wide = PREFIX_GROUP_KIND.narrow_tile(geometry.tiles), geometry.tiles.wide
    group, member = owners_and_indices(prefix_groups[:, 1])
    member += prefix_groups[group, 0]
    others = spans[:, Q_LEN] > 0
    others[member] = False
    small, big = split_by_width(spans[others], narrow, geometry, PREFIX_GROUP_KIND)
    plain = make_blocks(small, narrow, geometry)
    suffixes = _suffixes(spans[member], prefix_groups[group, 2], geometry)
    if geometry.piece:
        parts = [
            narrow_counts(plain, narrow, geometry),
            fixed_count(suffixes[:, FIRST_KEY], suffixes[:, END_KEY], geometry.piece),
        ]
        pieces = np.concatenate(parts)
    else:
        pieces = _narrow_pieces(np.concatenate([plain, suffixes]), narrow, geometry)
    merged, fixed = PREFIX_GROUP_KIND.merged_rows, geometry.piece
    first, first_merges, used = split_items(plain, pieces[: len(plain)], narrow, 0, merged, fixed)
    large = make_blocks(big, wide, geometry)
    large_pieces = wide_counts(large, wide, geometry)
    second, second_merges, used = split_items(large, large_pieces, wide, used, merged, fixed)
    covered = int((spans[:, Q_START] + spans[:, Q_LEN]).max())
    padding = padding_items(covered, num_rows - covered, wide, geometry.groups)

    begins = np.cumsum(prefix_groups[:, 1]) - prefix_groups[:, 1]
    rows = np.add.reduceat(suffixes[:, ROWS], begins)
    layers = max(2, (room.partial_rows - used) // int(rows.sum()))
    suffix_pieces = pieces[len(plain) :] if geometry.piece else np.minimum(pieces[len(plain) :], layers - 1)
    suffix_pieces[suffixes[:, FIRST_KEY] >= suffixes[:, END_KEY]] = 0
    if geometry.piece:
        prefix_pieces = fixed_count(0 * prefix_groups[:, 2], prefix_groups[:, 2], geometry.piece)
        programs = geometry.multiprocessors
    else:
        work = _Prefixes(
            rows, prefix_groups[:, 2] // wide.keys, layers - np.maximum.reduceat(suffix_pieces, begins),
            room.wide - len(second) - len(padding), wide, geometry,
        )  # fmt: skip
        reading = sum(int(key_tiles(items, narrow).sum()) for items in (plain, suffixes))
        prefix_pieces, programs = work.choose_pieces(second, reading)

    first_spans, common = spans[prefix_groups[:, 0]], prefix_groups[:, 2]
    layout = _GroupLayout(first_spans, common, rows, prefix_pieces, group, suffixes, suffix_pieces, used)
    narrow_items = np.concatenate([first, layout.suffix_items(narrow, fixed)])
    wide_items = np.concatenate([second, layout.prefix_items(wide, fixed)])
    merges = np.concatenate([first_merges, second_merges, layout.merges()])
    length = narrow_items[:, END_KEY] - narrow_items[:, FIRST_KEY]
    return WorkLists(
        narrow_items[np.argsort(-length, kind="stable")],
        np.concatenate([longest_first(wide_items), padding]),
        merges,
        layout.end,
        programs if wide.hopper else geometry.multiprocessors,
    )


def _suffixes(spans: Spans, common: Ints, geometry: Geometry) -> Ints:
    """Return one item for the keys of each span [n, 4] behind the ``common`` tokens of its group; it may be empty."""
    items = items_for(spans, spans[:, Q_LEN] * geometry.groups)
    items[:, FIRST_KEY], items[:, END_KEY] = common, spans[:, Q_LEN] + spans[:, POSITION]
    return items


def _narrow_pieces(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each item, for items in any order."""
    order = np.argsort(items[:, FIRST_KEY] - items[:, END_KEY], kind="stable")
    pieces = np.empty(len(items), np.int64)
    pieces[order] = narrow_pieces(key_tiles(items[order], tile), tile, geometry)
    return pieces


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """The common prefixes of all groups, before they are split."""

    rows: Ints
    """Query rows of each group."""
    steps: Ints
    """Key tiles of each common prefix."""
    layers: Ints
    """Most pieces that the scratch can hold, per group."""
    room: int
    tile: Tile
    geometry: Geometry

    def choose_pieces(self, others: Ints, reading: int) -> tuple[Ints, int]:
        """Choose the pieces of each prefix and the number of programs for wide items, so that the step ends
        earliest. Estimated from the rates in ``kinds`` for each promising combination. ``others``: the other
        wide items. ``reading``: key tiles of narrow items."""
        count = -(-self.rows // self.tile.rows)
        heads, everything = self.geometry.kv_heads, self.geometry.multiprocessors
        most = np.minimum(self.layers, self.steps * self.tile.keys // self.tile.least_keys)
        most = np.maximum(1, np.minimum(most, self.room // int(count.sum())))
        lengths = key_tiles(others, self.tile)
        total = int((count * self.steps).sum() + lengths.sum())
        fresh = int(self.steps.sum() + lengths[others[:, FIRST_ROW] == 0].sum())
        step_us = WIDE_STEP + UNSHARED_STEP * fresh / total
        reading_us = reading * heads * NARROW_STEP / everything
        best, chosen = math.inf, (most, everything)
        tried = set[bytes]()
        for pieces in PIECE_COUNTS:
            prefix_pieces = np.clip(self.steps * pieces // int(self.steps.max()), 1, most)
            if prefix_pieces.tobytes() in tried:
                continue
            tried.add(prefix_pieces.tobytes())
            works = int((count * prefix_pieces).sum()) + len(lengths)
            longest = max(int((-(-self.steps // prefix_pieces)).max()), int(lengths.max(initial=0)))
            merging_us = int((self.rows * prefix_pieces).sum()) * heads * LAYER_STEP / everything
            # On a tie take the larger share: too small a share costs more.
            for share in range(SHARE_STEPS, 0, -1):
                programs = max(1, everything * share // SHARE_STEPS)
                turns = -(-works * heads // programs)
                wide_us = step_us * max(longest, turns * total / works)
                left = 1 - min(programs, works * heads) / everything
                # Narrow items that remain when the wide ones end get the whole device.
                rest_us = max(0.0, reading_us - wide_us * min(1.0, left / ENOUGH_TO_READ))
                if wide_us + rest_us + merging_us < TIE_RATIO * best:
                    best = wide_us + rest_us + merging_us
                    chosen = prefix_pieces, min(programs, works * heads)
        return chosen


@dataclass(slots=True)
class _GroupLayout:
    """Prefix groups with their pieces and their partial rows in the scratch."""

    first: Spans
    """First span of each group, [n, 4]."""
    common: Ints
    rows: Ints
    prefix_pieces: Ints
    group: Ints
    suffixes: Ints
    """[m, 8]"""
    suffix_pieces: Ints
    """Pieces of each suffix, from 0."""
    used: int
    """Partial rows of the rest of the step."""
    starts: Ints = field(init=False)
    """First partial row of each group."""
    offsets: Ints = field(init=False)
    """First row of each member among those of its group."""
    end: int = field(init=False)

    def __post_init__(self) -> None:
        begins = np.flatnonzero(_run_starts(self.group))
        layers = self.prefix_pieces + np.maximum.reduceat(self.suffix_pieces, begins)
        ends = self.used + np.cumsum(layers * self.rows)
        before = np.cumsum(self.suffixes[:, ROWS]) - self.suffixes[:, ROWS]
        self.starts = np.concatenate([[self.used], ends[:-1]])
        self.offsets = before - before[begins][self.group]
        self.end = int(ends[-1])

    def prefix_items(self, tile: Tile, fixed: int) -> Ints:
        count = -(-self.rows // tile.rows)
        group, index = owners_and_indices(self.prefix_pieces * count)
        piece, block = index // count[group], index % count[group]
        whole = np.zeros((len(self.first), ITEM), np.int64)
        whole[:, [Q_START, TABLE]], whole[:, ROWS] = self.first[:, [Q_START, TABLE]], self.rows
        whole[:, POSITION], whole[:, END_KEY] = self.common - 1, self.common
        parts, _, _ = make_pieces(whole, self.prefix_pieces, tile, fixed)
        begin = np.cumsum(self.prefix_pieces) - self.prefix_pieces
        items = parts[begin[group] + piece]
        items[:, FIRST_ROW] = block * tile.rows
        items[:, PARTIAL] = self.starts[group] + piece * self.rows[group] + items[:, FIRST_ROW]
        return items

    def suffix_items(self, tile: Tile, fixed: int) -> Ints:
        items, member, piece = make_pieces(self.suffixes, self.suffix_pieces, tile, fixed)
        group = self.group[member]
        layer = self.prefix_pieces[group] + piece
        items[:, PARTIAL] = self.starts[group] + layer * self.rows[group] + self.offsets[member]
        return items

    def merges(self) -> Ints:
        """Rows of neighbours with equally many pieces are merged together."""
        begins = np.flatnonzero(_run_starts(self.group) | _run_starts(self.suffix_pieces))
        rows = np.add.reduceat(self.suffixes[:, ROWS], begins)
        owner, index = owners_and_indices(-(-rows // PREFIX_GROUP_KIND.merged_rows))
        group = self.group[begins][owner]
        begin = self.offsets[begins][owner]
        merges = np.empty((len(owner), MERGE), np.int64)
        first = begin + index * PREFIX_GROUP_KIND.merged_rows
        merges[:, Q_START], merges[:, MERGE_FIRST] = self.first[group, Q_START], first
        merges[:, MERGE_END] = np.minimum(first + PREFIX_GROUP_KIND.merged_rows, begin + rows[owner])
        merges[:, MERGE_PARTIAL] = self.starts[group] + first
        merges[:, MERGE_PIECES] = self.prefix_pieces[group] + self.suffix_pieces[begins][owner]
        merges[:, MERGE_STRIDE] = self.rows[group]
        return merges


def _run_starts(values: Ints) -> npt.NDArray[np.bool_]:
    """Return where a value differs from the one before it; the first always counts."""
    begins = np.ones(len(values), np.bool_)
    begins[1:] = values[1:] != values[:-1]
    return begins
