"""Hints in simulations: what clients say, and that the command passes it on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pensieve.config import CacheConfig
from pensieve.core import Hints
from pensieve.simulate.command import simulate
from pensieve.simulate.scenario.load import SessionScript, hints_of
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import ClientHints, Settings


def settings(hints: ClientHints | None = None) -> Settings:
    return Settings(Machine(), CacheConfig(10, 10), Machine().cost_model(32, 320), 320, hints=hints)


def test_what_clients_say() -> None:
    life = SessionScript(3, 100.0, ((5, 5), (5, 5)), (0.0, 7.0))
    config = settings(hints=ClientHints())
    assert hints_of(config, life, 0, 200.0) == Hints(next_turn_s=7.0)
    assert hints_of(config, life, 1, 300.0) == Hints(finished=True)
    assert hints_of(settings(), life, 0, 200.0) is None
    recorded = SessionScript(3, 100.0, ((5, 5), (5, 5)), (0.0, 0.0), (0.0, 30.0))
    assert hints_of(config, recorded, 0, 110.0) == Hints(next_turn_s=20.0)
    assert hints_of(config, recorded, 0, 140.0) == Hints(next_turn_s=0.0)
    noisy = settings(hints=ClientHints(0.5))
    said = [hints_of(noisy, dataclasses.replace(life, number=number), 0, 200.0) for number in range(500)]
    logs = np.log([hint.next_turn_s / 7.0 for hint in said if hint is not None and hint.next_turn_s])
    assert len(logs) == 500 and abs(logs.mean()) < 0.07 and logs.std() == pytest.approx(0.5, rel=0.1)
    assert said[0] == hints_of(noisy, dataclasses.replace(life, number=0), 0, 200.0), "the same each time"
    assert hints_of(settings(hints=ClientHints(ends=False)), life, 1, 300.0) is None
    assert hints_of(settings(hints=ClientHints(pauses=False)), life, 0, 300.0) is None


def test_hints_are_given_and_reported(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "session_id": f"s{s}",
            "turn": t,
            "input_tokens": 20 + s,
            "output_tokens": 10,
            "timestamp_s": s + 5.0 * t,
        }
        for s in range(12)
        for t in range(3)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    lost = []
    for told in ([], ["--hints", "0"]):
        out = tmp_path / "out.json"
        sizes = ["--device-cache", "256tokens", "--host-cache", "128tokens", "--chunk-tokens", "8"]
        arguments = [str(trace), "--policy", "retention", "--jobs", "1", *sizes, "--json", str(out), *told]
        assert CliRunner().invoke(simulate, arguments).exit_code == 0
        report = json.loads(out.read_text())
        assert report["simulation"]["settings"]["hints"] == (0.0 if told else None)
        lost.append(report["targets"][0]["tokens"]["recomputed"])
    assert lost[1] < lost[0]
