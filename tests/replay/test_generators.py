"""Built-in workloads against the statistics that their sources state."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.replay.load.generators import CHATS, NAMES, generate
from pensieve.replay.load.schedule import Arrivals, Gaps, scripts
from pensieve.replay.load.workload import Conversation, Dataset, DatasetError, TurnLengths

PUBLISHED = {
    "sharegpt": (5.56, 37.77, 204.58),
    "ultrachat": (3.86, 51.78, 257.81),
    "sharegpt-long": (7.58, 31.26, 180.44),
    "lmsys": (7.73, 22.49, 100.67),
}
"""Turns, input and output means, from the papers."""


def lengths(data: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    turns = [turn for talk in data.conversations for turn in talk.turns]
    counts = np.array([len(talk.turns) for talk in data.conversations])
    return counts, np.array([t.input_tokens for t in turns]), np.array([t.output_tokens for t in turns])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_chats_have_the_published_means(name: str) -> None:
    counts, inputs, outputs = lengths(data := generate(name, 5000, seed=1))
    assert len(counts) == 5000
    for found, wanted in zip((counts, inputs, outputs), PUBLISHED[name], strict=True):
        assert found.mean() == pytest.approx(wanted, rel=0.04)
    assert min(inputs.min(), outputs.min()) >= 1
    assert max(talk.tokens for talk in data.conversations) <= CHATS[name].context_limit
    assert counts.min() == CHATS[name].fewest_turns
    assert not data.recorded_arrivals


def test_long_contexts_are_like_the_trace() -> None:
    data = generate("mooncake", 5000, seed=1)
    counts, _, outputs = lengths(data)
    assert (counts > 1).mean() == pytest.approx(879 / 3100, abs=0.02)
    assert counts.mean() == pytest.approx(1.61, rel=0.04)
    first = np.array([talk.turns[0].input_tokens for talk in data.conversations])
    later = np.array([turn.input_tokens for talk in data.conversations for turn in talk.turns[1:]])
    assert first.mean() == pytest.approx(12515, rel=0.1)
    assert np.median(first) == pytest.approx(6873, rel=0.1)
    assert later.mean() == pytest.approx(1291, rel=0.15)
    assert np.percentile(later, 75) == pytest.approx(399, rel=0.3)
    assert outputs.mean() == pytest.approx(348, rel=0.05)
    assert np.mean([talk.tokens for talk in data.conversations]) == pytest.approx(13858, rel=0.08)
    gaps = np.array(Gaps.from_dataset(data).seconds)
    assert gaps.mean() == pytest.approx(252, rel=0.08)
    starts = [talk.turns[0].timestamp_s or 0.0 for talk in data.conversations]
    assert len(starts) / max(starts) == pytest.approx(3100 / 1380, rel=0.05)
    assert data.recorded_arrivals


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_its_seed(name: str) -> None:
    assert generate(name, 20, 1) == generate(name, 20, 1)
    assert generate(name, 20, 1).sha256 != generate(name, 20, 2).sha256


TALK = Conversation("a", (TurnLengths(5, 100), TurnLengths(5, 10), TurnLengths(5, 1)))


def test_pauses_per_token_of_the_answer() -> None:
    (script,) = scripts([TALK], Arrivals(think_per_token_s=0.1, think_minimum_s=5.0))
    assert [due.after_answer_s for due in script.due] == [0.0, 10.0, 5.0]


def test_pauses_from_a_trace() -> None:
    stamped = Conversation("s", (TurnLengths(1, 1, 2.0), TurnLengths(1, 1, 5.0), TurnLengths(1, 1, 12.0)))
    gaps = Gaps.from_dataset(Dataset("t", (stamped,), "0"))
    assert gaps.seconds == (3.0, 7.0)
    drawn = {
        due.after_answer_s
        for script in scripts([TALK] * 30, Arrivals(think_gaps=gaps))
        for due in script.due[1:]
    }
    assert drawn == {3.0, 7.0}
    with pytest.raises(DatasetError, match="gaps"):
        Gaps.from_dataset(Dataset("t", (TALK,), "0"))
