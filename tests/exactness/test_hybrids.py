"""Rule one for models with two KV groups: answers equal transformers', with tiers that force every way of restoring
windows and states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pensieve.engine.cache import tails
from support.engine.checkpoints import Family
from support.engine.exactness import SPAN, Bench, paths_of
from support.lengths import at_length
from support.model import recurrent_models

KINDS: dict[str, tuple[Family | recurrent_models.Family, ...]] = {
    "windows beside full layers": (
        "gemma2", "gemma3", "gemma3_text", "cohere2", "olmo3", "ministral", "exaone4", "smollm3", "gpt_oss",
    ),
    "windows alone": ("phi3", "starcoder2"),
    "states beside full layers": ("bamba", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_next_experts"),
    "states alone": ("mamba2",),
}  # fmt: skip
"""Append: the position decides which random schedules a family gets."""
SCHEDULES = at_length(1, 200)
"""Schedules that each family plays."""
PART = at_length(SCHEDULES, 25)
"""Schedules that one test plays."""
MORE = 40
"""Schedules at most that the last family of a test plays on top, until every path was taken."""
Case = tuple[str, tuple[Family | recurrent_models.Family, ...], int]
CASES: list[Case] = [
    (kind, played, first)
    for kind, families in KINDS.items()
    for played in at_length([families], [(one,) for one in families])
    for first in range(
        5_000 + families.index(played[0]) * SCHEDULES,
        5_000 + (families.index(played[0]) + 1) * SCHEDULES,
        PART,
    )
]
"""Kind, families, and the seed of the first schedule. In the short form one test plays all families of a kind."""


@pytest.mark.parametrize(
    ("kind", "families", "first"), CASES, ids=lambda part: part if isinstance(part, str) else None
)
def test_answers_equal_transformers(
    kind: str,
    families: tuple[Family | recurrent_models.Family, ...],
    first: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    paths: Counter[str] = Counter()
    needed = {"device", "host", "recomputed"}
    # Memory of states alone does not grow, so none is suspended; few schedules of the others suspend one.
    if kind.startswith("windows") or (kind != "states alone" and len(families) > 1):
        needed.add("suspended")
    played = max(PART, 4 // len(KINDS[kind]))
    for family in families:
        bench = Bench(family, tmp_path)
        paths += paths_of(bench, range(first, first + played))
        first += played
        assert bench.oracle.near_ties <= bench.oracle.tokens / 1000, f"{family}: too many near ties"
    # 5051: a model with states suspends a request, which is rare.
    for seed in (5_051, *range(first, first + MORE)):
        if needed <= set(+paths):
            break
        paths += paths_of(bench, [seed])
    assert needed <= set(+paths), f"a path was never taken: {paths}"
