"""Windows of measurement, the client's own lag, and confidence intervals, on made-up records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pensieve.replay.measure import (
    METRICS,
    Window,
    client_lag,
    cut_to_window,
    has_trend,
    intervals,
    running_turns,
)
from pensieve.replay.records import Outcome, TurnRecord
from pensieve.replay.targets.base import TargetInfo

INFO = TargetInfo(100, 100)


def load(latency: list[float], *, lag: float = 0.0, loop: tuple[float, ...] = (0.001,)) -> Outcome:
    """A first turn each second, of these latencies."""
    records = tuple(
        TurnRecord(i, 0, 1, at, sent_s=at + lag, arrivals=[(1, at + lag + took)], done_s=at + lag + took)
        for i, took in enumerate(latency)
        for at in (i + 0.01,)
    )
    return Outcome("t", INFO, records, 0, max(r.done_s for r in records), (loop,))


def test_running_turns_are_weighted_by_time() -> None:
    records = load([2.0, 0.5]).records
    assert running_turns(records, 0.01, 2.01, 2).tolist() == pytest.approx([1.0, 1.5])


@pytest.mark.parametrize(
    ("levels", "trend"),
    [
        ([5.0] * 10, False),
        ([0.0] * 10, False),
        (range(1, 11), True),
        ([9, 1, 9, 1, 9, 1, 9, 1, 9, 1], False),
        (5 + np.arange(10) * 0.05, False),
    ],
)
def test_trend(levels: object, trend: bool) -> None:
    assert has_trend(np.array(levels, dtype=np.float64)) is trend


def test_steady_start_cuts_the_warm_up() -> None:
    slow_start = [0.2] * 40 + [3.0] * 160
    outcome, told = cut_to_window(load(slow_start), Window(steady=True))
    assert told["rule"] == "steady" and told["steady"]
    assert 20 <= told["start_s"] <= 60
    assert told["end_s"] == pytest.approx(199.01), "the last conversation's start"
    assert len(outcome.records) + len(outcome.outside) == 200
    assert all(told["start_s"] <= r.done_s < told["end_s"] for r in outcome.records)
    assert outcome.duration_s == pytest.approx(told["end_s"] - told["start_s"])
    assert outcome.window_s == (told["start_s"], told["end_s"])


def test_overload_is_not_steady() -> None:
    _, told = cut_to_window(load([i * 0.9 for i in range(100)]), Window(steady=True))
    assert told["steady"] is False


def test_given_windows() -> None:
    outcome, told = cut_to_window(load([0.5] * 20), Window(5.0, 10.0))
    assert (told["rule"], told["start_s"], told["end_s"], told["steady"]) == ("given", 5.0, 15.0, True)
    assert len(outcome.records) == 10 and told["turns_outside"] == 10
    whole, told = cut_to_window(load([0.5] * 20), Window())
    assert told["rule"] == "whole" and told["steady"] is None and len(whole.records) == 20
    whole, told = cut_to_window(load([0.5] * 20), Window(warm_up_s=100.0))
    assert told["rule"] == "whole" and told["steady"] is False and len(whole.records) == 20


def test_a_late_client_is_found() -> None:
    assert client_lag(load([1.0] * 50), 0.1)["valid"]
    late = client_lag(load([1.0] * 50, lag=0.2), 0.1)
    assert not late["valid"] and "sent" in late["reason"]
    blocked = client_lag(load([1.0] * 50, loop=(0.0, 0.9)), 0.1)
    assert not blocked["valid"] and "event loop" in blocked["reason"]


def test_one_late_process_of_many_is_found() -> None:
    """Among the timers of all it would be one in two hundred."""
    outcome = replace(load([1.0] * 50), loop_lag_s=((0.001,) * 1000, (0.9,) * 5))
    lag = client_lag(outcome, 0.1)
    assert lag["loop_lag_s"]["count"] == 1005 and lag["loop_lag_s"]["p99"] == 0.001
    assert lag["loop_lag_p99_s"] == pytest.approx([0.001, 0.9]) and not lag["valid"]


def summary(seed: int, value: float | None, target: str = "t") -> dict[str, object]:
    nested = {kind: dict.fromkeys(("mean", "p50", "p90", "p99"), value) for kind in ("cold", "warm")}
    flat = dict.fromkeys(("mean", "p50", "p90", "p99"), value)
    names = {"normalised_latency_s": flat, "ttft_s": nested, "inter_token_s": flat}
    return {"target": target, "rate": 1.0, "clients": None, "seed": seed, "turns_per_s": value,
            "output_tokens_per_s": value, **names}  # fmt: skip


def test_confidence_intervals() -> None:
    (entry,) = intervals([summary(1, 1.0), summary(2, 2.0), summary(3, 3.0), summary(1, 9.0, "other")])
    assert entry["seeds"] == [1, 2, 3] and set(entry["metrics"]) == set(METRICS)
    found = entry["metrics"]["ttft_s.warm.p99"]
    assert found["mean"] == pytest.approx(2.0) and found["n"] == 3
    assert found["high"] - 2.0 == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    (entry,) = intervals([summary(1, None), summary(2, 2.0)])
    assert entry["metrics"]["turns_per_s"] == {"mean": 2.0, "low": None, "high": None, "n": 1}
