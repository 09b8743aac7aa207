"""Answers with drafts are those of transformers over the whole history, whatever the drafts are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pensieve.engine.worker.sizing import DTYPES
from pensieve.model.arch import DTYPE_BYTES
from support.engine.checkpoints import Family
from support.engine.exactness import EVERY_PATH, Bench, run_with_drafts
from support.lengths import at_length


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama3", "float32"), ("llama3", "float64"), ("opt", "float32")]
)
def test_answers_equal_transformers(
    family: Family, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DTYPES, "float64", torch.float64)  # type: ignore[misc]
    monkeypatch.setitem(DTYPE_BYTES, "float64", 8)  # type: ignore[misc]
    bench = Bench(family, tmp_path, dtype=dtype)
    totals = run_with_drafts(bench, (*EVERY_PATH[at_length(2, 0) :], *range(at_length(0, 40))))
    assert all(totals.values()), totals
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


def test_invariant_answers_equal_transformers(tmp_path: Path) -> None:
    """Chunks that drafts completed are compared when they are computed again."""
    bench = Bench("llama3", tmp_path, invariant=True)
    assert all(run_with_drafts(bench, EVERY_PATH[2:]).values())
