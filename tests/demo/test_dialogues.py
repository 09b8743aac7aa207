"""What the generator writes: deterministic, split into training and held-out words, answers that hold their values."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import islice

import pytest

from pensieve.demo.talk import attributes, facts, words
from pensieve.demo.talk.scenario import conversations
from pensieve.demo.talk.values import Values
from pensieve.demo.training.dialogues import dialogue

KINDS = sorted({attribute.kind for attribute in attributes.PERSONAL + attributes.WORLD_FACTS} | {"spot"})


def turns(seed: str, count: int, held_out: bool) -> list[object]:
    return list(islice(dialogue(random.Random(seed), held_out), count))


@pytest.mark.parametrize("held_out", [False, True])
def test_a_seed_gives_the_same_dialogue(held_out: bool) -> None:
    assert turns("a", 200, held_out) == turns("a", 200, held_out)
    assert turns("a", 20, held_out) != turns("b", 20, held_out)


def test_scenarios_are_deterministic_and_differ_by_seed() -> None:
    assert conversations(3, 20, seed=5) == conversations(3, 20, seed=5)
    assert conversations(3, 20, seed=5) != conversations(3, 20, seed=6)


@pytest.mark.parametrize("kind", sorted(set(words._POOLS) - set(words.UNSPLIT)))
def test_curated_pools_have_two_disjoint_sides(kind: str) -> None:
    training, held_out = set(words.pool(kind, False)), set(words.pool(kind, True))
    assert training and held_out
    assert not {word.lower() for word in training} & {word.lower() for word in held_out}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in facts.UNSPLIT])
def test_drawn_values_of_the_two_sides_never_meet(kind: str) -> None:
    sides = [
        {Values(random.Random(f"{kind} {n}"), held_out).draw(kind).lower() for n in range(1500)}
        for held_out in (False, True)
    ]
    assert not sides[0] & sides[1]


def test_a_held_out_name_never_occurs_in_training_text() -> None:
    names = {name.lower() for name in words.pool("name", True)}
    for seed in range(40):
        for turn in islice(dialogue(random.Random(f"leak {seed}")), 100):
            text = (turn.user + " " + turn.assistant).replace("\u2019", "'")
            spoken = {
                word.removesuffix("'s").lower()
                for word in text.translate(str.maketrans("?.!,:", "     ")).split()
            }
            assert not spoken & names, text


def test_answers_hold_the_value_and_point_back_to_it() -> None:
    script = list(islice(dialogue(random.Random("answers"), held_out=True), 600))
    asked = [(index, turn) for index, turn in enumerate(script) if turn.expected is not None]
    assert len(asked) > 100
    for index, turn in asked:
        assert turn.expected is not None and turn.told_at is not None
        assert turn.expected in turn.assistant
        assert turn.told_at <= index


@pytest.mark.parametrize("count", [2, 3, 8, 30, 60, 100])
def test_a_scenario_begins_with_a_fact_and_ends_by_asking_for_it(count: int) -> None:
    for conversation in conversations(5, count, seed=count):
        assert len(conversation) == count
        assert conversation[0].expected is None
        last = conversation[-1].expected
        assert last is not None and last in conversation[0].text
        told = [index for index, line in enumerate(conversation) if line.expected is None]
        for index, line in enumerate(conversation):
            if line.expected is not None:
                assert any(before < index and line.expected in conversation[before].text for before in told)


def test_values_of_a_scenario_are_held_out() -> None:
    for conversation in conversations(20, 30, seed=3):
        name = conversation[-1].expected
        assert name is not None and words.is_held_out(name)


def test_a_scenario_too_long_or_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        conversations(1, 1)
    with pytest.raises(ValueError, match="nothing is left"):
        conversations(1, 1000)


def test_scenarios_need_no_torch() -> None:
    heavy = "('torch', 'tokenizers', 'grpc')"
    code = f"import sys, pensieve.demo.talk.scenario; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
