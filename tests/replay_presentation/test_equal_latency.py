"""What is read off the curves of two systems."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.replay.presentation.curves import (
    CurvePoint,
    common_latency,
    comparisons,
    load_at_latency,
    ratio,
)

LATENCY = st.floats(1e-3, 10.0)
LINE = st.lists(st.tuples(st.floats(0.01, 1000.0), LATENCY), min_size=1, max_size=8)


def test_what_is_carried_at_a_latency() -> None:
    line = [(1, 0.1), (2, 0.2), (3, 0.6)]
    found = load_at_latency(line, 0.15)
    assert found is not None and found.turns_per_s == pytest.approx(1.5) and not found.at_least
    edge, above = load_at_latency(line, 0.6), load_at_latency(line, 0.7)
    assert edge is not None and (edge.turns_per_s, edge.at_least) == (3, False)
    assert above is not None and (above.turns_per_s, above.at_least) == (3, True)
    assert load_at_latency(line, 0.05) is None and load_at_latency([], 1.0) is None


def test_a_curve_that_folds_back() -> None:
    folding = [(1, 0.1), (3, 0.5), (2.8, 0.3)]
    found = load_at_latency(folding, 0.4)
    assert found is not None and found.turns_per_s == pytest.approx(2.9), (
        "the most that is reached at this latency"
    )
    assert found.at_least, "at its highest load it was faster"
    later = load_at_latency([(1, 0.5), (2, 0.2)], 0.3)
    assert later is not None and later.turns_per_s == 2, "a later point within the limit counts"


def test_ratio_where_the_curves_meet() -> None:
    found = ratio([(2, 0.1), (4, 0.4)], [(1, 0.1), (2, 0.4)])
    assert found is not None and found.latency_s == pytest.approx(math.sqrt(0.1 * 0.4))
    assert found.bound == "equal" and found.times == pytest.approx(2.0) and found.text == "2.00"
    given = ratio([(2, 0.1), (4, 0.4)], [(1, 0.1), (2, 0.4)], 0.1)
    assert given is not None and given.latency_s == 0.1 and given.times == pytest.approx(2.0)


def test_bounds_where_they_do_not() -> None:
    fast, slow = [(2, 0.1), (6, 0.2)], [(1, 0.5), (2, 0.9)]
    better, worse = ratio(fast, slow), ratio(slow, fast)
    assert better is not None and worse is not None
    assert better.latency_s == worse.latency_s == 0.9, "the slower one at its best"
    assert (better.bound, better.times, better.text) == ("at least", 3.0, "≥ 3.00")
    assert (worse.bound, worse.text) == ("at most", "≤ 0.33")


@pytest.mark.parametrize(
    ("latency_s", "text"),
    [(0.05, "neither is so fast"), (0.3, "only the first is so fast"), (2.0, "both are faster")],
)
def test_nothing_is_made_up(latency_s: float, text: str) -> None:
    fast, slow = [(2, 0.1), (6, 0.2)], [(1, 0.5), (2, 0.9)]
    found, back = ratio(fast, slow, latency_s), ratio(slow, fast, latency_s)
    assert found is not None and (found.bound, found.times, found.text) == (None, None, text)
    assert back is not None and back.text == text.replace("first", "second")
    assert ratio(fast, []) is None


def test_pairs_at_the_mean_and_at_p90() -> None:
    def line(factor: float, p90_s: float | None) -> list[CurvePoint]:
        return [
            CurvePoint("", factor, 0.1, p90_s, None),
            CurvePoint("", 2 * factor, 0.4, p90_s and 2 * p90_s, None),
        ]

    found = comparisons({"A": line(3, 0.5), "B": line(1, 0.5), "old": line(1, None), "down": []})
    assert [(pair.ours, pair.other) for pair in found] == [
        ("A", "B"), ("A", "old"), ("A", "down"), ("B", "old"), ("B", "down"), ("old", "down"),
    ]  # fmt: skip
    mean, p90 = found[0].mean, found[0].p90
    assert mean is not None and mean.times == pytest.approx(3) and mean.latency_s == pytest.approx(0.2)
    assert (
        p90 is not None and p90.times == pytest.approx(3) and p90.latency_s == pytest.approx(math.sqrt(0.5))
    )
    assert found[1].mean is not None and found[1].p90 is None and found[2].mean is None


@given(LINE, LATENCY, LATENCY)
def test_more_latency_never_carries_less(line: list[tuple[float, float]], one: float, two: float) -> None:
    low, high = load_at_latency(line, min(one, two)), load_at_latency(line, max(one, two))
    if low is not None:
        assert high is not None and high.turns_per_s >= low.turns_per_s * (1 - 1e-12)
        assert high.at_least or not low.at_least


@given(LINE, LATENCY)
def test_what_is_carried_was_measured(line: list[tuple[float, float]], latency_s: float) -> None:
    found = load_at_latency(line, latency_s)
    if found is None:
        assert latency_s < min(y for _, y in line)
    else:
        within = max(x for x, y in line if y <= latency_s)
        assert within <= found.turns_per_s <= max(x for x, _ in line) * (1 + 1e-12)


@given(LINE, LINE, st.none() | LATENCY)
def test_a_ratio_turned_round_is_its_inverse(
    ours: list[tuple[float, float]], other: list[tuple[float, float]], latency_s: float | None
) -> None:
    there, back = ratio(ours, other, latency_s), ratio(other, ours, latency_s)
    assert there is not None and back is not None and there.latency_s == back.latency_s
    turned = {"at least": "at most", "at most": "at least", "equal": "equal", None: None}
    assert back.bound == turned[there.bound]
    if there.times is not None:
        assert back.times is not None and there.times * back.times == pytest.approx(1)
    if latency_s is None:
        assert there.bound is not None, "the latency that is chosen always tells something"


@given(LINE, LINE, st.integers(-6, 6), st.integers(-6, 6))
def test_units_do_not_matter(
    ours: list[tuple[float, float]], other: list[tuple[float, float]], turns: int, seconds: int
) -> None:
    """Throughput in another unit for one, time in another for both; powers of two, so that nothing is rounded."""
    more, slower = 2.0**turns, 2.0**seconds
    scaled = ratio([(x * more, y * slower) for x, y in ours], [(x, y * slower) for x, y in other])
    plain = ratio(ours, other)
    assert scaled is not None and plain is not None and plain.times is not None
    assert (scaled.latency_s, scaled.bound) == (plain.latency_s * slower, plain.bound)
    assert scaled.times == plain.times * more


@given(LINE, st.floats(0.1, 10.0))
def test_a_system_against_its_multiple(line: list[tuple[float, float]], factor: float) -> None:
    found = ratio([(x * factor, y) for x, y in line], line)
    assert found is not None and found.times == pytest.approx(factor)


@given(LINE, LINE)
def test_the_chosen_latency_is_covered_by_both_where_there_is_such_a_one(
    ours: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    chosen = common_latency(ours, other)
    covered = [min(y for _, y in line) <= chosen <= line[-1][1] for line in (ours, other)]
    low, high = max(min(y for _, y in line) for line in (ours, other)), min(ours[-1][1], other[-1][1])
    assert all(covered) or (low > high and chosen == max(ours[-1][1], other[-1][1]))
