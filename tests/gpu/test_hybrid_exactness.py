"""Models with two KV groups on a GPU, end to end: windows and states in small tiers, and transformers' answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from pensieve.engine.cache import tails
from support.engine.checkpoints import Family
from support.engine.exactness import SPAN, Bench, paths_of
from support.model import recurrent_models

pytestmark = pytest.mark.gpu
WINDOWS: tuple[Family, ...] = ("gemma2", "gemma3_text", "olmo3", "phi3", "gpt_oss")
SCHEDULES = 12


@pytest.mark.parametrize("family", (*WINDOWS, *recurrent_models.FAMILIES))
def test_answers_equal_transformers(
    family: Family | recurrent_models.Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    bench = Bench(family, tmp_path, "cuda")
    paths: Counter[str] = paths_of(bench, range(7_000, 7_000 + SCHEDULES))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
    assert paths["device"] and paths["recomputed"], paths
