"""``bench/validate_simulation.py``: what it calls an error. A whole run: tests/simulate/test_validation.py."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pensieve.config import CacheConfig
from pensieve.engine.cost import CostModel
from pensieve.server.operations.recording import TraceHeader, TraceRow
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.turns.engine import TurnSimulation
from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("validate_simulation", monkeypatch)


def test_errors_are_relative_to_what_the_server_counted(bench: Any) -> None:
    server = {"context": 10_000, "gpu_cached": 4000, "swapped_in": 500, "recomputed": 99, "ttft_s": 0.1}
    found = bench.errors(
        server, {**server, "gpu_cached": 3800, "swapped_in": 530, "recomputed": 199, "ttft_s": 0.12}
    )
    # Less than one in a hundred was recomputed: the difference counts against the context.
    assert found == pytest.approx(
        {"gpu_cached": -0.05, "swapped_in": 0.06, "recomputed": 0.01, "ttft_s": 0.2}
    )


@pytest.mark.parametrize(
    ("name", "error", "good"),
    [
        ("gpu_cached", -0.05, True),
        ("swapped_in", 0.06, False),
        ("ttft_s", -0.15, True),
        ("ttft_s", 0.16, False),
    ],
)
def test_limits(bench: Any, name: str, error: float, good: bool) -> None:
    none = dict.fromkeys((*bench.SOURCES, "ttft_s"), 0.0)
    assert bench.within_limits({**none, name: error}) is good


def recording(files: Any, machine: Machine) -> None:
    """The files that a server would have left, had it been this machine."""
    told: dict[str, Any] = {
        "chunk_tokens": 32, "device_tokens": 1600, "host_tokens": 1600, "policy": "retention", "swap_watermark": 0.25,
        "decode_reserve": 0.1, "context_limit": 1600, "max_batch_tokens": 512, "max_running": 64,
    }  # fmt: skip
    rows = [
        TraceRow(f"s{n}", turn, 40, 20, n + 6.0 * turn, 40 + 60 * turn, 0, 0, 0, 0.0, 0.01, 0.5, "length", True)
        for turn in range(5) for n in range(20)
    ]  # fmt: skip
    lines = [msgspec.json.encode(row) for row in (TraceHeader("1", told), *rows)]
    files.trace.write_bytes(gzip.compress(b"\n".join(lines)))
    files.machine.write_bytes(msgspec.json.encode(machine))
    files.cost.write_text(
        '{"format": 1, "attention": [[32, 0.1], [64, 0.2]], "other_seconds": 1, "chunk_tokens": 32}'
    )


def test_simulates_what_the_header_says(bench: Any, tmp_path: Path) -> None:
    files, machine = bench.Files(tmp_path, "x"), Machine(overlapped=False)
    recording(files, machine)
    header, rows = bench.read_trace(files.trace)
    found = bench.simulated(files, header, "turns", machine)
    cache = CacheConfig(50, 50, 32)
    settings = Settings(machine, cache, CostModel.from_json(files.cost), 1600, 512, 64)
    tally = TurnSimulation(settings, "retention").run(Load(bench.load(files.trace).conversations))
    assert {name: found[name] for name in bench.SOURCES} == {
        name: tally.sources[name] for name in bench.SOURCES
    }
    assert min(found[name] for name in bench.SOURCES) > 0
    assert (len(rows), found["turns"]) == (100, 100)


def test_rescaled_is_as_slow_as_the_server_was(bench: Any, tmp_path: Path) -> None:
    files, machine = bench.Files(tmp_path, "x"), Machine(overlapped=False)
    recording(files, machine)
    header, _ = bench.read_trace(files.trace)
    twice = msgspec.structs.replace(machine, **{name: 2 * getattr(machine, name) for name in bench.TIMES})
    answering = bench.simulated(files, header, "turns", twice)["answering_s"]
    slower, factor = bench.rescaled(files, header, machine, answering)
    assert factor == pytest.approx(2.0, rel=0.02)
    assert slower.fixed_s == pytest.approx(2 * machine.fixed_s, rel=0.02)
