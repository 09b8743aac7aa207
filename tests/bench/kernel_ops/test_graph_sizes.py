"""Steps by the size of their graph: which steps are timed, and in which graphs. The whole program runs with
PENSIEVE_LONG_TESTS=1, on a tiny shape without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.kernels.attention.kinds import StepKind
from support.lengths import LONG
from support.replay.benches import BENCH, load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("kernel_ops/graph_sizes", monkeypatch)


@pytest.mark.parametrize(
    ("kind", "tokens", "graph"),
    [
        (StepKind.NARROW, 56, 56),
        (StepKind.NARROW, 67, 72),
        (StepKind.FEW, 94, 96),
        (StepKind.MIXED, 200, 224),
    ],
)
def test_the_graph_that_the_worker_takes(bench: Any, kind: StepKind, tokens: int, graph: int) -> None:
    assert bench.own_size(kind, tokens) == graph


def test_steps_as_served_share_no_page(bench: Any) -> None:
    few, many = (SimpleNamespace(pages=pages) for pages in (200, 8192))
    for steps in (few, many):
        batch = bench.served(steps, 40, 38)
        assert len(batch.tokens) == 40 + 38
        assert len(set(batch.pages)) == len(batch.pages) <= steps.pages
    contexts = batch.spans[:-1, 2] + batch.spans[:-1, 1]
    assert contexts.max() > 3 * contexts.mean() > 3 * 700, "not as different as on a server"
    again = bench.served(many, 40, 38)
    assert (again.pages == batch.pages).all()


@pytest.mark.timeout(500)
@pytest.mark.skipif(not LONG, reason="takes minutes: set PENSIEVE_LONG_TESTS=1")
def test_the_whole_program_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, which finds TRITON_INTERPRET before it imports a kernel."""
    program = (
        "from kernel_ops import graph_sizes as bench\n"
        "bench.ROUND, bench.SERVED = (4,), ((1, 0), (1, 2))\n"
        "bench.main()"
    )
    words = [
        "--device",
        "cpu",
        "--shape",
        "tiny-llama-gqa1",
        "--context",
        "64",
        "--rounds",
        "1",
        "--size",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--out", str(tmp_path)],
        cwd=BENCH, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "graph_sizes.json").read_text())["sections"]
    assert [row["graph"] for row in sections["decodes alone"]] == [2]
    assert [row["tokens"] for row in sections["as served"]] == [1, 3]
    assert "## as served, parts" in (tmp_path / "graph_sizes.md").read_text()
