"""Rule one, divided: whatever happened to the cache, the ranks together answer what transformers gives.

The schedules are those of one rank (``tests/exactness``): restores from the host, recomputation, suspensions,
evictions, sharing, steps planned ahead. Every rank plays its part or the answers are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pensieve.engine.cache import tails
from pensieve.engine.plan import PendingStep, Plan, StepWorker
from support.engine.checkpoints import FAMILIES
from support.engine.exactness import EVERY_PATH, SPAN, paths_of, run_all, run_schedule, run_with_drafts
from support.engine.mutants import PLAN_MUTANTS, MutantWorker
from support.engine.structured_exactness import run_structured
from support.lengths import at_length
from support.ranks.rank_threads import RankBench

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 163}
"""For four ranks: each KV head lies on two of them, and the vocabulary does not divide."""


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankBench]:
    family, ranks, shape = request.param
    made = RankBench(family, tmp_path_factory.getbasetemp(), ranks, **shape)
    yield made
    made.close()


@pytest.mark.parametrize("bench", [("llama3", 2, {}), ("qwen2", 4, WIDE)], indirect=True, ids=str)
def test_answers_equal_transformers(bench: RankBench) -> None:
    run_all(bench)
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize(
    "bench", [(family, 2, {}) for family in FAMILIES if family != "llama3"], indirect=True, ids=str
)
def test_each_family_is_divided(bench: RankBench) -> None:
    """Families differ in their weights, not in the paths of a schedule."""
    paths = paths_of(bench, EVERY_PATH[: at_length(1, 3)])
    assert paths["device"] and bench.oracle.tokens > 100
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize(
    "bench",
    [
        ("gemma3_text", 2, {"num_key_value_heads": 2}),
        *((family, 2, {}) for family in ("qwen3_5_text", "mamba2", "gpt_oss")),
    ],
    indirect=True,
    ids=str,
)
def test_hybrid_models_equal_transformers(bench: RankBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    paths = paths_of(bench, range(3))
    assert paths["device"] and paths["recomputed"], paths
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize(
    "bench",
    [("llama3", 2, {}), ("gemma3_text", 2, {"num_key_value_heads": 2}), ("qwen3_5_text", 2, {})],
    indirect=True,
    ids=str,
)
def test_ranks_change_their_size_together(bench: RankBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    for seed in EVERY_PATH[: at_length(2, 3)]:
        run_schedule(bench, seed, elastic=True)
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"


@pytest.mark.parametrize("bench", [("llama3", 2, {})], indirect=True, ids=str)
def test_ranks_choose_alike_under_grammars(bench: RankBench) -> None:
    run_structured(bench, random.Random(1))


@pytest.mark.parametrize("bench", [("llama3", 2, {})], indirect=True, ids=str)
def test_ranks_follow_drafts(bench: RankBench) -> None:
    assert all(run_with_drafts(bench, EVERY_PATH[2:]).values())


def stale_page_table(plan: Plan) -> Plan:
    """The first page of each context is still where it was before."""
    return replace(plan, page_tables=tuple((table + (table[0] == table)) for table in plan.page_tables))


def other_order(plan: Plan) -> Plan:
    """The spans of a step are computed in another order."""
    return replace(plan, spans=plan.spans[::-1])


RANK_MUTANTS: dict[str, Callable[[Plan], Plan]] = {
    name: PLAN_MUTANTS[name] for name in ("swap-in: not copied", "swap-out: not copied")
} | {
    "page table: stale": stale_page_table,
    "spans: in another order": other_order,
}


class LaggingWorker:
    """Executes each plan one step late: the ranks disagree on the order of plans."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._before: Plan | None = None

    def launch(self, plan: Plan) -> PendingStep:
        late, self._before = self._before, plan
        return self._worker.launch(late or plan)

    def close(self) -> None:
        self._worker.close()


def noticed(bench: RankBench) -> bool:
    """Whether some schedule gives a wrong answer, or finds the ranks in different places."""
    for seed in EVERY_PATH:
        try:
            run_schedule(bench, seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("bench", [("llama3", 2, {})], indirect=True, ids=str)
def test_a_rank_that_does_something_else_is_noticed(bench: RankBench) -> None:
    for name, mutant in RANK_MUTANTS.items():
        bench.mutants = {1: lambda worker, mutant=mutant: MutantWorker(worker, mutant)}  # type: ignore[misc]
        assert noticed(bench), name
    bench.mutants = {1: LaggingWorker}
    assert noticed(bench), "plans in another order"
