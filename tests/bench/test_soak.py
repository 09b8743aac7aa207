"""What the soaks say of their samples and answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.core import TokenLogprob
from support.replay.benches import load_bench


def test_first_and_last_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that slows down to a half and grows is told from one that stays as it was; warming up is left out."""
    soak = load_bench("soak/soak", monkeypatch)
    samples, tokens = [], 0
    for number in range(1, 721):
        tokens += 500 if number <= 360 else 250
        at = 5.0 * number
        engine = 9000.0 if at < 60 else 200.0 + number
        # The server works for half of the time, whatever comes out of it; contexts grow by a token a turn.
        samples.append(soak.Sample(at, number, tokens, 90.0, engine, at / 2, number * number, at >= 60))
    first, last = soak.tenth(samples, False), soak.tenth(samples, True)
    assert (first["output_tokens_per_s"], last["output_tokens_per_s"]) == (100.0, 50.0)
    assert (first["output_tokens_per_processor_s"], last["output_tokens_per_processor_s"]) == (200.0, 100.0)
    assert first["context_tokens_per_turn"] < 200 and last["context_tokens_per_turn"] > 1200
    assert first["engine_mib"] < 300 < last["engine_mib"] and first["front_end_mib"] == last["front_end_mib"]


def test_too_short_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = load_bench("soak/soak", monkeypatch)
    samples = [soak.Sample(5.0 * number, number, number, 1.0, 1.0, 1.0, 1, False) for number in range(20)]
    with pytest.raises(Exception, match="too short"):
        soak.tenth(samples, True)


def test_a_value_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = load_bench("soak_invariant", monkeypatch)

    def turn(*values: float, last: int = 7) -> Any:
        logprobs = tuple(TokenLogprob(number, value, ((3, -0.5),)) for number, value in enumerate(values))
        tokens = (*range(len(values) - 1), last)
        return SimpleNamespace(candidates=(), token_ids=tokens, logprobs=logprobs, numerics="invariant")

    found = soak.Compared()
    assert found.compare(turn(-0.1, -0.2), turn(-0.1, -0.2))
    assert not found.compare(turn(-0.1, -0.2), turn(-0.1, -0.2000001))
    assert not found.compare(turn(-0.1, -0.2), turn(-0.1, -0.2, last=8))
    assert not found.compare(turn(-0.1, -0.2), turn(-0.1, -0.2, -0.3))
    assert (found.turns, found.differing_turns, found.tokens, found.logprobs) == (4, 3, 8, 16)
    assert (found.differing_tokens, found.differing_logprobs) == (1 + 2, 1 + 2)


def test_a_path_that_was_never_taken_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = load_bench("soak_invariant", monkeypatch)
    good = {
        "compared": {"turns": 9, "differing turns": 0},
        "context tokens": {"device": 1, "host": 2, "recomputed": 3},
        "numerics": ["invariant"], "errors": {}, "wrong receipts": 0, "engine restarts": 0,
    }  # fmt: skip
    assert soak.problems(good) == []
    assert soak.problems({**good, "context tokens": {"device": 1, "host": 2, "recomputed": 0}})
    assert soak.problems({**good, "compared": {"turns": 9, "differing turns": 1}})
    assert soak.problems({**good, "numerics": ["invariant", "other"]})
