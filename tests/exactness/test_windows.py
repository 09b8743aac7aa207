"""Models whose layers have windows, softcaps or both give the answers of transformers on the whole history."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine.checkpoints import Family
from support.engine.exactness import Bench, run_all
from support.lengths import at_length

FIRST = 12
"""From this seed on, ten schedules take every path."""


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3"])
def test_answers_equal_transformers(family: Family, tmp_path: Path) -> None:
    """Windows beside full layers with a softcap, the same with other frequencies, and windows alone."""
    bench = Bench(family, tmp_path)
    run_all(bench, range(FIRST, FIRST + at_length(10, 100)))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
