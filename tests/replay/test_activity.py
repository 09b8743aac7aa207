"""How many conversations were active, and how many of them in time."""

from __future__ import annotations

import pytest

from pensieve.replay.measure import active_sessions, largest_within_limit
from pensieve.replay.records import TurnRecord


def turn(talk: int, number: int, sent: float, done: float, ttft: float = 0.1, error: str = "") -> TurnRecord:
    return TurnRecord(talk, number, 1, sent, sent, [(1, sent + ttft)], done, error=error)


def bins(*pairs: tuple[float, float | None]) -> list[dict[str, float | None]]:
    return [{"active": active, "ttft_p95_s": late} for active, late in pairs]


def test_a_conversation_is_active_through_its_pauses() -> None:
    records = [turn(0, 0, 1.0, 2.0), turn(0, 1, 9.0, 11.0), turn(1, 0, 6.0, 11.0)]
    found = active_sessions(records)
    assert found["mean"] == pytest.approx((10 + 5) / 10)
    assert found["max"] == 2
    assert found["bins"] == [] and found["largest_within_limit"] is None, (
        "three turns have no 95th percentile"
    )


def test_turns_around_the_window_keep_a_conversation_active() -> None:
    inside, outside = [turn(0, 0, 4.0, 5.0)], [turn(1, 0, 0.0, 1.0), turn(1, 1, 20.0, 21.0)]
    found = active_sessions(inside, outside, (4.0, 8.0))
    assert found["mean"] == pytest.approx((4 + 1) / 4)
    assert found["max"] == 2
    assert active_sessions(inside, window=(4.0, 8.0))["max"] == 1


def test_one_conversation_after_the_other_is_one_at_a_time() -> None:
    assert active_sessions([turn(0, 0, 0.0, 1.0), turn(1, 0, 1.0, 2.0)])["max"] == 1


def test_bins_hold_twenty_turns_and_all_turns() -> None:
    records = [turn(n, 0, n * 1.0, n + 0.5) for n in range(50)]
    found = active_sessions(records)["bins"]
    assert [entry["turns"] for entry in found] == [25, 25]
    assert found[0]["start_s"] == pytest.approx(0.0) and found[0]["end_s"] == found[1]["start_s"]
    assert found[1]["end_s"] == 49.5
    assert found[0]["active"] == pytest.approx(0.5)
    many = active_sessions([turn(n, 0, n * 1.0, n + 0.5) for n in range(2000)])["bins"]
    assert len(many) == 20 and sum(entry["turns"] for entry in many) == 2000


def test_everything_sent_at_once_is_active_at_once() -> None:
    found = active_sessions([turn(n, 0, 3.0, 4.0) for n in range(40)])["bins"]
    assert [entry["active"] for entry in found] == [40, 40]


def test_p95_counts_failures_as_late() -> None:
    good = [turn(n, 0, n * 1.0, n + 1.0, ttft=0.1 + n / 1000) for n in range(19)]
    last = turn(19, 0, 19.0, 20.0, error="UNAVAILABLE")
    assert active_sessions([*good, last])["ttft_p95_s"] == pytest.approx(0.118), "one of twenty may fail"
    two = active_sessions([*good[1:], last, turn(20, 0, 20.0, 21.0, error="UNAVAILABLE")])
    assert two["ttft_p95_s"] is None and two["limit_reached"] and two["largest_within_limit"] is None


def test_a_conversation_that_never_opened_counts_from_when_it_was_due() -> None:
    never = TurnRecord(0, 0, 1, 7.0, done_s=8.0, error="UNAVAILABLE")
    assert active_sessions([never, turn(1, 0, 6.0, 9.0)])["mean"] == pytest.approx((1 + 3) / 3)


def test_the_rule() -> None:
    assert largest_within_limit([]) == {"largest_within_limit": None, "limit_reached": False}
    within = largest_within_limit(bins((30, 1.9), (10, 0.2), (20, 2.0)))
    assert within == {"largest_within_limit": 30, "limit_reached": False}
    lucky = largest_within_limit(bins((30, 1.9), (10, 0.2), (20, 2.1)))
    assert lucky == {"largest_within_limit": 10, "limit_reached": True}
    failed = largest_within_limit(bins((5, None), (10, 0.2)))
    assert failed == {"largest_within_limit": None, "limit_reached": True}
