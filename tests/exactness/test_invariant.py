"""``--invariant``: logits, keys and values of a history have the same bits, whatever the batch and the cache did.

Random schedules over tiny tiers, as in ``test_families``: chunks of any length, tiers down to the minimum, forks,
candidates, edits, evictions and suspensions. Then each context again, alone, in one step and with nothing cached.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.config import CacheConfig, KvDtypeName, SchedulerConfig
from pensieve.debug import child_environment
from pensieve.engine.kv.recomputed import RestoreMismatch
from pensieve.kernels import reference
from pensieve.model.groups import kv_groups
from support.engine.bits import Bits, BitWorker, alone, norm_by_size
from support.engine.checkpoints import FAMILIES, LAYERED, WITH_EXPERTS, Family
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.exactness import LIMIT, Bench, random_setup, with_groups
from support.lengths import LONG, at_length, some
from support.ranks.rank_threads import RankBench

SCHEDULES = at_length(2, 30)
STATELESS = CacheConfig(device_chunks=LIMIT // 8, host_chunks=0, chunk_tokens=8)


MOST = at_length(40, 200)
"""Most schedules in which every path must have been taken."""


def play(bench: Bench, first: int, least: int, without: Sequence[str] = ()) -> int:
    """Play schedules from seed ``first`` on, at least ``least`` of them and until every path was taken, but for those
    in ``without``, comparing all bits; return how many values were compared."""
    two_groups = len(kv_groups(bench.cached_arch, STATELESS.chunk_tokens, bench.dtype)) > 1
    # Schedules of windows seldom restore from the host: the short run does not wait for one.
    needed = ["device", "recomputed", "suspended", *(() if two_groups and not LONG else ("host",))]
    needed = [path for path in needed if path not in without]
    paths, bits = Counter(dict.fromkeys(needed, 0)), Bits()
    contexts = set[tuple[int, ...]]()

    def note(context: Sequence[int], output: Sequence[int], seed: int = 0) -> None:
        contexts.add((*context, *output[:-1]))

    for seed in range(first, first + MOST):
        if seed >= first + least and all(paths[name] for name in needed):
            break
        rng, clock = random.Random(seed), Clock()
        cache, scheduler = random_setup(rng)
        cache = replace(with_groups(bench, cache, rng), check_recomputed=bench.invariant)
        worker = BitWorker(bench.worker(cache, scheduler), cache, bits)
        engine = make_engine(cache, scheduler, worker, clock, bench.vocabulary, overlapped=seed % 2 == 1)
        driver = Driver(engine, clock, rng, note, bench.vocabulary, min(LIMIT, engine._ready.context_limit))
        for _ in range(14):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_until_idle()
        paths["suspended"] += engine.stats().suspensions_total
        engine.close()
        for turn in driver.finished:
            assert turn.usage is not None
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
    checked = BitWorker(bench.worker(STATELESS, SchedulerConfig(LIMIT)), STATELESS, bits)
    alone(checked, STATELESS.chunk_tokens, sorted(contexts), cache.groups if len(cache.groups) > 1 else ())
    checked.close()
    assert all(paths[name] for name in needed), f"a path was never taken: {paths}"
    return bits.compared


EVERY: tuple[Family, ...] = (*FAMILIES, *LAYERED, *WITH_EXPERTS)
CASES = [
    (family, dtype, 1000 * (2 * index + number) if LONG else 7)
    for index, family in enumerate(EVERY)
    for number, dtype in enumerate(("float32", "bfloat16"))
]
"""Family, dtype, and the seed of the first schedule. From 7 on, few schedules take every path."""


@pytest.mark.parametrize(("family", "dtype", "first"), some(CASES, 5))
def test_bits_do_not_depend_on_the_step(family: Family, dtype: str, first: int, tmp_path: Path) -> None:
    bench = Bench(family, tmp_path, dtype=dtype, invariant=True)
    assert play(bench, first, SCHEDULES) > 2_000


@pytest.mark.parametrize("kv_dtype", at_length(("int8",), ("fp8", "int8")))
def test_bits_of_codes_do_not_depend_on_the_step(kv_dtype: KvDtypeName, tmp_path: Path) -> None:
    bench = Bench("qwen3", tmp_path, dtype="bfloat16", invariant=True, kv_dtype=kv_dtype)
    assert play(bench, 7, SCHEDULES) > 2_000


WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 163}
"""For four ranks: each KV head lies on two of them, and the vocabulary does not divide."""
DIVIDED = [(2, "float32"), (4, "bfloat16"), *at_length([], [(2, "bfloat16"), (4, "float32")])]
SEED = 6
"""It and the next seed make short schedules that together take every path; it alone two of them."""


@pytest.mark.parametrize(("ranks", "dtype"), DIVIDED)
def test_bits_of_several_ranks_do_not_depend_on_the_step(ranks: int, dtype: str, tmp_path: Path) -> None:
    bench = RankBench("qwen2", tmp_path, ranks, dtype=dtype, invariant=True, **WIDE)
    # Four ranks in one process take three times as long as two, which take the other paths.
    short = ranks == 4 and not LONG
    compared = play(bench, SEED, 1, ("host", "suspended")) if short else play(bench, SEED, at_length(2, 20))
    assert compared > 10_000


@pytest.mark.skipif(not LONG, reason="starts fourteen processes: PENSIEVE_LONG_TESTS=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_ranks_in_processes_of_their_own(ranks: int, dtype: str) -> None:
    command = [sys.executable, "-P", "-m", "support.ranks.divided", "--family", "qwen2", "--shape", "wide"]
    command += ["--ranks", str(ranks), "--dtype", dtype, "--schedules", "8", "--invariant"]
    environment = child_environment(failpoints=False)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compared"] > 10_000
    assert all(found[path] for path in ("device", "host", "recomputed", "suspended")), found


def test_a_head_norm_by_size_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "norm", norm_by_size(reference.norm))
    # Either by the bits of a step, or by those of a chunk that is computed again.
    with pytest.raises((AssertionError, RestoreMismatch), match="differ"):
        play(Bench("qwen3", tmp_path, invariant=True), 2, 1)


def test_a_rank_sum_in_another_order_is_noticed(tmp_path: Path) -> None:
    bench = RankBench("qwen2", tmp_path, 4, dtype="float32", invariant=True, **WIDE)
    bench.ordered = False
    with pytest.raises(AssertionError, match="differ in their bits"):
        play(bench, SEED, 2)
