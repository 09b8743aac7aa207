"""Splits work items into pieces so that a launch ends as early as possible.

**Narrow lists.** Programs of narrow items wait for memory all the time, and some of them are enough to keep
it busy. A launch takes longer than reading its keys because of its *tail*: the time in which only the
programs of the longest items still run, too few to keep the memory busy. Splitting these items shortens the
tail, but merging the pieces costs time. The context lengths of a server's requests vary widely, and the tail
can be a third of the launch. So a few ways to split are compared by cost. The tail of each is found by list
scheduling, as on the device: longest item first, each to the first free program. All programs are assumed
equally fast.

**Wide lists.** Blocks that all start at once are split evenly, into as many pieces as can still all start at
once: a piece that started later would find every multiprocessor half idle. A longer list fills the device
without splitting. Only its end is split, ever finer, and only blocks that are the only one of their span. The
others already end at different times, and merging them costs much.

**Fixed pieces** (``Geometry.piece``) begin at fixed keys, wherever an item begins: at 0, N, 2 N and then every 2 N.
Short contexts thus have short pieces, long ones few. An item takes all of its pieces one after the other, or each is an
item of its own. Both add the pieces up in the same order and to
the same bits, so the choice may depend on the load.

**Guided splits** shape the end of either list: pieces may be long while much work remains, then get shorter,
so that all programs end together (guided self-scheduling).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.kinds import Geometry, programs_per_head
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.spans import Ints

BUSY_SHARE = 0.6
"""Share of the resident programs that keeps the memory busy."""
PIECE_STEPS = 5
"""Cost of a piece, in key tiles of the tail. Fitted together with ``BUSY_SHARE`` to the times of 12 ways to
split in 194 steps on an H200 (heads of 128; 8, 10 and 40 KV heads). 2 to 5 % of a time stays unexplained,
with wide items beside it 8 %."""
SPLIT_LIMITS = (1.1, 1.4, 2.0, 3.0)
"""Ways to split: no piece is longer than this many times a program's share of the list."""
TAIL_SHARES = (2, 1)
"""More ways, for lists longer than all programs at once: towards the end no piece is longer than this many
times a program's share of the remaining work."""
MIN_TAIL_PIECE = 4
"""Shortest such piece, in key tiles."""
SIMULATED_PROGRAMS, MAX_SIMULATED_ITEMS = 40, 256
"""Simulate as many KV heads as give about this many programs: of ten programs a fraction counts."""
WHOLE_SHARE = 0.8
"""Blocks of long spans stay whole when they fill this share of the resident programs."""
EVEN_PROGRAMS = 2 / 3
"""An even split aims at this share of the resident programs: more pieces cost more to merge than they hide."""
LONG_LIST_TILES = 64
"""From this many key tiles per resident program on, the end of a list is split finer."""
MIN_GUIDED_PIECE = 4
"""Shortest piece at the end of a long list, in key tiles."""


FIXED_PIECES = 4
"""Most fixed pieces that are items of their own, in resident programs: bounds the scratch."""


@dataclass(frozen=True, slots=True)
class PieceBounds:
    """Upper bounds of the result of splitting a list."""

    extra_items: int
    """Items beyond those before the split."""
    split_items: int
    pieces: int
    """Pieces of the split items."""


def guided_pieces(steps: Ints, share: float, least: int, programs: float) -> Ints:
    """Return the pieces of each item, at least 1, as a guided split. ``steps`` [n]: key tiles, longest first. A piece
    is about ``share`` times a program's part of the remaining tiles, and no shorter than ``least`` tiles."""
    remaining = int(steps.sum()) - np.cumsum(steps) + steps
    longest = np.maximum(least, remaining * share / programs)
    pieces: Ints = np.rint(steps / longest).astype(np.int64).clip(1)
    return pieces


def max_guided_pieces(steps: int, share: float, least: int, programs: float) -> PieceBounds:
    """Return bounds of ``guided_pieces`` for any number of items of up to ``steps`` key tiles.

    A piece is no shorter than ``least``, nor than its share of the remainder. The integral below sums that
    over all possible remainders when an item of the longest context is first split. The smallest quotient
    that is split is 1.5, and rounding can make it 4/3 as large.
    """
    if steps < 1.5 * least:
        return PieceBounds(0, 0, 0)
    quotients = programs / share * (1 + math.log(steps / (1.5 * least)))
    return PieceBounds(*(math.floor(quotients * factor) for factor in (1, 1 / 1.5, 4 / 3)))


def narrow_pieces(steps: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each narrow item, at least 1. ``steps`` [n]: key tiles of the items, longest first."""
    shortest = tile.least_keys // tile.keys
    return _narrow_pieces(steps.astype(np.int64).tobytes(), programs_per_head(tile, geometry), shortest)


@lru_cache(maxsize=64)
def _narrow_pieces(key: bytes, programs: float, shortest: int) -> Ints:
    """``narrow_pieces``, read-only, with ``key``: the bytes of ``steps``. Steps that follow each other often have the
    same: a request that decodes enters another tile of keys once in many steps."""
    steps = np.frombuffer(key, np.int64)
    best = _cheapest_pieces(steps, programs, shortest)
    best.flags.writeable = False
    return best


def _cheapest_pieces(steps: Ints, programs: float, shortest: int) -> Ints:
    best = np.ones(len(steps), np.int64)
    total = int(steps.sum())
    if not total:
        return best
    least_cost = _cost(steps, best, programs)
    for limit in SPLIT_LIMITS:
        longest = max(1, shortest, limit * total / programs)
        candidate = np.ceil(steps / longest).astype(np.int64).clip(1)
        if int(candidate.max()) == 1:
            break
        cost = _cost(steps, candidate, programs)
        if cost < least_cost:
            best, least_cost = candidate, cost
    if int(best.sum()) <= programs:
        return best
    limited, least = best, max(MIN_TAIL_PIECE, shortest)
    for share in TAIL_SHARES:
        candidate = np.maximum(limited, guided_pieces(steps, share, least, programs))
        cost = _cost(steps, candidate, programs)
        if cost < least_cost:
            best, least_cost = candidate, cost
    return best


def _cost(steps: Ints, pieces: Ints, programs: float) -> float:
    """Cost of a split beyond reading, in key tiles of a program."""
    heads = max(1, min(round(SIMULATED_PROGRAMS / programs), MAX_SIMULATED_ITEMS // len(steps)))
    lengths: list[float] = np.repeat(steps / pieces, heads * pieces).tolist()
    lengths.sort(reverse=True)
    slots, busy = max(1, math.floor(heads * programs)), max(1, round(BUSY_SHARE * heads * programs))
    ends = lengths[:slots]
    if len(lengths) > slots:
        ends.reverse()  # a heap
        for length in lengths[slots:]:
            heapq.heapreplace(ends, ends[0] + length)
        ends.sort(reverse=True)
    merged = int(pieces.sum()) - np.count_nonzero(pieces == 1)
    return (busy * ends[0] - sum(ends[:busy])) / heads + PIECE_STEPS * merged


def max_narrow_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> PieceBounds:
    """Return bounds of ``narrow_pieces`` for ``blocks`` items of up to ``context`` keys. An item that is
    split is longer than the limit. So the quotients of all of them sum to at most the programs over the
    smallest limit, and rounding up at most doubles each. The pieces at the end of a list come on top."""
    programs = programs_per_head(tile, geometry)
    steps, shortest = -(-context // tile.keys), max(1, tile.least_keys // tile.keys)
    each = -(-steps // shortest)
    if each <= 1:
        return PieceBounds(0, 0, 0)
    extra_items, pieces = (math.floor(programs / SPLIT_LIMITS[0] * factor) for factor in (1, 2))
    end = PieceBounds(0, 0, 0)
    if blocks + extra_items > programs:
        end = max_guided_pieces(steps, min(TAIL_SHARES), max(MIN_TAIL_PIECE, shortest), programs)
    return PieceBounds(
        min(extra_items + end.extra_items, blocks * (each - 1)),
        min(extra_items + end.split_items, blocks),
        min(pieces + end.pieces, blocks * each),
    )


def fixed_pieces(items: Ints, tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each item, at least 1: either 1, or all of its fixed pieces. ``items`` [n, 2]: first key and
    end of each, longest first."""
    first, end = items[:, 0], items[:, 1]
    pieces = fixed_count(first, end, geometry.piece)
    steps: Ints = -(-(end - first) // tile.keys)
    whole = np.ones(len(items), np.int64)
    total = int(steps.sum())
    if not total or int(pieces.max()) == 1:
        return whole
    programs = programs_per_head(tile, geometry)
    most = max(FIXED_PIECES * programs, int(pieces.max()))
    best, least_cost = whole, _cost(steps, whole, programs)
    for limit in SPLIT_LIMITS:
        split = (steps > limit * total / programs) & (pieces > 1)
        split &= np.cumsum(np.where(split, pieces, 0)) <= most
        candidate = np.where(split, pieces, 1)
        cost = _cost(steps, candidate, programs)
        if cost < least_cost:
            best, least_cost = candidate, cost
    return best


def piece_of(key: Ints, piece: int) -> Ints:
    """Return the number of the fixed piece in which a key lies."""
    number: Ints = np.where(key < 2 * piece, key // piece, key // (2 * piece) + 1)
    return number


def piece_start(number: Ints, piece: int) -> Ints:
    """Return the first key of a fixed piece."""
    start: Ints = np.where(number < 2, number, 2 * number - 2) * piece
    return start


def fixed_count(first: Ints, end: Ints, piece: int) -> Ints:
    """Return in how many fixed pieces the keys from ``first`` to ``end`` lie, at least 1."""
    count: Ints = np.maximum(1, piece_of(end - 1, piece) - piece_of(first, piece) + 1)
    return count


def max_fixed_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> PieceBounds:
    """Return bounds of ``fixed_pieces`` for ``blocks`` items of up to ``context`` keys."""
    each = context // (2 * geometry.piece) + 2
    most = min(blocks * each, max(math.floor(FIXED_PIECES * programs_per_head(tile, geometry)), each))
    return PieceBounds(most, min(blocks, most // 2), most)


def wide_pieces(steps: Ints, only_blocks: npt.NDArray[np.bool_], tile: Tile, geometry: Geometry) -> Ints:
    """Return the pieces of each wide item, at least 1. ``steps`` [n]: key tiles, longest first."""
    total = int(steps.sum())
    if not total:
        return np.ones(len(steps), np.int64)
    programs = programs_per_head(tile, geometry)
    all_only_blocks = bool(only_blocks.all())
    if len(steps) <= programs and (all_only_blocks or len(steps) < WHOLE_SHARE * programs):
        share = max(1, tile.least_keys // tile.keys, total / (EVEN_PROGRAMS * programs))
        even: Ints = np.maximum(1, steps / share).astype(np.int64)
        return even
    pieces = guided_pieces(steps, _tail_share(total, programs), _min_tail_piece(tile), programs)
    if not all_only_blocks:
        pieces[~only_blocks] = 1
    return pieces


def max_wide_pieces(blocks: int, context: int, tile: Tile, geometry: Geometry) -> PieceBounds:
    """Return bounds of ``wide_pieces`` for ``blocks`` items of up to ``context`` keys."""
    programs = programs_per_head(tile, geometry)
    steps = -(-context // tile.keys)
    evenly = min(blocks, math.floor(programs))
    shortest = max(1, tile.least_keys // tile.keys)
    aim = min(math.floor(EVEN_PROGRAMS * programs), evenly * (steps // shortest))
    pieces = aim if aim >= 2 and evenly else 0
    extra_items, split_items = max(0, evenly - 1 + pieces - blocks), min(evenly, pieces // 2)
    if blocks < WHOLE_SHARE * programs:
        return PieceBounds(extra_items, split_items, pieces)
    end = max_guided_pieces(steps, _tail_share(blocks * steps, programs), _min_tail_piece(tile), programs)
    return PieceBounds(
        max(extra_items, end.extra_items),
        max(split_items, min(blocks, end.split_items)),
        max(pieces, end.pieces),
    )


def _tail_share(total: int, programs: float) -> int:
    return 1 if total >= LONG_LIST_TILES * programs else 2


def _min_tail_piece(tile: Tile) -> int:
    return max(MIN_GUIDED_PIECE, tile.least_keys // tile.keys)
