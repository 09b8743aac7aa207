"""``--invariant`` on a GPU: the bits of a history are the same, whatever the batch and the cache did.

Random schedules over tiny tiers, as in ``tests/exactness/test_invariant.py``, with pieces so short that contexts have
several, and graphs, steps planned ahead and both swap mechanisms. ``bench/invariance.py`` does the same on a model of
real size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness.test_invariant import play

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import RequestKey
from pensieve.engine.kv.recomputed import RestoreMismatch
from pensieve.engine.plan import PageCheck, Plan, Span
from pensieve.engine.worker import cuda_worker, invariance
from pensieve.engine.worker.cuda_worker import CudaWorker
from pensieve.kernels import kv_write
from support.engine.checkpoints import Family
from support.engine.exactness import Bench
from support.engine.pieces import logprobs_of_pieces
from support.ranks.divided import SHAPES

pytestmark = pytest.mark.gpu
FAMILIES: tuple[Family, ...] = ("opt", "llama3", "qwen3", "gemma2", "olmo3", "phi3")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_worker, "PIECE_KEYS", 64)
    # Some steps of tiny models are large ones, for which an ordinary head norm takes other programs.
    monkeypatch.setattr(kv_write, "LARGE_STEP_VALUES", 1 << 11)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_one_context_are_equal(family: Family, tmp_path: Path) -> None:
    """In one piece; in three, with its first chunks swapped out and in between; token by token."""
    first, *others = logprobs_of_pieces(Bench(family, tmp_path, "cuda", dtype="bfloat16", invariant=True))
    assert all(torch.equal(one, first) for one in others)


def test_a_changed_bit_of_a_chunk_that_is_computed_again_is_noticed(tmp_path: Path) -> None:
    bench = Bench("qwen3", tmp_path, "cuda", dtype="bfloat16", invariant=True)
    cache = CacheConfig(device_chunks=32, host_chunks=0, chunk_tokens=8)
    worker = bench.worker(cache, SchedulerConfig(context_limit=160, max_batch_tokens=128, max_running=4))
    assert isinstance(worker, CudaWorker)
    tokens, checks = np.arange(3, 67, dtype=np.int32), tuple(PageCheck(100 + page, page) for page in range(8))

    def step(start: int, end: int, checked: tuple[PageCheck, ...]) -> None:
        span = Span(RequestKey(1), start, tokens[start:end], 0)
        worker.run(Plan(1, (span,), (np.arange(8, dtype=np.int32),), checks=checked))

    step(0, 64, checks)
    step(0, 40, ())
    step(40, 64, checks)
    assert worker.computed.compared == 8
    worker.pools.attention(1)[5].view(torch.int16).view(-1)[3] ^= 1
    with pytest.raises(RestoreMismatch, match=r"device chunks \[5\] were computed again"):
        worker.run(Plan(2, checks=checks))
    worker.close()
