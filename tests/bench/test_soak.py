"""What the soak says of its samples."""

from __future__ import annotations

import pytest

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
