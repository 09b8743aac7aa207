"""The entries of reports as curves."""

from __future__ import annotations

import pytest

from pensieve.replay.measure import value_at
from pensieve.replay.presentation.curves import busiest, by_system, curve_points, entries
from support.replay.replay_reports import RATES, SYSTEMS, first_version, sweep


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
    one, two = curve_points(curve)
    assert (one.load, two.load) == ("1 turns/s", "2 turns/s")
    for path, found in (
        ("turns_per_s", one.throughput),
        ("normalised_latency_s.mean", one.mean_s),
        ("normalised_latency_s.p90", one.p90_s),
    ):
        first, second = (value_at(entry.summary, path) for entry in curve[:2])
        assert found == pytest.approx((first + second) / 2) and first != second
    assert one.interval_s == (0.01, 0.09)
    (alone,) = curve_points(by_system(entries([sweep({"P": 8.0}, (1.0,))]))["P"])
    assert alone.interval_s is None


def test_loads_in_words() -> None:
    report = first_version()
    report["options"]["arrivals"]["rate"] = None
    assert entries([report])[0].load == "all at once"
    report["options"]["arrivals"]["recorded"] = True
    assert entries([report])[0].load == "recorded times"
    report["targets"][0]["clients"] = 8
    assert entries([report])[0].load == "8 clients"


def test_at_passes_over_what_is_not_there() -> None:
    assert value_at({"a": {"b": 3}}, "a.b") == 3
    assert value_at({"a": {"b": 3}}, "a.c") is None and value_at({"a": None}, "a.b") is None
