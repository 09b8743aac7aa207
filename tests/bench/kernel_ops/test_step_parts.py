"""The parts of a decode step: what of a timeline falls to whom, what a report says when ways do not agree. The whole
program runs with PENSIEVE_LONG_TESTS=1, on a tiny shape without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch.autograd.profiler_util import FunctionEvent

from support.lengths import LONG
from support.replay.benches import load_bench
from support.sources import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("kernel_ops/step_parts", monkeypatch)


@pytest.fixture
def kernel_times(bench: Any) -> Any:
    from kernel_ops import kernel_times

    return kernel_times


def test_waiting_for_the_launch_before_is_nobodys_time_alone(kernel_times: Any) -> None:
    timeline = [
        ("_attend", 0, 100), ("_merge", 10, 110), ("nvjet_sm90_tst_128x64_splitK_TNT", 115, 150),
        ("void cublasLt::splitKreduce_kernel<32>", 150, 160), ("_norm_rows", 161, 165), ("_upload", 165, 166),
    ]  # fmt: skip
    found = kernel_times.shares([kernel_times.Kernel(*one) for one in reversed(timeline)], 1)
    assert {part: (share.ms * 1e3, round(share.alone_ms * 1e3)) for part, share in found.items()} == {
        "attention": (100, 100), "merge": (100, 10), "products": (35, 35), "split-K sum": (10, 10), "norm": (4, 4),
        "rest": (1, 1), "nothing": (0, 6),
    }  # fmt: skip
    assert sum(share.alone_ms for share in found.values()) == pytest.approx(0.166)
    twice = kernel_times.shares([kernel_times.Kernel("_merge", 0, 4), kernel_times.Kernel("_merge", 6, 8)], 2)
    assert twice["merge"].launches == 1 and twice["merge"].ms == 0.003


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_attend", "attention"), ("attend_hopper", "attention"), ("_sum_norm_rows", "norm"),
        ("_prepare_and_store", "KV write"), ("_activate", "activation"), ("elementwise_kernel", "rest"),
    ],
)  # fmt: skip
def test_kernels_by_their_names(kernel_times: Any, name: str, part: str) -> None:
    assert kernel_times.Kernel(name, 0, 1).part == part


def test_the_profiler_is_asked_for_kernels(kernel_times: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        FunctionEvent(1, "_attend", 0, 5.0, 9.5, device_type=cuda),
        FunctionEvent(2, "Memcpy DtoD", 0, 1, 2, device_type=cuda),
        FunctionEvent(3, "cudaGraphLaunch", 0, 1, 2, device_type=cpu),
    ]  # fmt: skip
    profiler = mock.MagicMock()
    profiler.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert kernel_times.profiled(lambda: None, 3) == [kernel_times.Kernel("_attend", 5.0, 9.5)]


class StandIn:
    """Steps that take no time; one way answers a little differently."""

    on_gpu = True

    def __init__(self, off: float, other: Any, impossible: Any) -> None:
        self.off, self.other, self.impossible = off, other, impossible

    def made(self, way: Any, size: int) -> Any:
        if way is self.impossible:
            raise RuntimeError("no cuBLASLt in this build\nand more")
        return way

    def answers(self, way: Any, size: int) -> torch.Tensor:
        return torch.ones(size, 4) + (self.off if way is self.other else 0.0)

    def merges(self, size: int) -> int:
        return 3

    def least_bytes(self, batch: int) -> int:
        return batch

    def timed(self, made: dict[str, Any], rounds: int, steps: int) -> dict[str, float]:
        return {name: 2.0 if name == "now" else 1.0 for name in made}


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_ways_that_differ_end_the_program(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: float
) -> None:
    monkeypatch.setattr(bench, "profiled", lambda run, steps: [])
    steps = StandIn(off, bench.WAYS["cuBLAS"], bench.WAYS["cuBLASLt"])
    monkeypatch.setattr(bench, "Steps", lambda *given: steps)
    monkeypatch.setattr(bench.products, "rows", lambda *given: [])
    done = CliRunner().invoke(bench.main, ["--out", str(tmp_path), "--batch", "64"])
    assert done.exit_code == (1 if off else 0), done.output
    sections = json.loads((tmp_path / "step_parts.json").read_text())["sections"]
    assert [row["way"] for row in sections["not possible"]] == ["cuBLASLt"]
    assert "and more" not in sections["not possible"][0]["error"]
    assert {row["way"]: row["÷ now"] for row in sections["step"]}["cuBLAS"] == 0.5
    assert "| 64 | cuBLAS | 1.0 | 0.5 |" in (tmp_path / "step_parts.md").read_text()


def test_the_noise_is_what_two_sizes_differ_by(bench: Any) -> None:
    class OfTwoSizes(StandIn):
        def answers(self, way: Any, size: int) -> torch.Tensor:
            return torch.ones(size, 4) + (0.25 if size == 64 else 0.0)

    steps = OfTwoSizes(0.0, None, None)
    assert bench.noise_of(steps, (8, 1)) == bench.LEAST_NOISE
    assert bench.noise_of(steps, (8, 64)) == pytest.approx(0.25)


@pytest.mark.timeout(500)
@pytest.mark.skipif(not LONG, reason="takes a minute: set PENSIEVE_LONG_TESTS=1")
def test_the_whole_program_without_a_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "bench/kernel_ops/step_parts.py",
        "--device",
        "cpu",
        "--shape",
        "tiny-llama-gqa1",
    ]
    done = subprocess.run(
        [*command, "--batch", "1", "--context", "1000", "--rounds", "1", "--out", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "step_parts.json").read_text())["sections"]
    assert {row["way"] for row in report["agreement"]} == {"torch's row"}
    assert all(row["as it must be"] and row["merges"] for row in report["agreement"])
    assert len(report["products"]) == 4
