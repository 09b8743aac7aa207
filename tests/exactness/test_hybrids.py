"""Rule one for models with two KV groups: answers equal transformers', with tiers that force every way of restoring
windows and states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve.engine.cache import tails
from support.engine.checkpoints import Family
from support.engine.exactness import SPAN, Bench, run_all
from support.lengths import at_length

HYBRIDS: tuple[Family, ...] = (
    "gemma2", "gemma3_text", "cohere2", "olmo3", "ministral", "exaone4", "smollm3", "phi3", "starcoder2",
)  # fmt: skip
"""Append: the position decides which random schedules a family gets."""
SCHEDULES = at_length(10, 200)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Bench]:
    made: dict[Family, Bench] = {}

    def bench(family: Family) -> Bench:
        if family not in made:
            made[family] = Bench(family, tmp_path_factory.mktemp("models"))
        return made[family]

    return bench


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_equal_transformers(
    family: Family, benches: Callable[[Family], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    bench = benches(family)
    first = 5_000 + HYBRIDS.index(family) * SCHEDULES
    run_all(bench, range(first, first + SCHEDULES))
    assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, "too many near ties to call this exact"
