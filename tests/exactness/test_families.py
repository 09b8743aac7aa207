"""Rule one: whatever happened to the cache, the answer is what transformers gives on the whole history.

Each family has 6 random schedules of its own on a tiny random checkpoint in float32, and 192 in `make test-
long`: sessions and turns, tiers down to the minimum, chunks of 1, 8 and 32 tokens, all policies and off
switches, suspensions, cancels, edits, evictions. Most of the code is common to all families, so few
schedules are played twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve.engine.kv.pools import LayerTransfers
from support.engine.checkpoints import FAMILIES, Family
from support.engine.exactness import Bench, caught, run_all, run_schedule
from support.engine.mutants import PLAN_MUTANTS, MutantWorker, SwapOutLastWorker
from support.lengths import at_length

SCHEDULES = at_length(4, 48)
"""Random schedules per family and part."""


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Bench]:
    made: dict[Family, Bench] = {}

    def bench(family: Family) -> Bench:
        if family not in made:
            made[family] = Bench(family, tmp_path_factory.mktemp("models"))
        return made[family]

    return bench


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(at_length(1, 4)))
def test_answers_equal_transformers(family: Family, part: int, benches: Callable[[Family], Bench]) -> None:
    bench = benches(family)
    first = (part * len(FAMILIES) + FAMILIES.index(family)) * SCHEDULES
    run_all(bench, range(first, first + SCHEDULES))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_answers_of_experts_equal_transformers(family: Family, tmp_path: Path) -> None:
    """A few schedules: only the MLP differs from that of the families above."""
    bench = Bench(family, tmp_path)
    for seed in range(at_length(3, 48)):
        run_schedule(bench, seed)
    assert bench.oracle.tokens > 100
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize("name", PLAN_MUTANTS)
def test_broken_plans_are_caught(name: str, benches: Callable[[Family], Bench]) -> None:
    assert caught(benches("llama3"), lambda worker: MutantWorker(worker, PLAN_MUTANTS[name]))


def test_copy_order_swap_out_after_the_writes_is_caught(benches: Callable[[Family], Bench]) -> None:
    assert caught(benches("llama3"), SwapOutLastWorker)


def test_copy_order_swap_in_of_the_last_layer_missing_is_caught(
    benches: Callable[[Family], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of the last layer runs before that layer's copies have come."""
    original = LayerTransfers.wait
    last = benches("llama3").model.arch.num_layers - 1
    monkeypatch.setattr(
        LayerTransfers, "wait", lambda self, layer: None if layer == last else original(self, layer)
    )
    monkeypatch.setattr(LayerTransfers, "finish", lambda self: None)
    assert caught(benches("llama3"), lambda worker: worker)
