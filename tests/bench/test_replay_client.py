"""The program that measures what a client process carries, and the servers without cost that it measures against."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench


@pytest.mark.parametrize("protocol", ["openai", "pensieve"])
def test_every_piece_is_counted(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_bench("replay_client", monkeypatch).main
    load = ["--streams", "3", "--step-ms", "2", "--output-tokens", "50", "--seconds", "0.2"]
    result = CliRunner().invoke(main, [protocol, *load])
    assert result.exit_code == 0, result.output
    row = json.loads(result.output)
    assert (row["protocol"], row["streams"], row["offered_pieces_per_s"]) == (protocol, 3, 1500.0)
    assert 0 < row["pieces_per_s"] <= 1500
    assert row["pieces_per_s_per_core"] == pytest.approx(1e6 / row["client_us_per_piece"])
    assert row["cpu_share"] * row["pieces_per_s_per_core"] == pytest.approx(row["pieces_per_s"])
