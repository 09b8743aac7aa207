"""The most work that a step of a kind makes: what memory and launches of a captured graph are laid out for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pensieve.kernels.attention.cuts import MostPieces, most_narrow_pieces, most_wide_pieces
from pensieve.kernels.attention.kinds import LEAST_SPANS, Geometry, StepKind, programs_per_head
from pensieve.kernels.attention.tiles import Tile

PARTY_LAYERS = 4
"""Partial rows for each query row of spans that read a beginning together: for two pieces of the beginning and two of
what follows, say."""
FEW_BLOCKS = 0.7
"""Where there are fewer narrow blocks than this share of the resident programs, no more programs are launched than can
start at once: the merge begins when all of them have, which cost 2 µs when some had to wait for others to end."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most work that a plan in fixed memory takes. A launch with capacity 0 is never made."""

    narrow: int
    wide: int
    merges: int
    partial_rows: int
    narrow_programs: int = 0
    """Programs of the narrow launch per KV head, which share out the items; 0: one for each."""


def capacity_for(
    kind: StepKind,
    max_tokens: int,
    max_spans: int,
    max_context: int,
    geometry: Geometry,
) -> Capacity:
    """A capacity for every step of this kind with q of ``max_tokens`` rows, padding included, with at most
    ``max_spans`` spans that are not empty, and with no query that sees more than ``max_context`` tokens."""
    tiles = geometry.tiles
    groups, rows = geometry.groups, max_tokens * geometry.groups
    narrow_tile, wide_tile, at_once = kind.narrow_tile(tiles), tiles.wide, kind.merged_rows
    narrow_blocks = wide_blocks = 0
    narrow = wide = MostPieces(0, 0, 0)
    if kind.has_narrow:
        spans = narrow_blocks = min(max_spans, max_tokens)
        if kind is StepKind.FEW and not wide_tile.hopper:
            narrow_blocks = _most_blocks(spans + 1, rows, narrow_tile)
        elif not kind.has_wide:  # padding, for few spans or for many
            narrow_blocks = max(n - (n - max_tokens) * groups // narrow_tile.rows for n in (0, spans))
        narrow = most_narrow_pieces(narrow_blocks, max_context, narrow_tile, geometry)
    if kind.has_wide:
        shortest = narrow_tile.rows // groups + 1
        spans = min(max_spans, max_tokens // shortest)
        if kind.is_mixed:
            spans = max(spans, min(max_spans, max_tokens) // LEAST_SPANS)
        wide_blocks = _most_blocks(spans + 1, rows, wide_tile)  # padding counts as a span
        wide = most_wide_pieces(wide_blocks, max_context, wide_tile, geometry)
    merges = narrow.cut * -(-narrow_tile.rows // at_once) + wide.cut * -(-wide_tile.rows // at_once)
    held = narrow.pieces * narrow_tile.rows + wide.pieces * wide_tile.rows
    if kind.is_mixed:  # spans that read a beginning together, see ``prefixes``
        merges += max_spans * -(-narrow_tile.rows // at_once)
        held += PARTY_LAYERS * min(max_spans, max_tokens) * groups
    programs, most = math.floor(programs_per_head(narrow_tile, geometry)), narrow_blocks + narrow.more
    launched = programs if narrow_blocks < FEW_BLOCKS * programs else narrow_blocks + programs
    return Capacity(most, wide_blocks + wide.more, min(rows, merges), held, min(most, launched))


def _most_blocks(spans: int, rows: int, tile: Tile) -> int:
    """The most blocks of ``spans`` spans with ``rows`` rows in all: each span has one row more than fills its
    blocks."""
    return spans + max(0, rows - spans) // tile.rows
