"""Rule one on several GPUs: whatever happened to the cache, the ranks together answer what transformers gives.

In float32 to the token, with graphs and without; in bfloat16 within what two batch shapes differ by on one GPU
(``test_cuda_exactness``). Each case is a program of its own, with a process per rank, as in service.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from pensieve.debug import child_environment
from support.engine.checkpoints import FAMILIES, Family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BF16_TOLERANCE = "1.0"
LIMIT_S = 300


def divided(*arguments: str) -> dict[str, Any]:
    """What ``support.ranks.divided`` found."""
    command = [sys.executable, "-P", "-m", "support.ranks.divided", "--device", "cuda", *arguments]
    environment = child_environment(failpoints=False)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("graphs", ["--graphs", "--no-graphs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_answers_equal_transformers(family: Family, graphs: str) -> None:
    found = divided("--family", family, graphs, "--schedules", "12")
    assert found["tokens"] > 200 and found["near_ties"] <= found["tokens"] / 500
    assert found["host"] and found["device"] + found["recomputed"], f"a path was never taken: {found}"


@pytest.mark.parametrize("shape", ["", "real"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_bfloat16_answers_are_as_good_as_the_best(family: Family, shape: str) -> None:
    divided("--family", family, "--shape", shape, "--dtype", "bfloat16", "--near-tie", BF16_TOLERANCE)


def test_sums_by_nccl_alone() -> None:
    divided("--family", "llama3", "--shape", "real", "--all-reduce", "nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_more_ranks_than_kv_heads() -> None:
    divided("--family", "qwen2", "--shape", "wide", "--ranks", "4")
