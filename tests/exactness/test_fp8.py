"""8-bit weights: answers are those of transformers with the same rounding, in float64, whatever the cache did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pensieve.engine.worker.sizing import DTYPES
from pensieve.model.arch import DTYPE_BYTES
from support.engine.checkpoints import Family
from support.engine.exactness import Bench, run_all
from support.lengths import at_length


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding amplifies the noise of float32: a value near the middle of two codes takes either."""
    monkeypatch.setitem(DTYPES, "float64", torch.float64)
    monkeypatch.setitem(DTYPE_BYTES, "float64", 8)


@pytest.mark.parametrize("family", ["opt", "qwen3"])
def test_answers_equal_transformers(family: Family, tmp_path: Path) -> None:
    bench = Bench(family, tmp_path, dtype="float64", weights="fp8")
    run_all(bench, range(at_length(4, 60)))
    assert bench.oracle.tokens > 100
    assert bench.oracle.near_ties == 0
