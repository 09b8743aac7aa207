"""What is said in the demo: the same for the same arguments, each fact before the question for it."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest

from pensieve.demo.conversations import conversations, material, notes_and_questions


def held_out(word: str) -> bool:
    """Whether the training of the demo model left a word out: one in five, by a checksum."""
    return zlib.crc32(word.lower().encode()) % 5 == 0


def test_conversations_are_the_same_for_a_seed_and_differ_by_seed() -> None:
    assert conversations(3, 20, seed=5) == conversations(3, 20, seed=5)
    assert conversations(3, 20, seed=5) != conversations(3, 20, seed=6)
    assert notes_and_questions(9, seed=1) == notes_and_questions(9, seed=1) != notes_and_questions(9, seed=2)


def test_a_fact_holds_its_value_and_its_questions_do_not() -> None:
    for life in material().lives:
        assert len({fact.value for fact in life}) == len(life), "a value of two facts would be right for both"
        for fact in life:
            assert fact.value in fact.tell and fact.ask
            assert not any(fact.value in question for question in fact.ask)


def test_people_have_names_of_their_own_that_training_never_saw() -> None:
    names = [life[0].value for life in material().lives]
    assert len(set(names)) == len(names) >= 16, "as many as `pensieve demo` has sessions"
    assert all(map(held_out, names))
    talks = conversations(len(names), 8, seed=2)
    assert len({talk[0].text.split()[-1] for talk in talks}) == len(names)


@pytest.mark.parametrize("count", [2, 3, 8, 30, 60])
def test_a_conversation_begins_with_a_fact_and_ends_by_asking_for_it(count: int) -> None:
    for conversation in conversations(5, count, seed=count):
        assert len(conversation) == count
        assert conversation[0].expected is None
        last = conversation[-1].expected
        assert last is not None and last in conversation[0].text
        told = [index for index, line in enumerate(conversation) if line.expected is None]
        for index, line in enumerate(conversation):
            if line.expected is not None:
                assert any(before < index and line.expected in conversation[before].text for before in told)


def test_a_conversation_too_long_or_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        conversations(1, 1)
    with pytest.raises(ValueError, match="too many turns"):
        conversations(1, 1000)


def test_conversations_need_no_torch() -> None:
    heavy = "('torch', 'tokenizers', 'grpc')"
    code = f"import sys, pensieve.demo.conversations; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
