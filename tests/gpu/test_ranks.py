"""Rule one on several GPUs: whatever happened to the cache, the ranks together answer what transformers gives.

In float32 to the token, with graphs and without; in bfloat16 about as far from it as one GPU. Each case is a program of
its own, with a process per rank, as in service.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.debug import child_environment
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.ranks.lives import live_and_die_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ANY_GAP = "100"
LIMIT_S = 300


def divided(*arguments: str) -> dict[str, Any]:
    """What ``support.ranks.divided`` found."""
    return program("divided", "--device", "cuda", *arguments)


def program(name: str, *arguments: str) -> dict[str, Any]:
    """What a program of ``support.ranks`` prints last."""
    command = [sys.executable, "-P", "-m", f"support.ranks.{name}", *arguments]
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


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
@pytest.mark.parametrize("graphs", ["--graphs", "--no-graphs"])
def test_bits_of_invariant_steps_do_not_depend_on_the_step(graphs: str, all_reduce: str) -> None:
    found = divided(
        "--family", "llama3", "--shape", "real", "--dtype", "bfloat16", "--invariant", "--schedules", "12", graphs,
        "--all-reduce", all_reduce,
    )  # fmt: skip
    assert found["compared"] > 10_000
    assert found["host"] and found["device"] + found["recomputed"], f"a path was never taken: {found}"


@pytest.mark.parametrize("shape", ["", "real"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_bfloat16_answers_are_about_as_good_as_of_one_gpu(family: Family, shape: str) -> None:
    """Each rank rounds its part of a sum, so a little more is lost. (Seen for llama3: the largest gap to the best logit
    1.07 where one GPU has 0.87, with the heads of real models 0.40 and 0.31; 1.1 to 1.3 times as many tokens.)"""
    one, two = (
        divided(
            *("--family", family, "--shape", shape, "--schedules", "12", "--ranks", ranks),
            *("--dtype", "bfloat16", "--near-tie", ANY_GAP),
        )
        for ranks in ("1", "2")
    )
    assert two["largest_gap"] < 2 * max(one["largest_gap"], 0.2), (one, two)
    assert two["near_ties"] / two["tokens"] < 1.5 * one["near_ties"] / one["tokens"], (one, two)


def test_sums_of_any_size() -> None:
    ways = program("sums")
    assert min(ways[kind] for kind in ("FusedBuffer", "ExchangeBuffer", "NoneType")) > 5, ways
    assert set(program("sums", "--no-symmetric")) == {"NoneType"}


def test_sums_by_nccl_alone() -> None:
    divided("--family", "llama3", "--shape", "real", "--all-reduce", "nccl")


def test_ranks_live_and_die_together(tmp_path: Path) -> None:
    """Nothing of a dead engine stays on the GPUs."""
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    asyncio.run(live_and_die_together(tiny_checkpoint("llama3", tmp_path, vocab_size=163), "cuda"))
    for index, before in enumerate(free):
        assert torch.cuda.mem_get_info(index)[0] > before - (64 << 20), f"GPU {index}"


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_more_ranks_than_kv_heads() -> None:
    divided("--family", "qwen2", "--shape", "wide", "--ranks", "4")
