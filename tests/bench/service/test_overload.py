"""The programs that measure overload, on small loads: that they run, and that their figures mean what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench

SMALL = ["--seconds", "2", "--step-ms", "4", "--token-us", "20", "--output-tokens", "8", "--max-running", "2"]


def test_the_summary_counts_whom_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("service/overload", monkeypatch)
    calls = [bench.Call(at, "", 0.1 * at, 0.5) for at in range(10)]
    calls += [bench.Call(9.0, "SERVER_OVERLOADED", 0.0, 0.002), bench.Call(9.0, "BUG", 0.0, 0.3)]
    found: dict[str, Any] = bench.summary(calls, 10.0)
    assert found["offered_per_s"] == pytest.approx(9 / 7.5)  # seven that were served, and two that were not
    assert (found["first_token_p50_s"], found["first_token_p99_s"]) == (0.6, 0.8)
    assert found["refused_share"] == pytest.approx(1 / 9, abs=0.001) and found["refusal_p99_s"] == 0.002
    assert found["reasons"] == {"SERVER_OVERLOADED": 1, "BUG": 1}


def test_a_server_is_offered_more_than_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_bench("service/overload", monkeypatch).main
    result = CliRunner().invoke(main, [*SMALL, "--served", "30", "--times", "3", "--option=--max-wait=300ms"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout.splitlines()[-1])["rows"]["3x"]
    assert row["served_per_s"] > 0 and set(row["reasons"]) <= {"SERVER_OVERLOADED"}
