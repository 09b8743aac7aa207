"""The main-path promise with the device tier on a GPU: the same schedules, the same tokens, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.checkpoints import FAMILIES, Family
from support.exactness import Bench, run_schedule

pytestmark = pytest.mark.gpu
SCHEDULES = 25
"""Per family."""


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_transformers(family: Family, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(family, tmp_path, "cuda")
    paths = {"device": 0, "host": 0, "recomputed": 0}
    for seed in range(SCHEDULES):
        for turn in run_schedule(bench, seed).finished:
            assert turn.usage is not None
            assert turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
    assert all(paths.values()), f"a path was never taken: {paths}"
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
