"""The program that measures what the door costs, on a real server whose engine has no model."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench


def test_the_same_streams_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_bench("http_door/cost", monkeypatch).main
    small = [
        "--part",
        "tokens",
        "--streams",
        "2",
        "--step-ms",
        "5",
        "--output-tokens",
        "10",
        "--seconds",
        "0.1",
    ]
    result = CliRunner().invoke(main, small)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["part"], row["way"]) for row in rows] == [
        ("tokens", way) for way in ("grpc", "chat", "responses")
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["tokens_per_piece"] > 0.5
