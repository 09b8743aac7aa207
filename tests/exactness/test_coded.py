"""Rule one with keys and values in 8 bits: answers equal those of transformers with a cache that encodes and decodes
all that it gets, in float64, over every way of restoring a context."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.config import KvDtypeName
from pensieve.engine.cache import tails
from support.engine.checkpoints import FAMILIES, Family
from support.engine.exactness import SPAN, Bench, caught, run_all, run_schedule
from support.lengths import at_length
from support.model import recurrent_models

NEAR_TIE = 1e-6
"""transformers rounds norms and angles to float32 in any dtype."""
KV_DTYPES: tuple[KvDtypeName, ...] = ("fp8", "int8")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", at_length(("llama3", "opt"), FAMILIES))
def test_answers_equal_transformers(family: Family, kv_dtype: KvDtypeName, tmp_path: Path) -> None:
    bench = Bench(family, tmp_path, dtype="float64", kv_dtype=kv_dtype, near_tie=NEAR_TIE)
    run_all(bench, range(at_length(1, 48)))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
