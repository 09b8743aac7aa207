"""Plain copies of coded pages: which pages are copied, and that wide items find them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels.attention.capacity import COPIED_BYTES, capacity_for, most_copies
from pensieve.kernels.attention.copies import place
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.work_lists import END_KEY, FIRST_KEY, FIRST_ROW, ROWS, make_work_lists
from pensieve.kernels.spans import POSITION, TABLE, make_spans

PAGE = 32
CODED = Geometry(40, 10, 128, 2, 132, coded=True, copied_page=PAGE)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 5, 17, 33, 64, 129, 600]), min_size=1, max_size=20),
    hopper=st.booleans(),
    window=st.one_of(st.none(), st.sampled_from([1, 40, 128, 1000])),
    same_table=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_key_that_a_wide_item_sees_has_one_copy(
    lengths: list[int], hopper: bool, window: int | None, same_table: bool, seed: int
) -> None:
    geometry = replace(CODED, hopper=hopper, window=window)
    positions = np.random.default_rng(seed).integers(0, 3000, len(lengths))
    tables = [0] * len(lengths) if same_table else [1000 * number for number in range(len(lengths))]
    spans = make_spans(lengths, positions, tables)
    kind = classify(spans, geometry)
    plain = make_work_lists(spans, sum(lengths), geometry, kind)
    work = place(plain, geometry)
    copies = [(table, index) for table, index in work.copies.tolist()]
    assert len(set(copies)) == len(copies), "a page is copied twice"
    seen = set()
    assert np.array_equal(np.delete(work.wide, TABLE, 1), np.delete(plain.wide, TABLE, 1))
    for before, item in zip(plain.wide, work.wide, strict=True):
        first = int(item[FIRST_KEY])
        if window is not None:
            first = max(first, int(item[POSITION] + item[FIRST_ROW] // geometry.groups + 1 - window))
        for index in {key // PAGE for key in range(first, int(item[END_KEY]))}:
            assert copies[int(item[TABLE]) + index] == (before[TABLE], index)
            seen.add((int(before[TABLE]), index))
    if window is None and not same_table:
        assert seen == set(copies), "a page is copied that no query sees"
    assert np.array_equal(work.narrow, plain.narrow) and np.array_equal(work.merges, plain.merges)
    capacity = capacity_for(kind, sum(lengths), len(lengths), 4096, geometry)
    assert len(copies) <= capacity.copies or capacity.copies == most_copies(geometry)


def test_room_for_copies() -> None:
    page = 2 * 10 * PAGE * 128 * 2
    assert most_copies(CODED) == COPIED_BYTES // page and most_copies(CODED.without_copies) == 0
    assert capacity_for(StepKind.NARROW, 64, 64, 4096, CODED).copies == 0, "narrow items decode"
    assert capacity_for(StepKind.WIDE, 512, 1, 4096, CODED).copies == 4096 // PAGE
    assert capacity_for(StepKind.MIXED, 8192, 256, 1 << 17, CODED).copies == most_copies(CODED)
    assert not replace(CODED, hopper=True).without_copies.hopper, "bulk copies cannot decode"


def test_items_without_keys_read_nothing() -> None:
    spans = make_spans([100], [0], [7])
    work = place(make_work_lists(spans, 400, CODED, StepKind.WIDE), CODED)
    padding = work.wide[work.wide[:, END_KEY] == work.wide[:, FIRST_KEY]]
    assert len(padding) and (padding[:, ROWS] == 300 * CODED.groups).all() and len(work.copies) == 4
