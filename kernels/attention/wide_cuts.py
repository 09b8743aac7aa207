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

from pensieve.kernels.attention.kinds import Geometry, programs_per_head
from pensieve.kernels.attention.narrow_cuts import MostPieces
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
    # While much work remains pieces may be long, towards the end they get shorter, so that all end together.
    remaining = total - np.cumsum(steps) + steps
    finer = 1 if total >= LONG * programs else 2
    longest = np.maximum(LEAST_GUIDED, np.maximum(tile.least_keys // tile.keys, remaining * finer / programs))
    pieces: Ints = np.maximum(1, np.rint(steps / longest)).astype(np.int64)
    if not all_alone:
        pieces[~alone] = 1
    return pieces


def most_wide_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> MostPieces:
    """The most that this makes of ``blocks`` items of up to ``context`` keys.

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
    more, cut = max(0, evenly - 1 + pieces - blocks), min(evenly, pieces // 2)
    if blocks >= ENOUGH * programs:
        finer = 1 if blocks * steps >= LONG * programs else 2
        least = max(LEAST_GUIDED, shortest)
        if steps >= 1.5 * least:
            quotients = programs / finer * (1 + math.log(steps / (1.5 * least)))
            more = max(more, math.floor(quotients))
            cut = max(cut, min(blocks, math.floor(quotients / 1.5)))
            pieces = max(pieces, math.floor(quotients * 4 / 3))
    return MostPieces(more, cut, pieces)
