"""The serving benchmark: its sessions, its arithmetic, and a whole run in front of an engine without a model."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pensieve.core import Usage
from pensieve.model.arch import load_arch
from pensieve.tokenizer import ChatTokenizer
from support.benches import BENCH, load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a program of bench/; all loaded in one test share their modules."""
    return lambda name: load_bench(name, monkeypatch)


def import_bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As the programs import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


def test_sessions_have_the_stated_statistics(bench: Any) -> None:
    found = bench("serving_load").sessions(24, 10, 1000, 0)
    turns = [turn for session in found for turn in session.turns]
    assert len(found) / 1000 == pytest.approx(24 / 5.56, rel=0.05)
    assert len(turns) / len(found) == pytest.approx(5.56, rel=0.05)
    assert np.mean([turn.input_tokens for turn in turns]) == pytest.approx(37.8, rel=0.1)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(204.6, rel=0.05)
    pauses = [turn.think_s for session in found for turn in session.turns[1:]]
    assert np.mean(pauses) == pytest.approx(10, rel=0.05)


def test_sessions_are_the_recorded_ones(bench: Any) -> None:
    """Figures are compared with a peer's on exactly these sessions: the order of the draws must not change."""
    load = bench("serving_load")
    found = load.sessions(60, 10, 75, 60)
    assert len(found) == 769
    first, second = found[:2]
    turns = [(turn.input_tokens, turn.output_tokens, turn.think_s) for turn in first.turns]
    assert (first.start_s, turns[:2]) == (0.0736, [(4, 53, 0.0), (65, 381, 31.968)])
    assert (second.start_s, len(second.turns)) == (0.132, 5)
    assert sum(turn.output_tokens for session in found for turn in session.turns) == 850910
    assert all(session.turns[0].think_s == 0 for session in found)


def test_sessions_fit_the_context(bench: Any) -> None:
    found = bench("serving_load").sessions(200, 10, 100, 7, 1500)
    sizes = [sum(t.input_tokens + t.output_tokens for t in session.turns) for session in found]
    assert 1400 < max(sizes) <= 1492


def test_a_turn_counts_when_it_completes_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    client = import_bench("serving_client", monkeypatch)
    run = import_bench("serving_run", monkeypatch)
    report = import_bench("serving_report", monkeypatch)

    def turn(index: int, sent: float, first: float, done: float, tokens: int) -> Any:
        usage = Usage(context_tokens=10, new_tokens=4, gpu_cached_tokens=6, output_tokens=tokens)
        return client.TurnTimes(0, index, sent - 0.001, sent, first, done, tokens, usage)

    early, cold, warm = turn(0, 0, 1, 9.9, 10), turn(0, 9, 9.5, 11, 10), turn(1, 12, 12.1, 13, 20)
    arrivals = np.array([(9.9, 1, 0.1), (10.5, 1, math.nan), (11.0, 2, 0.5), (12.1, 1, math.nan)])
    one = client.Result(turns=[early, cold], arrivals=arrivals, unfinished=2)
    other = client.Result(turns=[warm], arrivals=np.empty((0, 3)))
    other.failures["SERVER_OVERLOADED"] += 3
    summary = report.summarise(5, [], run.Protocol(20, 10, 2), run.Seen((one, other), {}))
    assert summary["turns"] == {"in_window": 2, "completed": 3, "failed": 3, "unfinished": 2}
    assert summary["failures"] == {"SERVER_OVERLOADED": 3}
    assert summary["turns_per_s"] == pytest.approx(0.2)
    assert summary["output_tokens_per_s"] == pytest.approx(3.0)
    assert summary["streamed_tokens_per_s"] == pytest.approx(0.4)
    assert summary["normalised_latency_s"]["mean"] == pytest.approx((2 / 10 + 1 / 20) / 2)
    assert summary["ttft_s"]["cold"]["mean"] == pytest.approx(0.5)
    assert summary["ttft_s"]["warm"]["mean"] == pytest.approx(0.1)
    assert summary["inter_token_s"]["count"] == 2 and summary["inter_token_s"]["max"] == pytest.approx(0.25)
    assert summary["client"]["lag_s"]["max"] == pytest.approx(0.001)
    assert summary["receipts"] == {
        "context": 20, "gpu_cached": 12, "swapped_in": 0, "recomputed": 0, "new": 8, "violations": 0
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["llama-2-13b-gqa10", "llama-3-8b", "opt-13b"])
def test_dummy_models_can_be_served(bench: Any, tmp_path: Path, shape: str) -> None:
    folder = bench("dummy_model").make(shape, tmp_path / shape)
    arch, tokenizer = load_arch(folder), ChatTokenizer.from_folder(folder)
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert tokenizer.vocab_size == arch.vocab_size > len(known)
    kv_heads = {"llama-2-13b-gqa10": 10, "llama-3-8b": 8, "opt-13b": 40}[shape]
    assert (arch.num_kv_heads, arch.head_dim) == (kv_heads, 128)


def test_ids_that_the_tokenizer_does_not_know_have_no_text(bench: Any, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(bench("dummy_model").make("llama-2-13b-gqa10", tmp_path))
    stream = tokenizer.detokenizer()
    draw = np.random.default_rng(0)
    text = "".join(stream.push((int(token),)) for token in draw.integers(0, 32000, 5000)) + stream.finish()
    assert tokenizer.decode([31999, 20000]) == ""
    assert 0 < len(text) < 20000 and not stream.pending


class PumpServer:
    """Stands in for ``ServerProcess``: the real server in front of the pump. ``dies_after_s`` of its first load."""

    dies_after_s = 0.0

    def __init__(self, pump_server: Any, *arguments: str) -> None:
        self._stack = ExitStack()
        self._pid, self.target, self.admin = self._stack.enter_context(pump_server(2.0, *arguments))
        if self.dies_after_s:
            threading.Timer(self.dies_after_s, os.kill, (self._pid, signal.SIGKILL)).start()
        self.running = not self.dies_after_s

    def stop(self) -> int:
        self._stack.close()
        return 0


def serve_pump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str, dies_after_s: float = 0.0
) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and page of ``bench/serving.py``."""
    serving = import_bench("serving", monkeypatch)
    pump_server = import_bench("serving_frontend", monkeypatch).pump_server
    monkeypatch.setattr(PumpServer, "dies_after_s", dies_after_s)
    monkeypatch.setattr(serving, "ServerProcess", lambda *a, start_timeout_s: PumpServer(pump_server, *a))
    monkeypatch.setattr(serving, "SETTLE_S", 0.1)
    arguments = ["--seconds", "2", "--window", "1.5", "--think-time", "0.1", "--clients", "2", *options]
    done = CliRunner().invoke(serving.main, [*arguments, "--results", str(tmp_path)], catch_exceptions=False)
    page = (tmp_path / "serving.md").read_text(encoding="utf-8")
    return done.exit_code, json.loads((tmp_path / "serving.json").read_text(encoding="utf-8")), page


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, report, page = serve_pump(monkeypatch, tmp_path, "--rate", "30", "--rate", "10")
    assert status == 0 and report["problems"] == []
    assert [run["rate"] for run in report["runs"]] == [30, 10]
    assert [run["failures"] for run in report["runs"]] == [{}, {}]
    run = report["runs"][0]
    assert run["turns"]["in_window"] > 0
    tokens = run["output_tokens_per_s"] * report["protocol"]["window_s"]
    counted = run["server"]["counters"]["pensieve_output_tokens_total"]
    assert tokens <= run["turns"]["completed"] * 1000 and counted > 0
    assert run["ttft_s"]["all"]["count"] == run["turns"]["in_window"]
    assert "/tmp" not in json.dumps(report) and "| 30 |" in page and "## Offered 10" in page


def test_failures_are_counted_by_reason_when_the_server_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, report, _ = serve_pump(monkeypatch, tmp_path, "--rate", "100", dies_after_s=5.0)
    (run,) = report["runs"]
    assert status == 1
    assert run["turns"]["failed"] > 0 and set(run["failures"]) == {"TRANSPORT"}
    assert any("the server died" in problem for problem in report["problems"])
    assert any("metrics could not be read" in problem for problem in report["problems"])
