"""The program that measures what the page costs, on a small load: that it runs, and that it looked."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from support.lengths import LONG
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


def test_turns_are_counted_in_their_half(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("service/page_cost", monkeypatch)
    assert bench.per_second([0.5, 1.0, 1.5, 2.0], 1.0, 2.0) == 2.0
    assert bench.processor_s(os.getpid()) > 0.0


@pytest.mark.skipif(not LONG, reason="starts a server: PENSIEVE_LONG_TESTS=1")
def test_turns_are_counted_with_the_page_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("service/page_cost", monkeypatch)
    result = CliRunner().invoke(bench.main, [*SMALL, "--output-tokens", "4"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["turns_per_s_without"]) == len(found["turns_per_s_with"]) == 1
    assert found["state_bytes"] > 1000 and found["state_ms_max"] >= found["state_ms_p50"] > 0
