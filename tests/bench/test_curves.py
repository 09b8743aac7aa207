"""Which entries of reports are one curve, and what is read off curves."""

from __future__ import annotations

import copy
import math

import pytest

from pensieve.replay.curves import (
    Point,
    at,
    busiest,
    by_system,
    curve_points,
    entries,
    equal_latency_ratio,
    throughput_at,
)
from support.replay_reports import RATES, SYSTEMS, first_version, sweep


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point("", None, x, y, None, None) for x, y in pairs]


def test_a_sweep_is_one_curve_per_system() -> None:
    report = sweep()
    found = entries([report])
    curves = by_system(found)
    assert list(curves) == list(SYSTEMS)
    assert [entry.rate for entry in curves["Pensieve"]] == list(RATES)
    assert busiest(curves["Pensieve"]).load == "3.5 turns/s"
    for entry in found:
        assert entry.summary is report["targets"][int(entry.path.removeprefix("targets."))]


def test_seeds_are_one_point_with_an_interval() -> None:
    report = sweep({"Pensieve": 8.0}, (1.0, 2.0), (0, 1))
    curve = by_system(entries([report]))["Pensieve"]
    assert len(curve) == 4
    one, two = curve_points([report], curve)
    assert (one.rate, two.rate) == (1.0, 2.0)
    values = [entry.summary["turns_per_s"] for entry in curve[:2]]
    assert one.throughput == pytest.approx(sum(values) / 2) and values[0] != values[1]
    assert (one.low_s, one.high_s) == (0.01, 0.09)
    (alone,) = curve_points([sweep({"P": 8.0}, (1.0,))], by_system(entries([sweep({"P": 8.0}, (1.0,))]))["P"])
    assert alone.low_s is None


def test_reports_that_differ_in_the_load_only_make_one_curve() -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    curves = by_system(entries([fast, slow], ["fast", "slow"]))
    assert [entry.rate for entry in curves["Pensieve"]] == [1.0, 3.0]


def test_reports_of_the_same_load_are_compared() -> None:
    before, after = first_version(), first_version()
    assert list(by_system(entries([before, after], ["a", "b"]))) == ["Pensieve (a)", "Pensieve (b)"]


@pytest.mark.parametrize("key", ["dataset", "options", "machine", "versions"])
def test_reports_that_differ_in_more_are_told_apart(key: str) -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    changed = {
        "dataset": {"sha256": "11"}, "options": {"shape": {"max_turns": 2}}, "machine": {"cpu": "x"},
        "versions": {"pensieve": "9"},
    }[key]  # fmt: skip
    fast[key] |= changed
    assert list(by_system(entries([slow, fast], ["a", "b"]))) == ["Pensieve (a)", "Pensieve (b)"]


def test_details_tell_apart_too_and_other_names_stay() -> None:
    one = sweep({"Pensieve": 8.0, "stub": 2.0}, (1.0,))
    two = copy.deepcopy(sweep({"Pensieve": 8.0}, (2.0,)))
    two["targets"][0]["details"]["serve"] = "--no-host-cache"
    assert list(by_system(entries([one, two], ["a", "b"]))) == ["Pensieve (a)", "stub", "Pensieve (b)"]


def test_loads_in_words() -> None:
    report = first_version()
    report["options"]["arrivals"]["rate"] = None
    assert entries([report])[0].load == "all at once"
    report["options"]["arrivals"]["recorded"] = True
    assert entries([report])[0].load == "recorded times"
    report["targets"][0]["clients"] = 8
    assert entries([report])[0].load == "8 clients"


def test_at_passes_over_what_is_not_there() -> None:
    assert at({"a": {"b": 3}}, "a.b") == 3
    assert at({"a": {"b": 3}}, "a.c") is None and at({"a": None}, "a.b") is None


def test_throughput_at_a_latency() -> None:
    curve = points((1, 0.1), (2, 0.2), (3, 0.6))
    assert throughput_at(curve, 0.15) == pytest.approx(1.5)
    assert throughput_at(curve, 0.6) == 3
    assert throughput_at(curve, 0.7) is None and throughput_at(curve, 0.05) is None
    folding = points((1, 0.1), (3, 0.5), (2.8, 0.3))
    assert throughput_at(folding, 0.4) == pytest.approx(2.9), "the most of what is reached at this latency"
    assert throughput_at(points((1, 0.5), (2, 0.2)), 0.3) == 2, "a later point within the limit counts"


def test_ratio_at_equal_latency() -> None:
    ours, other = points((2, 0.1), (4, 0.4)), points((1, 0.1), (2, 0.4))
    ratio = equal_latency_ratio(ours, other)
    assert ratio is not None
    assert ratio[0] == pytest.approx(math.sqrt(0.1 * 0.4)) and ratio[1] == pytest.approx(2.0)
    assert equal_latency_ratio(ours, points((1, 0.5), (2, 0.9))) is None, "no latency that both reach"
    assert equal_latency_ratio(ours, points((1, 0.2))) is None, "a point is no curve"
