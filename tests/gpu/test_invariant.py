"""``--invariant`` on a GPU: the bits of a history are the same, whatever the batch and the cache did.

Random schedules over tiny tiers, as in ``tests/exactness/test_invariant.py``, with pieces so short that contexts have
several, and graphs, steps planned ahead and both swap mechanisms. ``bench/invariance.py`` does the same on a model of
real size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness.test_invariant import play

from pensieve.engine.worker import cuda_worker, invariance
from support.engine.checkpoints import Family
from support.engine.exactness import Bench
from support.ranks.divided import SHAPES

pytestmark = pytest.mark.gpu
FAMILIES: tuple[Family, ...] = ("opt", "llama3", "qwen3", "gemma2", "olmo3", "phi3")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_worker, "PIECE_KEYS", 64)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.preferred_blas_library()
    invariance.use_plain_products()
    yield
    matmul.allow_bf16_reduced_precision_reduction = before[0]
    torch.backends.cuda.preferred_blas_library(before[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_step(family: Family, dtype: str, tmp_path: Path) -> None:
    bench = Bench(family, tmp_path, "cuda", dtype=dtype, invariant=True)
    assert play(bench, 9_000, 6) > 10_000


def test_bits_of_real_heads_do_not_depend_on_the_step(tmp_path: Path) -> None:
    bench = Bench("llama3", tmp_path, "cuda", dtype="bfloat16", invariant=True, **SHAPES["real"])
    invariance.check(bench.model, 512)
    assert play(bench, 9_100, 8) > 10_000


def test_ordinary_steps_are_caught(tmp_path: Path) -> None:
    """The comparison itself: without the mode, bits do depend on the step."""
    bench = Bench("llama3", tmp_path, "cuda", dtype="bfloat16", **SHAPES["real"])
    with pytest.raises(AssertionError, match="differ in their bits"):
        play(bench, 9_100, 8)
