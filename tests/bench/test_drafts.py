"""The engine over a simulated device of ``bench/drafts.py``, on answers whose drafts are all right, and all wrong."""

from __future__ import annotations

import itertools
import random

import pytest

from support.replay.benches import load_bench

LOOP = ([1, 2, 3], [4, 5, 6, 7] * 100)
NOISE = ([1, 2, 3], random.Random(1).sample(range(10, 100_000), 400))


def test_drafts_gain_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("drafts", monkeypatch)
    for host in (0.0, 0.005):  # the device need not wait for it
        loop = bench.virtual_row([LOOP] * 4, 2, host, (0.01, 0.0, 0.0, 0.0), 4)
        assert (
            loop["÷ without"] == pytest.approx(loop["tokens a step"], rel=0.01) and loop["tokens a step"] > 5
        )
        assert loop["gap ms"] == 0
    noise = bench.virtual_row([NOISE] * 4, 2, 0.005, (0.01, 0.0, 0.0, 0.0), 4)
    assert noise["÷ without"] == 1 and noise["drafts a step"] == 0


def test_a_draft_must_be_worth_what_its_step_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft of each phrase is right."""
    bench = load_bench("drafts", monkeypatch)
    noise = iter(range(100, 10_000))
    answer = [token for _ in range(60) for token in (*itertools.islice(noise, 12), 1, 2, 3, 4)]
    cheap, dear = (
        bench.virtual_row([([5, 6], answer)], 1, 0.0, (0.01, 0.0, 0.0, first), 1) for first in (0.002, 0.02)
    )
    assert cheap["tokens a step"] > 1.05 and cheap["÷ without"] > 1
    assert dear["÷ without"] > 0.95 and dear["steps with drafts"] < cheap["steps with drafts"] / 2


def test_the_index_alone_gives_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("drafts", monkeypatch)
    (row,) = bench.index_rows([LOOP], [0.01])
    assert row["tokens a step"] > 5
    (row,) = bench.index_rows([NOISE], [0.01])
    assert (row["tokens a step"], row["drafts a step"]) == (1, 0)
