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
from pensieve.kernels.attention.kinds import (
    ENOUGH_TO_READ,
    NARROW_STEP,
    UNSHARED_STEP,
    WIDE_STEP,
    Geometry,
    StepKind,
)
from pensieve.kernels.attention.narrow_cuts import narrow_pieces
from pensieve.kernels.attention.tiles import Tile, TileSet
from pensieve.kernels.attention.wide_cuts import wide_pieces
from pensieve.kernels.attention.work_lists import (
    ITEM,
    MERGE,
    WorkLists,
    alone,
    blocks,
    cut,
    longest_first,
    padding_items,
    parted,
    parts_of,
    ranges,
    steps_of,
)
from pensieve.kernels.span_table import HostSpans, Ints

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


def make_party_lists(
    host: HostSpans,
    parties: Ints,
    num_rows: int,
    geometry: Geometry,
    tiles: TileSet,
    room: Capacity = UNLIMITED,
) -> WorkLists:
    """The lists of a step whose spans are ``host`` int64 [S, 4], for q of ``num_rows`` rows.

    ``parties`` int64 [n, 3]: first span, spans, and tokens that they have in common, as many as no query of theirs
    lies before, in whole key tiles of both launches; query rows of a party follow each other. ``room``: pieces are no
    more than fit, unless even the fewest do not.
    """
    narrow, wide = KIND.narrow_tile(tiles), tiles.wide
    party, member = ranges(parties[:, 1])
    member += parties[party, 0]
    others = host[:, 1] > 0
    others[member] = False
    small, big = parted(host[others], narrow, geometry, KIND)
    plain, suffixes = blocks(small, narrow, geometry), _suffixes(host[member], parties[party, 2], geometry)
    pieces = _narrow_pieces(np.concatenate([plain, suffixes]), narrow, geometry)
    first, first_merges, used = cut(plain, pieces[: len(plain)], narrow, 0, KIND.merged_rows)
    large = blocks(big, wide, geometry)
    cuts = wide_pieces(steps_of(large, wide), alone(large, wide), wide, geometry)
    second, second_merges, used = cut(large, cuts, wide, used, KIND.merged_rows)
    covered = int((host[:, 0] + host[:, 1]).max())
    padding = padding_items(covered, num_rows - covered, wide, geometry.groups)

    begins = np.cumsum(parties[:, 1]) - parties[:, 1]
    rows = np.add.reduceat(suffixes[:, 1], begins)
    layers = max(2, (room.partial_rows - used) // int(rows.sum()))
    own = np.minimum(pieces[len(plain) :], layers - 1)
    own[suffixes[:, 5] >= suffixes[:, 6]] = 0
    work = _Beginnings(
        rows, parties[:, 2] // wide.keys, layers - np.maximum.reduceat(own, begins),
        room.wide - len(second) - len(padding), wide, geometry,
    )  # fmt: skip
    reading = sum(int(steps_of(items, narrow).sum()) for items in (plain, suffixes))
    cuts, programs = work.dealt(second, reading)

    laid = _Laid.of(host[parties[:, 0]], parties[:, 2], rows, cuts, party, suffixes, own, used)
    narrow_items = np.concatenate([first, laid.suffix_items(narrow)])
    wide_items = np.concatenate([second, laid.beginnings(wide)])
    merges = np.concatenate([first_merges, second_merges, laid.merges(geometry)])
    length = narrow_items[:, 6] - narrow_items[:, 5]
    return WorkLists(
        narrow_items[np.argsort(-length, kind="stable")],
        np.concatenate([longest_first(wide_items), padding]),
        merges,
        laid.end,
        programs if wide.hopper else geometry.multiprocessors,
    )


def _suffixes(host: HostSpans, common: Ints, geometry: Geometry) -> Ints:
    """An item for what each span [n, 4] sees behind the ``common`` tokens of its party; it may be empty."""
    items = np.zeros((len(host), ITEM), np.int64)
    items[:, 0], items[:, 1], items[:, 2:4] = host[:, 0], host[:, 1] * geometry.groups, host[:, 2:4]
    items[:, 5], items[:, 6] = common, host[:, 1] + host[:, 2]
    return items


def _narrow_pieces(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Into how many pieces items in any order are cut."""
    order = np.argsort(items[:, 5] - items[:, 6], kind="stable")
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
        fresh = int(self.steps.sum() + lengths[others[:, 4] == 0].sum())
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

    first: HostSpans
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
        first: HostSpans,
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
        before = np.cumsum(suffixes[:, 1]) - suffixes[:, 1]
        places = np.concatenate([[used], ends[:-1]])
        offsets = before - before[begins][party]
        return cls(first, common, rows, cuts, party, suffixes, own, places, offsets, int(ends[-1]))

    def beginnings(self, tile: Tile) -> Ints:
        count = -(-self.rows // tile.rows)
        party, index = ranges(self.cuts * count)
        piece, block = index // count[party], index % count[party]
        whole = np.zeros((len(self.first), ITEM), np.int64)
        whole[:, 0], whole[:, 1], whole[:, 3] = self.first[:, 0], self.rows, self.first[:, 3]
        whole[:, 2], whole[:, 6] = self.common - 1, self.common
        parts, _, _ = parts_of(whole, self.cuts, tile)
        begin = np.cumsum(self.cuts) - self.cuts
        items = parts[begin[party] + piece]
        items[:, 4] = block * tile.rows
        items[:, 7] = self.places[party] + piece * self.rows[party] + items[:, 4]
        return items

    def suffix_items(self, tile: Tile) -> Ints:
        items, member, piece = parts_of(self.suffixes, self.own, tile)
        party = self.party[member]
        layer = self.cuts[party] + piece
        items[:, 7] = self.places[party] + layer * self.rows[party] + self.offsets[member]
        return items

    def merges(self, geometry: Geometry) -> Ints:
        """Rows of neighbours with as many pieces are merged together."""
        begins = np.flatnonzero(_begins(self.party) | _begins(self.own))
        rows = np.add.reduceat(self.suffixes[:, 1], begins)
        run, index = ranges(-(-rows // KIND.merged_rows))
        party = self.party[begins][run]
        begin = self.offsets[begins][run]
        merges = np.empty((len(run), MERGE), np.int64)
        merges[:, 0] = self.first[party, 0]
        merges[:, 1] = begin + index * KIND.merged_rows
        merges[:, 2] = np.minimum(merges[:, 1] + KIND.merged_rows, begin + rows[run])
        merges[:, 3] = self.places[party] + merges[:, 1]
        merges[:, 4], merges[:, 5] = self.cuts[party] + self.own[begins][run], self.rows[party]
        return merges


def _begins(values: Ints) -> npt.NDArray[np.bool_]:
    """Where values differ from the one before, the first included."""
    begins = np.ones(len(values), np.bool_)
    begins[1:] = values[1:] != values[:-1]
    return begins
