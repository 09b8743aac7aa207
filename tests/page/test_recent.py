"""What ended lately: latencies, rates and buckets of the turns that are remembered."""

from __future__ import annotations

import pytest

from pensieve.core import Usage
from pensieve.server.page import state
from pensieve.server.page.state import RecentTurns
from pensieve.server.values import TurnEnd
from pensieve.store import Key


def ended(at: float, *, output: int = 11, first_s: float = 0.5, committed: bool = True) -> TurnEnd:
    usage = Usage(context_tokens=100, gpu_cached_tokens=50, swapped_in_tokens=30, recomputed_tokens=15, new_tokens=5,
                  output_tokens=output)  # fmt: skip
    return TurnEnd(Key("t", "s"), "eos", committed, 100, 5, usage, at - 2.5, at - 2.5 + first_s, at)


def test_the_last_minute() -> None:
    turns = RecentTurns()
    for at in range(1000, 1100):
        turns.turn_ended(ended(float(at), first_s=0.1 if at % 20 else 2.0, committed=at != 1099))
    lately = turns.summary(1100.0)
    assert (lately.turns, lately.failed, lately.turns_per_s) == (59, 1, pytest.approx(59 / 60))
    assert lately.output_tokens_per_s == pytest.approx(11 * 59 / 60)
    assert lately.first_token_s is not None and lately.token_s is not None
    assert (lately.first_token_s.p50, lately.first_token_s.p95) == (0.1, 0.1)
    assert lately.token_s.p50 == pytest.approx(2.4 / 10)
    context = lately.context
    assert (context.device, context.host, context.recomputed, context.new) == (2950, 1770, 885, 295)
    assert RecentTurns().summary(5.0).first_token_s is None


def test_buckets_are_whole_and_in_order() -> None:
    turns = RecentTurns()
    for at in (1000.0, 1004.9, 1005.0, 1011.0):
        turns.turn_ended(ended(at))
    counts = [bucket.turns for bucket in turns.series(1011.5)]
    assert len(counts) == state.BUCKETS and counts[-2:] == [2, 1], "the bucket of 1010 is not over"
    assert sum(counts) == 3


def test_old_turns_and_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = RecentTurns()
    turns.turn_ended(ended(0.0))
    turns.turn_ended(ended(state.MAX_AGE_S + 1.0))
    assert len(list(turns.since(-10.0))) == 1
    monkeypatch.setattr(state, "MAX_TURNS", 5)
    turns = RecentTurns()
    for at in range(9):
        turns.turn_ended(ended(float(at)))
    assert [end.ended_at for end in turns.since(-1.0)] == [8.0, 7.0, 6.0, 5.0, 4.0]
