"""The Triton attention kernel without a GPU: its work lists, its refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.plan import AttentionPlan
from pensieve.kernels.attention.tiles import choose_tiles
from pensieve.kernels.attention.work_lists import make_work_lists
from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.spans import make_spans, num_tokens
from support.kernels.attention_cases import make_case

SHAPES = [(40, 40), (40, 10), (32, 8), (14, 2), (1, 1), (40, 1)]


@settings(max_examples=60)
@given(
    spans=st.lists(
        st.tuples(st.one_of(st.integers(0, 9), st.integers(0, 2000)), st.integers(0, 40_000)), max_size=40
    ),
    shape=st.sampled_from(SHAPES),
    padding=st.integers(0, 20),
    processors=st.sampled_from([1, 4, 132, 5000]),
    window=st.one_of(st.none(), st.sampled_from([1, 31, 128, 1000, 4096])),
    hopper=st.booleans(),
)
def test_work_covers_every_row_and_key_once(
    spans: list[tuple[int, int]],
    shape: tuple[int, int],
    padding: int,
    processors: int,
    window: int | None,
    hopper: bool,
) -> None:
    geometry = Geometry(*shape, 128, 2, processors, hopper=hopper, window=window)
    tiles = geometry.tiles
    table = make_spans([n for n, _ in spans], [p for _, p in spans], range(len(spans)))
    kind = classify(table, geometry)
    tokens = num_tokens(table)
    num_rows = tokens + padding
    work = make_work_lists(table, num_rows, geometry, kind)
    row_of = np.repeat(np.arange(len(table)), table[:, 1])
    position = np.arange(tokens) - table[row_of, 0] + table[row_of, 2]
    covered = np.zeros((num_rows, geometry.groups), np.int64)
    partial: list[range] = []
    direct = np.zeros((num_rows, geometry.groups), np.int64)
    for tile, items in ((kind.narrow_tile(tiles), work.narrow), (tiles.wide, work.wide)):
        for start, rows, at, _, first, low, high, scratch in items.tolist():
            assert first % tile.rows == 0 and first < rows
            hidden = 0 if window is None else max(0, at + first // geometry.groups + 1 - window)
            if start >= tokens:
                assert low == high, "padding has no keys"
            elif tile.hopper or window is None:
                assert low % tile.keys == 0 and low >= hidden // tile.keys * tile.keys
            else:
                assert low >= hidden and (low - hidden) % tile.keys == 0, "the first key is visible"
            row = np.arange(first, min(first + tile.rows, rows))
            token = start + row // geometry.groups
            # The keys of this piece that each row sees; a piece beyond a row's own position adds none.
            seen = at + row // geometry.groups + 1 if start < tokens else np.zeros(len(row), int)
            from_key = low if window is None else np.maximum(seen - window, low)
            counts = np.clip(np.minimum(seen, high) - from_key, 0, None)
            np.add.at(covered, (token, row % geometry.groups), counts)
            np.add.at(direct, (token, row % geometry.groups), 1 if scratch < 0 else 0)
            if scratch >= 0:
                assert high > low
                partial.append(range(scratch, scratch + tile.rows))
    expected = np.zeros_like(covered)
    expected[:tokens] = (position + 1 if window is None else np.minimum(position + 1, window))[:, None]
    assert (covered == expected).all()
    merged = np.zeros_like(direct)
    for start, first, end, _, _, _ in work.merges.tolist():
        row = np.arange(first, end)
        assert 0 < len(row) <= kind.merged_rows
        np.add.at(merged, (start + row // geometry.groups, row % geometry.groups), 1)
    assert (direct + merged == 1).all(), "every row is written exactly once, by an item or by a merge"
    starts = sorted((part.start, part.stop) for part in partial)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(starts))
    assert max((stop for _, stop in starts), default=0) <= work.partial_rows


def test_small_steps_are_cut_for_the_whole_device() -> None:
    geometry = Geometry(32, 8, head_dim=128, element_bytes=2, multiprocessors=132)
    tiles = choose_tiles(128, 2)
    host = make_spans([1], [16383], [0])
    work = make_work_lists(host, 1, geometry, StepKind.NARROW)
    programs = len(work.narrow) * geometry.kv_heads
    assert 132 <= programs <= 2 * 132
    sizes = work.narrow[:, 6] - work.narrow[:, 5]
    assert sizes.max() - sizes.min() <= tiles.narrow.keys


def test_a_step_beyond_the_capacity_is_refused() -> None:
    geometry = Geometry(4, 2, head_dim=64, element_bytes=2, multiprocessors=4)
    host = make_spans([1, 1], [3, 5], [0, 1])
    plan = AttentionPlan.from_spans(host, 60, geometry, torch.device("cpu"), capacity=Capacity(12, 0, 0, 0))
    before = plan.words.clone()
    with pytest.raises(ValueError, match="needs narrow=60, the plan holds 12"):
        plan.refill(make_spans([1] * 60, [0] * 60, range(60)))
    assert torch.equal(before, plan.words)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = make_case([(0, 3, 1)], heads=4, kv_heads=2)
    rest = (case.spans, case.page_tables)
    with pytest.raises(ValueError, match="3 query heads"):
        ragged_paged_attention(case.q[:, :3], case.pool, *rest, scale=1.0)
    with pytest.raises(ValueError, match="both must be"):
        ragged_paged_attention(case.q.half(), case.pool, *rest, scale=1.0)
    with pytest.raises(ValueError, match="int32"):
        ragged_paged_attention(case.q, case.pool, case.spans, case.page_tables.long(), scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        ragged_paged_attention(case.q.mT.contiguous().mT, case.pool, *rest, scale=1.0)
    with pytest.raises(ValueError, match="positive"):
        ragged_paged_attention(case.q, case.pool, *rest, scale=0.0)
    with pytest.raises(ValueError, match="out is"):
        ragged_paged_attention(case.q, case.pool, *rest, scale=1.0, out=case.q[:0])
    with pytest.raises(ValueError, match="not supported"):
        wide = make_case([(0, 3, 1)], dim=272)
        ragged_paged_attention(wide.q, wide.pool, wide.spans, wide.page_tables, scale=1.0)
