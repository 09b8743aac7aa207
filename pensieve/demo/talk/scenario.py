"""Scripted conversations with names and values that training never saw: facts told early are asked for late.

Torch-free: the demo command and tests import it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pensieve.demo.talk import attributes, facts, smalltalk, words
from pensieve.demo.talk.facts import Attribute, Subject
from pensieve.demo.talk.values import Values


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of the user. ``expected``: the value that the answer must hold; None if the turn asks for none."""

    text: str
    expected: str | None = None


Conversation = list[Utterance]

LONG_FACTS = 5
"""Facts that a long conversation begins with, and questions that it ends with."""

SHORT_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "What is the capital of Japan?",
)
"""They follow the notes, one a turn."""

_SELF_KEYS = (
    "home", "origin", "job", "instrument", "language", "age", "allergy", "hobby", "favourite colour", "favourite food",
    "favourite drink", "favourite animal", "favourite city", "favourite sport", "favourite flower", "lucky number",
    "dog name", "cat name", "parrot name", "horse name", "shopping list", "hometown", "dream job", "favourite book",
    "locker code", "best friend",
)  # fmt: skip
_OTHERS_KEYS = (
    "home",
    "origin",
    "job",
    "instrument",
    "hobby",
    "age",
    "favourite colour",
    "favourite food",
    "dog name",
    "cat name",
)
_BY_KEY = {attribute.key: attribute for attribute in attributes.PERSONAL}


def conversations(count: int, turns: int, seed: int = 0) -> list[Conversation]:
    """This many conversations of exactly this many turns each (at least 2). The same arguments give the same ones.

    The first turn tells a fact and the last one asks for it. About four turns in ten are questions, most of them in
    the second half, oldest facts last.
    """
    if turns < 2:
        raise ValueError(f"a conversation needs at least 2 turns, not {turns}")
    return [_conversation(random.Random(f"scenario {seed} {index}"), turns) for index in range(count)]


def long_conversation(stories: int, sentences: int, seed: int = 0) -> Conversation:
    """One conversation that grows: five facts, then this many stories of this many sentences of no interest.

    A story ends by asking for one of the facts: replies to chatter alone are near ties, which rounding may decide.
    After every fourth story comes a question of its own, and the last five turns ask for all five, the oldest last.
    The same arguments give the same conversation.
    """
    rng = random.Random(f"long scenario {seed}")
    values = Values(rng, held_out=True, plain=True)
    topics = _topics(rng, values)
    told: list[tuple[Subject, Attribute, str]] = []
    for _ in range(LONG_FACTS):
        told.append(_new_fact(topics, values, told))
    utterances = [Utterance(_statement(rng, *fact)) for fact in told]
    for number in range(1, stories + 1):
        story = [_sentence(smalltalk.remark(rng, held_out=True), ".") for _ in range(sentences)]
        question = _question(rng, *rng.choice(told))
        utterances.append(Utterance(" ".join([*story, question.text]), question.expected))
        if number % 4 == 0:
            utterances.append(_question(rng, *rng.choice(told)))
    return utterances + [_question(rng, *fact) for fact in reversed(told)]


def notes_and_questions(sentences: int, seed: int = 0) -> Conversation:
    """One long message of this many sentences of no interest, then short questions of general knowledge.

    It is for a real model, so no turn expects a fact. Answers to these questions are short and certain: rounding
    decides no token of them. The same arguments give the same conversation.
    """
    rng = random.Random(f"notes {seed}")
    notes = " ".join(_sentence(smalltalk.remark(rng, held_out=False), ".") for _ in range(sentences))
    first = f"These are my notes. {notes} That was all. Thank you for reading."
    return [Utterance(first), *map(Utterance, SHORT_QUESTIONS)]


def _conversation(rng: random.Random, turns: int) -> Conversation:
    values = Values(rng, held_out=True, plain=True)
    topics = _topics(rng, values)
    asked = max(1, round(turns * 0.42))
    chats = turns // 8
    told: list[tuple[Subject, Attribute, str]] = []
    # First the order of what happens, without values. A fact comes first; early questions may fall anywhere behind the
    # first third, where something has been told for sure.
    acts = ["tell"] * (turns - asked - chats) + ["chat"] * chats
    head, tail = acts[:1], acts[1:]  # shuffled without its head, so that a fact stays first
    rng.shuffle(tail)
    acts = head + tail
    early = asked // 3
    for _ in range(early):
        acts.insert(rng.randint(max(1, len(acts) // 3), len(acts)), "ask")
    late = asked - early
    utterances: Conversation = []
    for act in acts:
        if act == "tell":
            told.append(_new_fact(topics, values, told))
            utterances.append(Utterance(_statement(rng, *told[-1])))
        elif act == "chat":
            sentences, question, _ = smalltalk.exchange(rng, held_out=True)
            utterances.append(
                Utterance(
                    " ".join(_sentence(text, ".") for text in sentences[:-1]) + _last(sentences, question)
                )
            )
        else:
            utterances.append(_question(rng, *rng.choice(told)))
    # Late questions walk from newer facts to older ones: the very last turn asks for the very first fact.
    for number in reversed(range(late)):
        utterances.append(_question(rng, *told[number % len(told)]))
    return utterances


def _last(sentences: list[str], question: bool) -> str:
    return (" " if len(sentences) > 1 else "") + _sentence(sentences[-1], "?" if question else ".")


def _topics(rng: random.Random, values: Values) -> list[tuple[Subject, Attribute]]:
    """The subjects and attributes that a conversation may tell of, in the order of telling."""
    own = [(facts.SELF, _BY_KEY[key]) for key in _SELF_KEYS]
    own += [
        (facts.WORLD, facts.place_of(thing, mine=True))
        for thing in rng.sample(words.pool("thing", held_out=True), 3)
    ]
    others: list[tuple[Subject, Attribute]] = []
    for noun in rng.sample(facts.RELATIONS, 3):
        subject = facts.relation(noun)
        others += [(subject, facts.NAME), *((subject, _BY_KEY[key]) for key in rng.sample(_OTHERS_KEYS, 4))]
    for name in {values.draw("name"): None for _ in range(3)}:
        others += [(facts.person(name), _BY_KEY[key]) for key in rng.sample(_OTHERS_KEYS, 4)]
    rng.shuffle(own)
    rng.shuffle(others)
    mixed = (
        [topic for pair in zip(own, others, strict=False) for topic in pair]
        + own[len(others) :]
        + others[len(own) :]
    )
    return [(facts.SELF, facts.NAME), *mixed]


def _new_fact(
    topics: list[tuple[Subject, Attribute]], values: Values, told: list[tuple[Subject, Attribute, str]]
) -> tuple[Subject, Attribute, str]:
    if not topics:
        raise ValueError("too many turns for one conversation: nothing is left to tell")
    subject, attribute = topics.pop(0)
    taken = {value for _, _, value in told}
    while (value := values.draw(attribute.kind)) in taken:
        pass
    return subject, attribute, value


def _sentence(text: str, mark: str) -> str:
    return text[:1].upper() + text[1:] + mark


def _statement(rng: random.Random, subject: Subject, attribute: Attribute, value: str) -> str:
    templates = [template for template in attribute.statements if not template.startswith("{v}")]
    return _sentence(facts.fill(rng.choice(templates), subject, value, by_assistant=False), ".")


def _question(rng: random.Random, subject: Subject, attribute: Attribute, value: str) -> Utterance:
    templates = [template for template in attribute.questions if not template.startswith("{p}")]
    return Utterance(
        _sentence(facts.fill(rng.choice(templates), subject, "", by_assistant=False), "?"), value
    )
