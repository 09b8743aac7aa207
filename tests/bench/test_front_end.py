"""The program that measures what a front end carries, and the engine without a model behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench


def measured(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    load = [
        "--streams",
        "3",
        "--step-ms",
        "2",
        "--output-tokens",
        "50",
        "--seconds",
        "0.2",
        "--store",
        "memory:",
    ]
    main = load_bench("front_end", monkeypatch).main
    return CliRunner().invoke(main, [*load, *options])


def test_every_token_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(monkeypatch)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert (row["streams"], row["offered_tokens_per_s"]) == (3, 1500.0)
    assert 0 < row["messages_per_s"] <= row["tokens_per_s"] <= 1500
    assert row["tokens_per_s_per_core"] == pytest.approx(1e6 / row["front_end_us_per_token"])
    assert row["cpu_share"] * row["tokens_per_s_per_core"] == pytest.approx(row["tokens_per_s"])


def test_failed_turns_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(monkeypatch, "--input-tokens", "20000")
    assert result.exit_code == 1 and "3 turns failed" in result.output
