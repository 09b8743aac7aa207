"""Attention whose pieces are merged by whoever finishes last: results under Triton's interpreter, joins, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels.attention.kinds import (
    Capacity,
    Geometry,
    StepKind,
    capacity_for,
    classify,
    joins_pieces,
)
from pensieve.kernels.attention.plan import AttentionPlan, Scratch, geometry_for, words_of
from pensieve.kernels.attention.work_lists import joins_of, make_work_lists
from pensieve.kernels.span_table import SpanTable
from support.kernels.under_interpreter import passed_under_interpreter

CPU = torch.device("cpu")
LLAMA = Geometry(40, 10, 128, 2, 132, joining=1)


def test_results_under_the_interpreter() -> None:
    assert passed_under_interpreter("interpreted_joining") >= 8


def test_it_is_off_unless_asked_for() -> None:
    geometry = geometry_for(40, torch.zeros(1, 2, 10, 32, 128))
    assert geometry == replace(geometry, joining=0)
    for kind in StepKind:
        assert capacity_for(kind, 64, 64, 4096, geometry).joins == 0
    assert Scratch(64, geometry, CPU).finished.numel() == 1


@settings(max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40_000)), min_size=1, max_size=40),
    shape=st.sampled_from([(40, 10), (32, 8), (14, 2), (40, 1)]),
    processors=st.sampled_from([4, 132, 5000]),
    decodes=st.booleans(),
    joining=st.sampled_from([1, 4]),
)
def test_a_join_names_the_merges_of_its_item(
    spans: list[tuple[int, int]], shape: tuple[int, int], processors: int, decodes: bool, joining: int
) -> None:
    geometry = Geometry(*shape, head_dim=128, element_bytes=2, multiprocessors=processors, joining=joining)
    lengths = [1 if decodes else length for length, _ in spans]
    host = SpanTable.build(lengths, [position for _, position in spans], range(len(spans))).host
    kind = classify(host, geometry)
    if not joins_pieces(kind, geometry, geometry.tiles):
        return
    work = make_work_lists(host, int(host[:, 1].sum()), geometry, geometry.tiles, kind)
    items, tile = (
        (work.wide, geometry.tiles.wide)
        if len(work.wide)
        else (work.narrow, kind.narrow_tile(geometry.tiles))
    )
    named = np.zeros(len(work.merges), np.int64)
    for item, (first, end) in zip(items.tolist(), joins_of(items, work.merges, tile).tolist(), strict=True):
        if item[7] < 0:
            continue
        merges = work.merges[first:end]
        named[first:end] += 1
        row = item[4]
        for start, begin, stop, _, _, apart in merges.tolist():
            assert (start, begin, apart) == (item[0], row, tile.rows)
            row = stop
        assert row == min(item[4] + tile.rows, item[1]), "all rows of the item, and no others"
        assert (item[7] - merges[0, 3]) % tile.rows == 0
        assert 0 <= item[7] - merges[0, 3] < merges[0, 4] * tile.rows, "a piece of these"
    assert (named == work.merges[:, 4]).all(), "so many pieces count as the merge waits for"


def test_a_plan_in_fixed_memory_has_room_for_joins() -> None:
    capacity = capacity_for(StepKind.NARROW, 64, 64, 4096, LLAMA)
    apart = capacity_for(StepKind.NARROW, 64, 64, 4096, replace(LLAMA, joining=0))
    assert capacity == replace(apart, joins=capacity.narrow) and words_of(capacity) > words_of(apart)
    plan = AttentionPlan(64, LLAMA, CPU, kind=StepKind.NARROW, capacity=capacity)
    for count, context in ((64, 4096), (3, 4096), (40, 900), (0, 1)):
        host = SpanTable.build([1] * count, [context - 1] * count, range(count)).host
        plan.refill(host)
        items, merges, joins = (int(plan.words[at]) for at in (0, 2, 7))
        assert joins + 2 * items <= len(plan.words)
        assert not merges or int(plan.words[joins : joins + 2 * items].max()) == merges


def test_what_cannot_join_is_refused() -> None:
    with pytest.raises(ValueError, match="mixed steps"):
        AttentionPlan(64, LLAMA, CPU, kind=StepKind.MIXED, capacity=Capacity(4, 4, 8, 64, joins=8))
    with pytest.raises(ValueError, match="without joins"):
        scratch = Scratch(64, replace(LLAMA, joining=0), CPU)
        AttentionPlan(
            4, LLAMA, CPU, kind=StepKind.NARROW, capacity=Capacity(4, 0, 8, 64, joins=4), scratch=scratch
        )
    assert not joins_pieces(StepKind.WIDE, replace(LLAMA, hopper=True), replace(LLAMA, hopper=True).tiles)
