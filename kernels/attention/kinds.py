"""Kinds of steps, the rules by which their attention is cut, and how much work a step of a kind can make at most.

A captured graph fixes launches, tiles and memory. The *kind* of a step is that choice: one graph per kind and bucket of
tokens serves every step, with a capacity that no step of the bucket exceeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.tiles import Tile, TileSet, choose_tiles
from pensieve.kernels.span_table import HostSpans

ENOUGH = 0.8
"""Blocks of long spans stay whole when they fill this share of the resident programs."""
EVEN_PROGRAMS = 2 / 3
"""An even cut aims at this share of the resident programs: more pieces cost more in merging than they hide."""
LONG = 64
"""From this many key tiles per resident program on, the end of a list is cut finer still."""
SHORT_CONTEXT = 1536
"""Up to this mean context, programs that all start at once are worth their slower reading."""
LEAST_GUIDED = 4
"""The shortest piece at the end of a long list has this many key tiles."""
WIDE_STEP, UNSHARED_STEP, NARROW_STEP = 1.75, 1.8, 1.03
"""Measured on an H200, heads of 128: microseconds that 128 rows and 128 keys take a multiprocessor; that it waits in
addition for keys which no other block has brought into the L2 cache, while narrow items use all of the memory's rate;
and that 64 keys would take a narrow item's multiprocessor at its share of that rate."""
ENOUGH_TO_READ = 0.6
"""This share of the multiprocessors reads as fast as all of them."""
LEAST_SPANS = 4
"""So many spans at least read a beginning together (``prefixes``). A tile of queries takes as long over it as three or
four decodes do, ``WIDE_STEP + UNSHARED_STEP`` against two times ``NARROW_STEP`` each, however few rows are used."""
PARTY_LAYERS = 4
"""Partial rows for each query row of such decodes: for two pieces of the beginning and two of what follows, say."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads, their width, and the device: all that the rules know of a model and a machine."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    multiprocessors: int
    hopper: bool = False
    """Wide items go to the kernel for Hopper devices."""

    @property
    def tiles(self) -> TileSet:
        return choose_tiles(self.head_dim, self.element_bytes, hopper=self.hopper)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class StepKind(Enum):
    """Which launches the attention of a step takes, and with which tiles. All but MIXED take one launch."""

    NARROW = "narrow"
    """No span has more rows than the narrow tile."""
    SHORT = "short"
    """No span has more than 32 rows, and all start at once only with a tile of 32."""
    FEW = "few"
    """No span has more than 64 rows."""
    WIDE = "wide"
    """No span is narrow, and some have more than 64 rows."""
    MIXED = "mixed"
    """Narrow spans, and beside them wider ones."""

    @property
    def has_wide(self) -> bool:
        """Whether there is a list of wide items: for a launch with the large tile."""
        return self in (StepKind.WIDE, StepKind.MIXED)

    @property
    def has_narrow(self) -> bool:
        """Whether there is a list of narrow items: all that are not wide."""
        return self is not StepKind.WIDE

    @property
    def is_mixed(self) -> bool:
        """Whether there are both launches, side by side."""
        return self is StepKind.MIXED

    @property
    def merged_rows(self) -> int:
        """Rows of a cut item that are merged together: one where few items are cut and every microsecond counts."""
        return 1 if self is StepKind.NARROW else 4

    def narrow_tile(self, tiles: TileSet) -> Tile:
        of = {StepKind.SHORT: tiles.short, StepKind.FEW: tiles.few, StepKind.MIXED: tiles.narrow_beside}
        return of.get(self, tiles.narrow)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most work that a plan in fixed memory takes. A launch with capacity 0 is never made."""

    narrow: int
    wide: int
    merges: int
    partial_rows: int
    narrow_programs: int = 0
    """Programs of the narrow launch per KV head; 0: one for each item. With more programs than items, the device would
    not spread those that have an item evenly over its multiprocessors."""


def is_wide(host: HostSpans, geometry: Geometry, narrow: Tile) -> npt.NDArray[np.bool_]:
    """Which spans have more rows than the narrow tile."""
    wide: npt.NDArray[np.bool_] = host[:, 1] > narrow.rows // geometry.groups
    return wide


def classify(host: HostSpans, geometry: Geometry, tiles: TileSet | None = None) -> StepKind:
    """The kind of a step with spans ``host`` int64 [S, 4]; spans of no tokens do not count."""
    tiles = tiles or geometry.tiles
    lengths = host[:, 1]
    most = int(lengths.max(initial=0)) * geometry.groups
    if most <= tiles.narrow.rows:
        return StepKind.NARROW
    if most <= tiles.few.rows:
        return (
            StepKind.SHORT if most <= tiles.short.rows and _is_short(host, geometry, tiles) else StepKind.FEW
        )
    large = is_wide(host, geometry, tiles.narrow)
    if (lengths[~large] > 0).any():
        return StepKind.MIXED
    if not tiles.wide.hopper:  # smaller tiles while the device can start all of the large ones at once
        blocks = int((-(-lengths[large] * geometry.groups // tiles.wide.rows)).sum())
        if blocks <= programs_per_head(tiles.wide, geometry):
            return StepKind.FEW
    return StepKind.WIDE


def _is_short(host: HostSpans, geometry: Geometry, tiles: TileSet) -> bool:
    """Whether all items start at once with the short tile, but not with the next larger one. That one reads faster, and
    wins when contexts are long."""
    lengths = host[:, 1]
    count = int((lengths > 0).sum())
    if not programs_per_head(tiles.few, geometry) < count <= programs_per_head(tiles.short, geometry):
        return False
    return int(host[:, 2].sum() + lengths.sum()) <= SHORT_CONTEXT * count


def programs_per_head(tile: Tile, geometry: Geometry) -> float:
    """How many resident programs one KV head can count on."""
    return tile.resident * geometry.multiprocessors / geometry.kv_heads


def cut_evenly(count: int, total: int, tile: Tile, geometry: Geometry, *, all_single: bool) -> float | None:
    """Key tiles per piece if ``count`` blocks of ``total`` key tiles are cut evenly; None if they are not.

    Blocks that all start at once are cut evenly, into so many pieces that these still all start at once: a piece that
    started later would find every multiprocessor half idle. A longer list fills the device by itself. Of that only the
    end is cut, ever finer, and only blocks that are the only one of their span (``all_single``: all are). The others
    end at different times by themselves, and merging them costs much.
    """
    programs = programs_per_head(tile, geometry)
    if count > programs or (not all_single and count >= ENOUGH * programs):
        return None
    return max(1, tile.least_keys // tile.keys, total / (EVEN_PROGRAMS * programs))


def guided(total: int, tile: Tile, geometry: Geometry) -> tuple[int, float]:
    """For lists that are not cut evenly: the fewest key tiles of a piece, and its length per key tile that remains."""
    programs = programs_per_head(tile, geometry)
    finer = 1 if total >= LONG * programs else 2
    return max(LEAST_GUIDED, tile.least_keys // tile.keys), finer / programs


def capacity_for(
    kind: StepKind,
    max_tokens: int,
    max_spans: int,
    max_context: int,
    geometry: Geometry,
    tiles: TileSet | None = None,
) -> Capacity:
    """A capacity for every step of this kind with q of ``max_tokens`` rows, padding included, with at most
    ``max_spans`` spans that are not empty, and with no query that sees more than ``max_context`` tokens."""
    tiles = tiles or geometry.tiles
    groups, rows = geometry.groups, max_tokens * geometry.groups
    narrow_tile, wide_tile, at_once = kind.narrow_tile(tiles), tiles.wide, kind.merged_rows
    narrow = wide = _Most()
    if kind.has_narrow:
        spans = blocks = min(max_spans, max_tokens)
        if kind is StepKind.FEW and not wide_tile.hopper:
            blocks = _most_blocks(spans + 1, rows, narrow_tile)
        elif not kind.has_wide:  # padding, for few spans or for many
            blocks = max(n - (n - max_tokens) * groups // narrow_tile.rows for n in (0, spans))
        narrow = _most_items(blocks, max_context, narrow_tile, geometry)
    if kind.has_wide:
        shortest = narrow_tile.rows // groups + 1
        spans = min(max_spans, max_tokens // shortest)
        if kind.is_mixed:
            spans = max(spans, min(max_spans, max_tokens) // LEAST_SPANS)
        blocks = _most_blocks(spans + 1, rows, wide_tile)  # padding counts as a span
        wide = _most_items(blocks, max_context, wide_tile, geometry)
    merges = narrow.cut * -(-narrow_tile.rows // at_once) + wide.cut * -(-wide_tile.rows // at_once)
    held = narrow.pieces * narrow_tile.rows + wide.pieces * wide_tile.rows
    if kind.is_mixed:  # spans that read a beginning together, see ``prefixes``
        merges += max_spans * -(-narrow_tile.rows // at_once)
        held += PARTY_LAYERS * min(max_spans, max_tokens) * groups
    return Capacity(narrow.items, wide.items, min(rows, merges), held, narrow.usual)


@dataclass(frozen=True, slots=True)
class _Most:
    """Upper bounds of what one list of a step can hold."""

    items: int = 0
    cut: int = 0
    """Blocks that are cut."""
    pieces: int = 0
    """Items that these make."""
    usual: int = 0
    """Items there are unless contexts differ very much. Launching so many programs is enough for all items."""


def _most_blocks(spans: int, rows: int, tile: Tile) -> int:
    """The most blocks of ``spans`` spans with ``rows`` rows in all: each span has one row more than fills its
    blocks."""
    return spans + max(0, rows - spans) // tile.rows


def _most_items(blocks: int, context: int, tile: Tile, geometry: Geometry) -> _Most:
    """The most that the cuts can make of ``blocks`` blocks.

    In an even cut the pieces' quotients sum up to the programs aimed at. In a guided cut a piece is no shorter than the
    least, nor than its share of what remains; the integral below sums that over all that can remain when an item of the
    longest context is first cut. The least quotient that is cut is 1.5, which rounding can make 4/3 as large.
    """
    programs = programs_per_head(tile, geometry)
    steps = -(-context // tile.keys)
    evenly = min(blocks, math.floor(programs))
    shortest = max(1, tile.least_keys // tile.keys)
    aim = min(math.floor(EVEN_PROGRAMS * programs), evenly * (steps // shortest))
    pieces = aim if aim >= 2 and evenly else 0
    items, cut = max(blocks, evenly - 1 + pieces), min(evenly, pieces // 2)
    usual = max(blocks, pieces)
    if blocks >= ENOUGH * programs:
        finer = 1 if blocks * steps >= LONG * programs else 2
        least = max(LEAST_GUIDED, shortest)
        if steps >= 1.5 * least:
            quotients = programs / finer * (1 + math.log(steps / (1.5 * least)))
            items = max(items, blocks + math.floor(quotients))
            cut = max(cut, min(blocks, math.floor(quotients / 1.5)))
            pieces = max(pieces, math.floor(quotients * 4 / 3))
    return _Most(items, cut, pieces, items if blocks > programs else usual)
