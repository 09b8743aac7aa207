"""Into how many pieces the items of a launch are cut, so that the launch ends soonest.

**Narrow lists.** Programs of narrow items wait for memory all the time, and a part of them keeps it busy. What a launch
takes longer than reading its keys is its *tail*: the time in which only the programs of the longest items are left, too
few to keep the memory busy. Cutting these items shortens the tail, and merging the pieces costs time. Contexts of a
server's requests differ as much as those of its conversations do, and then the tail is up to a third of the launch. So
a few ways to cut are compared by their cost. The tail of each is found by dealing its items out as the device does, the
longest first, each to the program that is free first; all programs are taken to be equally fast.

**Wide lists.** Blocks that all start at once are cut evenly, into as many pieces as can still all start at once: a
piece that started later would find every multiprocessor half idle. A longer list fills the device by itself. Only its
end is cut, ever finer, and only blocks that are the only one of their span. The others end at different times by
themselves, and merging them costs much.

**Guided cuts**, at the end of either list: while much work remains, pieces may be long; then they get shorter, so that
all programs end together.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.kinds import Geometry, programs_per_head
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.spans import Ints

BUSY = 0.6
"""This share of the resident programs keeps the memory busy."""
PIECE_STEPS = 5
"""Cost of a piece, in key tiles of the tail. With ``BUSY``, fitted to what 12 ways to cut took in 194
steps on an H200 (heads of 128; 8, 10 and 40 KV heads): 2 to 5 % of a time is not explained, beside wide items 8 %."""
LIMITS = (1.1, 1.4, 2.0, 3.0)
"""Ways to cut: no piece is longer than this many times a program's share of the list."""
AT_END = (2, 1)
"""And more for lists that are longer than all programs at once: pieces get shorter towards the end, at most this many
times a program's share of what remains,"""
LEAST_AT_END = 4
"""but no shorter than this many key tiles."""
SLOTS, DEALT = 40, 256
"""KV heads are dealt together to reach SLOTS programs with at most DEALT items: of ten programs a fraction counts."""
ENOUGH = 0.8
"""Blocks of long spans stay whole when they fill this share of the resident programs."""
EVEN_PROGRAMS = 2 / 3
"""An even cut aims at this share of the resident programs: more pieces cost more in merging than they hide."""
LONG = 64
"""From this many key tiles per resident program on, the end of a list is cut finer still."""
LEAST_GUIDED = 4
"""The shortest piece at the end of a long list has this many key tiles."""


@dataclass(frozen=True, slots=True)
class MostPieces:
    """Upper bounds of what cutting a list can make."""

    more: int
    """Items more than there were before."""
    cut: int
    """Items that are cut."""
    pieces: int
    """And the pieces that these make."""


def guided_pieces(steps: Ints, share: float, least: int, programs: float) -> Ints:
    """Pieces, at least 1, that each item is cut into. ``steps`` [n]: key tiles, longest first. A piece is about
    ``share`` times a program's part of the remaining tiles, and no shorter than ``least`` of them."""
    remaining = int(steps.sum()) - np.cumsum(steps) + steps
    longest = np.maximum(least, remaining * share / programs)
    pieces: Ints = np.rint(steps / longest).astype(np.int64).clip(1)
    return pieces


def most_guided_pieces(steps: int, share: float, least: int, programs: float) -> MostPieces:
    """For any number of items of up to ``steps`` key tiles.

    A piece is no shorter than the least, nor than its share of what remains; the integral below sums that over all that
    can remain when an item of the longest context is first cut. The least quotient that is cut is 1.5, which rounding
    can make 4/3 as large.
    """
    if steps < 1.5 * least:
        return MostPieces(0, 0, 0)
    quotients = programs / share * (1 + math.log(steps / (1.5 * least)))
    return MostPieces(*(math.floor(quotients * factor) for factor in (1, 1 / 1.5, 4 / 3)))


def narrow_pieces(steps: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Pieces, at least 1, that each item is cut into. ``steps`` [n]: key tiles of the items, longest first."""
    best = np.ones(len(steps), np.int64)
    total = int(steps.sum())
    if not total:
        return best
    programs = programs_per_head(tile, geometry)
    least_cost = _cost(steps, best, programs)
    for limit in LIMITS:
        longest = max(1, tile.least_keys // tile.keys, limit * total / programs)
        tried = np.ceil(steps / longest).astype(np.int64).clip(1)
        if int(tried.max()) == 1:
            break
        cost = _cost(steps, tried, programs)
        if cost < least_cost:
            best, least_cost = tried, cost
    if int(best.sum()) <= programs:
        return best
    limited, least = best, max(LEAST_AT_END, tile.least_keys // tile.keys)
    for share in AT_END:
        tried = np.maximum(limited, guided_pieces(steps, share, least, programs))
        cost = _cost(steps, tried, programs)
        if cost < least_cost:
            best, least_cost = tried, cost
    return best


def _cost(steps: Ints, pieces: Ints, programs: float) -> float:
    """What a cut costs beyond reading, in key tiles of a program."""
    heads = max(1, min(round(SLOTS / programs), DEALT // len(steps)))
    lengths: list[float] = np.repeat(steps / pieces, heads * pieces).tolist()
    lengths.sort(reverse=True)
    slots, busy = max(1, math.floor(heads * programs)), max(1, round(BUSY * heads * programs))
    ends = lengths[:slots]
    if len(lengths) > slots:
        ends.reverse()  # a heap
        for length in lengths[slots:]:
            heapq.heapreplace(ends, ends[0] + length)
        ends.sort(reverse=True)
    merged = int(pieces.sum()) - np.count_nonzero(pieces == 1)
    return (busy * ends[0] - sum(ends[:busy])) / heads + PIECE_STEPS * merged


def most_narrow_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> MostPieces:
    """For ``blocks`` items of up to ``context`` keys.

    An item that a limit cuts is longer than the limit, so the quotients of all such sum up to no more than the programs
    over the least limit, and rounding up doubles each at most. What the end of a list makes comes on top of that.
    """
    programs = programs_per_head(tile, geometry)
    steps, shortest = -(-context // tile.keys), max(1, tile.least_keys // tile.keys)
    each = -(-steps // shortest)
    if each <= 1:
        return MostPieces(0, 0, 0)
    more, pieces = (math.floor(programs / LIMITS[0] * factor) for factor in (1, 2))
    end = MostPieces(0, 0, 0)
    if blocks + more > programs:
        end = most_guided_pieces(steps, min(AT_END), max(LEAST_AT_END, shortest), programs)
    return MostPieces(
        min(more + end.more, blocks * (each - 1)),
        min(more + end.cut, blocks),
        min(pieces + end.pieces, blocks * each),
    )


def wide_pieces(steps: Ints, alone: npt.NDArray[np.bool_], tile: Tile, geometry: Geometry) -> Ints:
    """Pieces, at least 1, that each item is cut into. ``steps`` [n]: key tiles, longest first; ``alone`` [n]: which
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
