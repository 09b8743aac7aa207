"""Sums of evenly growing steps, against adding them up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.simulate.turns.batch import StepSeries

SERIES = st.builds(
    lambda first, share: StepSeries(first, share * first),
    st.floats(1e-3, 1.0),
    st.sampled_from([0.0, 1e-6, 1e-3, 1e-2, 0.5]),
)


def steps(series: StepSeries, count: int) -> list[float]:
    return [series.first + index * series.rise for index in range(count)]


@given(SERIES, st.integers(1, 500))
def test_parts_are_all_steps_in_order(series: StepSeries, count: int) -> None:
    each = steps(series, count)
    assert series.total_s(count) == pytest.approx(sum(each)) and series.last_s(count) == pytest.approx(
        each[-1]
    )
    done = 0
    for seconds, number, end in series.even_runs(count):
        part = each[done : done + number]
        done += number
        assert seconds == pytest.approx(sum(part) / number) and end == pytest.approx(sum(each[:done]))
        assert number == 1 or part[-1] < 1.03 * part[0] or len(part) <= 2
    assert done == count


@given(SERIES, st.floats(0.0, 50.0), st.integers(1, 500))
def test_until_is_the_first_step_that_ends_after(series: StepSeries, total: float, most: int) -> None:
    count = series.steps_until(total, most)
    assert 1 <= count <= most
    if count < most:
        assert series.total_s(count) >= total * (1 - 1e-9)
    if count > 1:
        assert series.total_s(count - 1) <= total * (1 + 1e-9)
