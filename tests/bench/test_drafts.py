"""The simulated engine of ``bench/drafts.py``, on answers whose drafts are all right, and all wrong."""

from __future__ import annotations

import random

import pytest

from support.replay.benches import load_bench

LOOP = ([1, 2, 3], [4, 5, 6, 7] * 100)
NOISE = ([1, 2, 3], random.Random(1).sample(range(10, 100_000), 400))


def test_drafts_gain_what_is_right_less_what_a_step_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("drafts", monkeypatch)
    free, dear = (bench.gated_row([LOOP], 2, lost, 0.0, 60) for lost in (0.0, 0.5))
    assert free["÷ without"] == free["tokens a step"] > 5
    assert dear["÷ without"] == pytest.approx(
        dear["tokens a step"] / (1 + 0.5 * dear["steps with drafts"]), rel=0.01
    )
    never = bench.gated_row([LOOP], 2, 100.0, 0.0, 60)
    assert (never["÷ without"], never["tokens a step"], never["steps with drafts"]) == (1, 1, 0)
    noise = bench.gated_row([NOISE], 2, 0.5, 0.0, 60)
    assert (noise["÷ without"], noise["drafts a step"]) == (1, 0)


def test_the_index_alone_gives_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("drafts", monkeypatch)
    (row,) = bench.index_rows([LOOP], [0.01])
    assert row["tokens a step"] > 5
    (row,) = bench.index_rows([NOISE], [0.01])
    assert (row["tokens a step"], row["drafts a step"]) == (1, 0)
