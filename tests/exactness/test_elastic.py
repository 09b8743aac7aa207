"""Rule one while the device tier grows and shrinks: memory that is not backed ends the process, so none is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.engine.cache import tails
from support.engine.checkpoints import Family
from support.engine.exactness import SPAN, Bench, run_schedule
from support.lengths import at_length
from support.model import recurrent_models


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mamba2", "qwen3_next"])
def test_answers_equal_transformers_whatever_the_size(
    family: Family | recurrent_models.Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    bench = Bench(family, tmp_path)
    for seed in range(7_000, 7_000 + at_length(4, 100)):
        run_schedule(bench, seed, elastic=True)
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
