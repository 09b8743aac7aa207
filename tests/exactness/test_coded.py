"""Rule one with keys and values in 8 bits: answers equal those of transformers with a cache that encodes and decodes
all that it gets, in float64, over every way of restoring a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.config import CacheConfig, KvDtypeName, SchedulerConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.cache import tails
from pensieve.engine.messages import Output, Submit
from pensieve.kernels import kv_codec
from pensieve.kernels.kv_codec import CODES
from support.engine.checkpoints import FAMILIES, LAYERED, Family
from support.engine.engine_driver import Clock, make_engine
from support.engine.exactness import EVERY_PATH, LIMIT, SPAN, Bench, run_all, run_schedule
from support.lengths import at_length
from support.model import recurrent_models
from support.ranks.rank_threads import RankBench

AnyFamily = Family | recurrent_models.Family
NEAR_TIE = 1e-6
"""transformers rounds norms and angles to float32 in any dtype."""
KV_DTYPES: tuple[KvDtypeName, ...] = ("fp8", "int8")
CASES: tuple[tuple[AnyFamily, KvDtypeName], ...] = at_length(
    (("llama3", "fp8"), ("opt", "int8")),
    tuple((family, kv_dtype) for family in FAMILIES for kv_dtype in KV_DTYPES),
)
TWO_GROUPS: tuple[tuple[AnyFamily, bool], ...] = at_length(
    (("gemma3_text", False), ("qwen3_next", True)),
    tuple(
        (family, elastic)
        for family in (*LAYERED, "qwen3_next", "bamba", "falcon_h1")
        for elastic in (False, True)
    ),
)
"""Family, and whether the device tier is elastic."""


def bench_of(family: AnyFamily, folder: Path, kv_dtype: KvDtypeName) -> Bench:
    return Bench(family, folder, dtype="float64", kv_dtype=kv_dtype, near_tie=NEAR_TIE)


def alone(bench: Bench, context: Sequence[int], count: int) -> list[int]:
    """The next tokens after a context that an engine gives to nothing else."""
    cache, scheduler = CacheConfig(32, 0, 16), SchedulerConfig(LIMIT, max_batch_tokens=512)
    engine = make_engine(cache, scheduler, bench.worker(cache, scheduler), Clock(), bench.vocabulary)
    sampling = Sampling(max_output_tokens=count, ignore_eos=True)
    engine.handle(Submit(1, "s", pack_tokens(context), len(context), sampling))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids if isinstance(event, Output) else ()
    return tokens


@pytest.mark.parametrize(("family", "kv_dtype"), CASES)
def test_answers_equal_transformers(family: AnyFamily, kv_dtype: KvDtypeName, tmp_path: Path) -> None:
    bench = bench_of(family, tmp_path, kv_dtype)
    bench.oracle.alone = lambda context, count: alone(bench, context, count)
    run_all(bench, range(at_length(0, 48)))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize(("family", "elastic"), TWO_GROUPS)
def test_two_groups_and_elastic_tiers(
    family: AnyFamily, elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    bench = bench_of(family, tmp_path, "fp8" if elastic else "int8")
    for seed in range(5_000, 5_000 + at_length(1, 60)):
        run_schedule(bench, seed, elastic=elastic)
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


def test_two_ranks(tmp_path: Path) -> None:
    bench = RankBench("qwen2", tmp_path, 2, dtype="float64", kv_dtype="fp8", near_tie=NEAR_TIE)
    for seed in EVERY_PATH[: at_length(1, 3)]:
        run_schedule(bench, seed)
    assert bench.oracle.tokens > 20


def _unquantised(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention that sees more than the codes: as if new keys were read before they are encoded."""
    return lambda *args: read(*args) * (1 + 2.0**-9)


def test_keys_that_are_not_what_the_codes_say_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of("llama3", tmp_path, "fp8")
    monkeypatch.setattr(kv_codec, "read", _unquantised(kv_codec.read))
    with pytest.raises(AssertionError, match="logit gap"):
        for seed in EVERY_PATH:
            run_schedule(bench, seed)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_another_codec_gives_other_answers(kv_dtype: KvDtypeName, tmp_path: Path) -> None:
    """The oracle can tell the codec from none, and one codec from the other."""
    bench = bench_of("llama3", tmp_path, kv_dtype)
    found: list[Any] = [bench.oracle.logprobs(range(5, 40))]
    for code in (*CODES.values(), None):
        if code != CODES[kv_dtype]:
            bench.oracle._code = code
            found.append(bench.oracle.logprobs(range(5, 40)))
    assert all((found[0] - other).abs().max() > 1e-3 for other in found[1:])
