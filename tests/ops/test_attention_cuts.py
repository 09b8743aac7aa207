"""How narrow items are cut: long ones among short ones do not keep a launch waiting, and nothing is cut in vain."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.kernels.attention.cuts import max_narrow_pieces, narrow_pieces
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.tiles import Tile

WHERE = {kv_heads: Geometry(40, kv_heads, 128, 2, 132, hopper=True) for kv_heads in (1, 5, 8, 10, 40)}
TILES = WHERE[10].tiles
NARROW = (TILES.narrow, TILES.narrow_concurrent, TILES.short, TILES.few)


def finished(lengths: list[int], tile: Tile, where: Geometry) -> list[float]:
    """When each resident program ends if all KV heads' works of these lengths are dealt out, the longest first."""
    programs = [0] * (tile.resident * where.multiprocessors)
    for length in sorted(lengths * where.kv_heads, reverse=True):
        heapq.heapreplace(programs, programs[0] + length)
    return sorted(programs, reverse=True)


def idle_share(steps: list[int], pieces: list[int], tile: Tile, where: Geometry) -> float:
    """How much longer than reading takes it is until the launch ends, if six in ten programs read as fast as all."""
    lengths = [
        (piece + 1) * length // count - piece * length // count
        for length, count in zip(steps, pieces, strict=True)
        for piece in range(count)
    ]
    ends = finished(lengths, tile, where)
    needed = round(0.6 * len(ends))
    waiting = sum(ends[0] - end for end in ends[:needed])
    return waiting / (sum(lengths) * where.kv_heads)


def served(count: int, seed: int, mean: float = 1100.0) -> list[int]:
    """Key tiles of contexts as conversations have them, the longest first."""
    contexts = np.random.default_rng(seed).exponential(mean, count).clip(1, 8 * mean)
    return sorted((int(-(-context // 64)) for context in contexts), reverse=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [48, 56, 80, 128])
@pytest.mark.parametrize("kv_heads", [5, 8, 10, 40])
def test_long_contexts_do_not_keep_a_launch_waiting(kv_heads: int, count: int, seed: int) -> None:
    where, steps = WHERE[kv_heads], served(count, seed)
    pieces = narrow_pieces(np.array(steps), TILES.narrow, where).tolist()
    assert idle_share(steps, pieces, TILES.narrow, where) < 0.25
    assert sum(pieces) <= 2 * max(count, 132 * 3 // kv_heads), "more pieces than it takes"


@pytest.mark.parametrize(("count", "cut"), [(8, True), (20, False), (32, False), (39, False), (60, False)])
def test_contexts_of_one_length_are_cut_only_while_programs_are_idle(count: int, *, cut: bool) -> None:
    pieces = narrow_pieces(np.full(count, 16), TILES.narrow, WHERE[10])
    assert (pieces > 1).any() == cut


@given(
    steps=st.lists(st.one_of(st.integers(0, 12), st.integers(1, 2000)), min_size=1, max_size=120),
    tile=st.sampled_from(NARROW),
    kv_heads=st.sampled_from(list(WHERE)),
)
def test_cuts_stay_within_their_bounds_and_make_no_piece_too_short(
    steps: list[int], tile: Tile, kv_heads: int
) -> None:
    where = WHERE[kv_heads]
    steps.sort(reverse=True)
    pieces = narrow_pieces(np.array(steps), tile, where)
    assert len(pieces) == len(steps) and (pieces >= 1).all()
    shortest = max(1, tile.least_keys // tile.keys)
    assert all(
        count == 1 or length > (count - 1) * shortest for length, count in zip(steps, pieces, strict=True)
    )
    most = max_narrow_pieces(len(steps), max(steps) * tile.keys, tile, where)
    assert pieces.sum() - len(pieces) <= most.extra_items
    assert (pieces > 1).sum() <= most.split_items and pieces[pieces > 1].sum() <= most.pieces
