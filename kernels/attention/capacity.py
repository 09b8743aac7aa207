"""Upper bounds of a step's attention work, which size the memory and launches of a captured graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pensieve.kernels.attention.cuts import PieceBounds, max_fixed_pieces, max_narrow_pieces, max_wide_pieces
from pensieve.kernels.attention.kinds import LEAST_SPANS, Geometry, StepKind, programs_per_head
from pensieve.kernels.attention.tiles import Tile

GROUP_LAYERS = 4
"""Partial rows per query row of spans in a prefix group: for example two pieces of the prefix and two of the suffix."""
COPIED_BYTES = 512 << 20
"""Memory for plain copies of coded pages. With 10 KV heads of 128 values they cover 100,000 tokens."""
FEW_BLOCKS_SHARE = 0.7
"""With fewer narrow blocks than this share of the resident programs, launch no more programs than can start
at once. The merge begins when all programs have started; it cost 2 µs when some had to wait."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Most work that a plan in fixed memory takes. A launch with capacity 0 is never made."""

    narrow: int
    wide: int
    merges: int
    partial_rows: int
    narrow_programs: int = 0
    """Programs of the narrow launch per KV head, which share the items; 0: one program per item."""
    copies: int = 0
    """Coded pages that wide items read as plain copies; see ``most_copies`` for a limit."""


def capacity_for(
    kind: StepKind,
    max_tokens: int,
    max_spans: int,
    max_context: int,
    geometry: Geometry,
) -> Capacity:
    """Return a capacity that holds every step of this kind. ``max_tokens``: rows of q, padding included.
    ``max_spans``: spans that are not empty. ``max_context``: most tokens of a query's context."""
    tiles = geometry.tiles
    groups, rows = geometry.groups, max_tokens * geometry.groups
    narrow_tile, wide_tile, at_once = kind.narrow_tile(tiles), tiles.wide, kind.merged_rows
    narrow_blocks = usual_blocks = wide_blocks = 0
    narrow = wide = PieceBounds(0, 0, 0)
    if kind.has_narrow:
        spans = min(max_spans, max_tokens)
        in_blocks = _max_blocks(spans + 1, rows, narrow_tile)
        if kind.has_wide:
            usual_blocks = spans
        elif kind is StepKind.FEW and not wide_tile.hopper:
            usual_blocks = in_blocks
        else:  # padding, for few spans or many
            usual_blocks = max(n - (n - max_tokens) * groups // narrow_tile.rows for n in (0, spans))
        narrow_blocks = in_blocks if kind is StepKind.NARROW else usual_blocks
        keys = _max_keys(max_context, narrow_tile, geometry)
        bounds = max_fixed_pieces if geometry.piece else max_narrow_pieces
        narrow = bounds(narrow_blocks, keys, narrow_tile, geometry)
    if kind.has_wide:
        shortest = narrow_tile.rows // groups + 1
        spans = min(max_spans, max_tokens // shortest)
        if kind.is_mixed:
            spans = max(spans, min(max_spans, max_tokens) // LEAST_SPANS)
        wide_blocks = _max_blocks(spans + 1, rows, wide_tile)  # padding counts as a span
        keys = _max_keys(max_context, wide_tile, geometry)
        bounds = max_fixed_pieces if geometry.piece else max_wide_pieces
        wide = bounds(wide_blocks, keys, wide_tile, geometry)
    merges = narrow.split_items * -(-narrow_tile.rows // at_once) + wide.split_items * -(
        -wide_tile.rows // at_once
    )
    held = narrow.pieces * narrow_tile.rows + wide.pieces * wide_tile.rows
    if kind.is_mixed and geometry.window is None:  # prefix groups, see ``prefixes``
        merges += max_spans * -(-narrow_tile.rows // at_once)
        held += GROUP_LAYERS * min(max_spans, max_tokens) * groups
    programs, most = math.floor(programs_per_head(narrow_tile, geometry)), narrow_blocks + narrow.extra_items
    # A narrow step seldom splits spans: the programs of its usual blocks share the others.
    launched = programs if usual_blocks < FEW_BLOCKS_SHARE * programs else usual_blocks + programs
    copies = 0
    if geometry.copied_page and kind.has_wide:
        copies = min(most_copies(geometry), spans * -(-max_context // geometry.copied_page))
    return Capacity(
        most, wide_blocks + wide.extra_items, min(rows, merges), held, min(most, launched), copies
    )


def most_copies(geometry: Geometry) -> int:
    """Return the pages for whose plain copies there is room, ``COPIED_BYTES``."""
    if not geometry.copied_page:
        return 0
    page = 2 * geometry.kv_heads * geometry.copied_page * geometry.head_dim * geometry.element_bytes
    return max(1, COPIED_BYTES // page)


def _max_keys(max_context: int, tile: Tile, geometry: Geometry) -> int:
    """Most keys of an item. Its first query sees the keys of its window, and each later token of the block adds one."""
    if geometry.window is None:
        return max_context
    tokens = 1 + -(-(tile.rows - 1) // geometry.groups)
    alignment = tile.keys - 1 if tile.hopper or geometry.piece else 0
    return min(max_context, geometry.window + tokens - 1 + alignment)


def _max_blocks(spans: int, rows: int, tile: Tile) -> int:
    """Most blocks of ``spans`` spans with ``rows`` rows in all: each span has one row more than fills its blocks."""
    return spans + max(0, rows - spans) // tile.rows
