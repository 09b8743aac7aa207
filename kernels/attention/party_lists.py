"""Work lists of a step with parties (``prefixes``): what each party has in common is read once for all its queries.

The kernels know of no parties. A party's queries are one span of rows that stands right behind the common beginning,
so that all of them see all of it: wide items. Each member's own keys, the *suffix*, are narrow items. All of these are
pieces, and the launch that merges pieces adds them up. A party's part of the scratch is in *layers* of one partial row
per query row, one layer for each piece of the beginning and for each piece of a suffix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.cuts import narrow_pieces, wide_pieces
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
    alone,
    blocks,
    cut,
    items_of,
    longest_first,
    padding_items,
    parted,
    parts_of,
    ranges,
    steps_of,
)
from pensieve.kernels.spans import POSITION, Q_LEN, Q_START, TABLE, Ints, Spans

KIND = StepKind.MIXED
"""The kind of every step with parties."""
PIECES = (1, 2, 3, 4, 6, 8, 12)
"""Into so many pieces the longest beginning may be cut."""
SHARES = 8
"""Wide items may get any number of eighths of the multiprocessors."""
SAME = 0.995
"""Estimates that differ by less are equal."""
LAYERS_STEP = NARROW_STEP / 32
"""To write a partial row and to read it again moves a 32nd of the bytes of a narrow item's key tile."""
UNLIMITED = Capacity(*[1 << 40] * 4)


def make_group_lists(
    spans: Spans,
    parties: Ints,
    num_rows: int,
    geometry: Geometry,
    room: Capacity = UNLIMITED,
) -> WorkLists:
    """The lists of a step with these spans, for q of ``num_rows`` rows.

    ``parties`` int64 [n, 3]: first span, spans, and tokens that they have in common, as many as no query of theirs
    lies before, in whole key tiles of both launches; query rows of a party follow each other. ``room``: pieces are no
    more than fit, unless even the fewest do not.
    """
    narrow, wide = KIND.narrow_tile(geometry.tiles), geometry.tiles.wide
    party, member = ranges(parties[:, 1])
    member += parties[party, 0]
    others = spans[:, Q_LEN] > 0
    others[member] = False
    small, big = parted(spans[others], narrow, geometry, KIND)
    plain, suffixes = blocks(small, narrow, geometry), _suffixes(spans[member], parties[party, 2], geometry)
    pieces = _narrow_pieces(np.concatenate([plain, suffixes]), narrow, geometry)
    first, first_merges, used = cut(plain, pieces[: len(plain)], narrow, 0, KIND.merged_rows)
    large = blocks(big, wide, geometry)
    cuts = wide_pieces(steps_of(large, wide), alone(large, wide), wide, geometry)
    second, second_merges, used = cut(large, cuts, wide, used, KIND.merged_rows)
    covered = int((spans[:, Q_START] + spans[:, Q_LEN]).max())
    padding = padding_items(covered, num_rows - covered, wide, geometry.groups)

    begins = np.cumsum(parties[:, 1]) - parties[:, 1]
    rows = np.add.reduceat(suffixes[:, ROWS], begins)
    layers = max(2, (room.partial_rows - used) // int(rows.sum()))
    own = np.minimum(pieces[len(plain) :], layers - 1)
    own[suffixes[:, FIRST_KEY] >= suffixes[:, END_KEY]] = 0
    work = _Beginnings(
        rows, parties[:, 2] // wide.keys, layers - np.maximum.reduceat(own, begins),
        room.wide - len(second) - len(padding), wide, geometry,
    )  # fmt: skip
    reading = sum(int(steps_of(items, narrow).sum()) for items in (plain, suffixes))
    cuts, programs = work.dealt(second, reading)

    laid = _Laid.of(spans[parties[:, 0]], parties[:, 2], rows, cuts, party, suffixes, own, used)
    narrow_items = np.concatenate([first, laid.suffix_items(narrow)])
    wide_items = np.concatenate([second, laid.beginnings(wide)])
    merges = np.concatenate([first_merges, second_merges, laid.merges(geometry)])
    length = narrow_items[:, END_KEY] - narrow_items[:, FIRST_KEY]
    return WorkLists(
        narrow_items[np.argsort(-length, kind="stable")],
        np.concatenate([longest_first(wide_items), padding]),
        merges,
        laid.end,
        programs if wide.hopper else geometry.multiprocessors,
    )


def _suffixes(spans: Spans, common: Ints, geometry: Geometry) -> Ints:
    """An item for what each span [n, 4] sees behind the ``common`` tokens of its party; it may be empty."""
    items = items_of(spans, spans[:, Q_LEN] * geometry.groups)
    items[:, FIRST_KEY], items[:, END_KEY] = common, spans[:, Q_LEN] + spans[:, POSITION]
    return items


def _narrow_pieces(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Into how many pieces items in any order are cut."""
    order = np.argsort(items[:, FIRST_KEY] - items[:, END_KEY], kind="stable")
    pieces = np.empty(len(items), np.int64)
    pieces[order] = narrow_pieces(steps_of(items[order], tile), tile, geometry)
    return pieces


@dataclass(frozen=True, slots=True)
class _Beginnings:
    """The beginnings of all parties, before they are cut."""

    rows: Ints
    """Query rows of each party."""
    steps: Ints
    """Key tiles of what each has in common."""
    layers: Ints
    """The most pieces that the scratch has room for."""
    room: int
    """Wide items that there is room for."""
    tile: Tile
    geometry: Geometry

    def dealt(self, others: Ints, reading: int) -> tuple[Ints, int]:
        """Into how many pieces each beginning is cut, and among how many programs wide items are shared out, so that
        the step ends soonest: estimated from the rates in ``kinds`` for each way that is worth a thought. ``others``:
        the wide items beside; ``reading``: key tiles of narrow items."""
        count = -(-self.rows // self.tile.rows)
        heads, everything = self.geometry.kv_heads, self.geometry.multiprocessors
        most = np.minimum(self.layers, self.steps * self.tile.keys // self.tile.least_keys)
        most = np.maximum(1, np.minimum(most, self.room // int(count.sum())))
        lengths = steps_of(others, self.tile)
        total = int((count * self.steps).sum() + lengths.sum())
        fresh = int(self.steps.sum() + lengths[others[:, FIRST_ROW] == 0].sum())
        step_us = WIDE_STEP + UNSHARED_STEP * fresh / total
        reading_us = reading * heads * NARROW_STEP / everything
        best, chosen = math.inf, (most, everything)
        tried = set[bytes]()
        for pieces in PIECES:
            cuts = np.clip(self.steps * pieces // int(self.steps.max()), 1, most)
            if cuts.tobytes() in tried:
                continue
            tried.add(cuts.tobytes())
            works = int((count * cuts).sum()) + len(lengths)
            longest = max(int((-(-self.steps // cuts)).max()), int(lengths.max(initial=0)))
            merging_us = int((self.rows * cuts).sum()) * heads * LAYERS_STEP / everything
            # Of two that are as good, the larger one: too small a share costs more.
            for share in range(SHARES, 0, -1):
                programs = max(1, everything * share // SHARES)
                turns = -(-works * heads // programs)
                wide_us = step_us * max(longest, turns * total / works)
                left = 1 - min(programs, works * heads) / everything
                # What narrow items have not read when the wide ones end, they read with all of the device.
                rest_us = max(0.0, reading_us - wide_us * min(1.0, left / ENOUGH_TO_READ))
                if wide_us + rest_us + merging_us < SAME * best:
                    best, chosen = wide_us + rest_us + merging_us, (cuts, min(programs, works * heads))
        return chosen


@dataclass(frozen=True, slots=True)
class _Laid:
    """Parties with their cuts and their places in the scratch."""

    first: Spans
    """First span of each party, [n, 4]."""
    common: Ints
    rows: Ints
    cuts: Ints
    """Pieces of each beginning."""
    party: Ints
    """Party of each member."""
    suffixes: Ints
    """[m, 8]"""
    own: Ints
    """Pieces of each suffix, from 0."""
    places: Ints
    """First partial row of each party."""
    offsets: Ints
    """First row of each member among those of its party."""
    end: int
    """Partial rows of the whole step."""

    @classmethod
    def of(
        cls,
        first: Spans,
        common: Ints,
        rows: Ints,
        cuts: Ints,
        party: Ints,
        suffixes: Ints,
        own: Ints,
        used: int,
    ) -> _Laid:
        """``used``: partial rows that the rest of the step takes."""
        begins = np.flatnonzero(_begins(party))
        ends = used + np.cumsum((cuts + np.maximum.reduceat(own, begins)) * rows)
        before = np.cumsum(suffixes[:, ROWS]) - suffixes[:, ROWS]
        places = np.concatenate([[used], ends[:-1]])
        offsets = before - before[begins][party]
        return cls(first, common, rows, cuts, party, suffixes, own, places, offsets, int(ends[-1]))

    def beginnings(self, tile: Tile) -> Ints:
        count = -(-self.rows // tile.rows)
        party, index = ranges(self.cuts * count)
        piece, block = index // count[party], index % count[party]
        whole = np.zeros((len(self.first), ITEM), np.int64)
        whole[:, Q_START], whole[:, ROWS], whole[:, TABLE] = (
            self.first[:, Q_START],
            self.rows,
            self.first[:, TABLE],
        )
        whole[:, POSITION], whole[:, END_KEY] = self.common - 1, self.common
        parts, _, _ = parts_of(whole, self.cuts, tile)
        begin = np.cumsum(self.cuts) - self.cuts
        items = parts[begin[party] + piece]
        items[:, FIRST_ROW] = block * tile.rows
        items[:, PARTIAL] = self.places[party] + piece * self.rows[party] + items[:, FIRST_ROW]
        return items

    def suffix_items(self, tile: Tile) -> Ints:
        items, member, piece = parts_of(self.suffixes, self.own, tile)
        party = self.party[member]
        layer = self.cuts[party] + piece
        items[:, PARTIAL] = self.places[party] + layer * self.rows[party] + self.offsets[member]
        return items

    def merges(self, geometry: Geometry) -> Ints:
        """Rows of neighbours with as many pieces are merged together."""
        begins = np.flatnonzero(_begins(self.party) | _begins(self.own))
        rows = np.add.reduceat(self.suffixes[:, ROWS], begins)
        run, index = ranges(-(-rows // KIND.merged_rows))
        party = self.party[begins][run]
        begin = self.offsets[begins][run]
        merges = np.empty((len(run), MERGE), np.int64)
        first = begin + index * KIND.merged_rows
        merges[:, Q_START], merges[:, MERGE_FIRST] = self.first[party, Q_START], first
        merges[:, MERGE_END] = np.minimum(first + KIND.merged_rows, begin + rows[run])
        merges[:, MERGE_PARTIAL] = self.places[party] + first
        merges[:, MERGE_PIECES] = self.cuts[party] + self.own[begins][run]
        merges[:, MERGE_STRIDE] = self.rows[party]
        return merges


def _begins(values: Ints) -> npt.NDArray[np.bool_]:
    """Where values differ from the one before, the first included."""
    begins = np.ones(len(values), np.bool_)
    begins[1:] = values[1:] != values[:-1]
    return begins
