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
        samples.append(soak.Sample(at, number, tokens, 90.0, 9000.0 if at < 60 else 200.0 + number))
    first, last = soak.tenth(samples, False), soak.tenth(samples, True)
    assert (first["output_tokens_per_s"], last["output_tokens_per_s"]) == (100.0, 50.0)
    assert first["engine_mib"] < 300 < last["engine_mib"] and first["front_end_mib"] == last["front_end_mib"]
