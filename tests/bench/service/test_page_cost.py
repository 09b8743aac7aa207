"""The program that measures what the page costs, on a small load: that it runs, and that it looked."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench

SMALL = [
    "--sessions",
    "4",
    "--callers",
    "2",
    "--rounds",
    "1",
    "--seconds",
    "1.2",
    "--step-ms",
    "2",
    "--token-us",
    "5",
]


def test_looks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_bench("scheduler/looks", monkeypatch).main
    result = CliRunner().invoke(main, ["--sessions", "5", "--chunks", "10", "--looks", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["first"]["pieces"] >= found["later"]["pieces"] >= 1
    assert 0 < found["later"]["longest"] <= found["later"]["total"]


def test_turns_are_counted_with_the_page_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("service/page_cost", monkeypatch)
    assert bench.per_second([0.5, 1.0, 1.5, 2.0], 1.0, 2.0) == 2.0
    result = CliRunner().invoke(bench.main, [*SMALL, "--output-tokens", "4"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["turns_per_s_without"]) == len(found["turns_per_s_with"]) == 1
    assert found["state_bytes"] > 1000 and found["state_ms_max"] >= found["state_ms_p50"] > 0
