"""Into how many pieces the items of a wide list are cut, so that its launch ends soonest.

Blocks that all start at once are cut evenly, into so many pieces that these still all start at once: a piece that
started later would find every multiprocessor half idle. A longer list fills the device by itself. Of that only the end
is cut, ever finer, and only blocks that are the only one of their span. The others end at different times by
themselves, and merging them costs much.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.guided_cuts import MostPieces, guided_pieces, most_guided_pieces
from pensieve.kernels.attention.kinds import Geometry, programs_per_head
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.span_table import Ints

ENOUGH = 0.8
"""Blocks of long spans stay whole when they fill this share of the resident programs."""
EVEN_PROGRAMS = 2 / 3
"""An even cut aims at this share of the resident programs: more pieces cost more in merging than they hide."""
LONG = 64
"""From this many key tiles per resident program on, the end of a list is cut finer still."""
LEAST_GUIDED = 4
"""The shortest piece at the end of a long list has this many key tiles."""


def wide_pieces(steps: Ints, alone: npt.NDArray[np.bool_], tile: Tile, geometry: Geometry) -> Ints:
    """Into how many pieces, at least 1, items of so many key tiles [n] are cut, the longest first; ``alone`` [n]: which
    of them are the only one of their span."""
    total = int(steps.sum())
    if not total:
        return np.ones(len(steps), np.int64)
    programs = programs_per_head(tile, geometry)
    all_alone = bool(alone.all())
    if len(steps) <= programs and (all_alone or len(steps) < ENOUGH * programs):
        share = max(1, tile.least_keys // tile.keys, total / (EVEN_PROGRAMS * programs))
        even: Ints = np.maximum(1, steps / share).astype(np.int64)
        return even
    pieces = guided_pieces(steps, _share_at_end(total, programs), _least_at_end(tile), programs)
    if not all_alone:
        pieces[~alone] = 1
    return pieces


def most_wide_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> MostPieces:
    """The most that this makes of ``blocks`` items of up to ``context`` keys.

    In an even cut the pieces' quotients sum up to the programs aimed at.
    """
    programs = programs_per_head(tile, geometry)
    steps = -(-context // tile.keys)
    evenly = min(blocks, math.floor(programs))
    shortest = max(1, tile.least_keys // tile.keys)
    aim = min(math.floor(EVEN_PROGRAMS * programs), evenly * (steps // shortest))
    pieces = aim if aim >= 2 and evenly else 0
    more, cut = max(0, evenly - 1 + pieces - blocks), min(evenly, pieces // 2)
    if blocks < ENOUGH * programs:
        return MostPieces(more, cut, pieces)
    end = most_guided_pieces(steps, _share_at_end(blocks * steps, programs), _least_at_end(tile), programs)
    return MostPieces(max(more, end.more), max(cut, min(blocks, end.cut)), max(pieces, end.pieces))


def _share_at_end(total: int, programs: float) -> int:
    return 1 if total >= LONG * programs else 2


def _least_at_end(tile: Tile) -> int:
    return max(LEAST_GUIDED, tile.least_keys // tile.keys)
