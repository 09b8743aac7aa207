"""Conversations of the demo, generated from ``conversations.json``: facts are told early and asked for late.

The file holds ``lives`` (facts about some people: the sentence that tells each, its value and questions for
it), ``chat`` (turns without facts), ``remarks`` (sentences of stories) and ``notes`` (sentences of a message
for a real model). The demo model never saw the names and values of the lives in training.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("conversations.json")
LONG_FACTS = 5
"""Facts at the beginning of a long conversation, and questions at its end."""
SHORT_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "What is the capital of Japan?",
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of the user. ``expected``: the value that the answer must contain; None if the turn asks for none."""

    text: str
    expected: str | None = None


Conversation = list[Utterance]


class Fact(msgspec.Struct, frozen=True):
    tell: str
    value: str
    ask: tuple[str, ...]

    def question(self, rng: random.Random) -> Utterance:
        return Utterance(rng.choice(self.ask), self.value)


class Material(msgspec.Struct, frozen=True):
    """The file. A life begins with the person's name; no value occurs twice in one life."""

    lives: tuple[tuple[Fact, ...], ...]
    chat: tuple[str, ...]
    remarks: tuple[str, ...]
    notes: tuple[str, ...]


@functools.cache
def material() -> Material:
    return msgspec.json.decode(FILE.read_bytes(), type=Material)


def conversations(count: int, turns: int, seed: int = 0) -> list[Conversation]:
    """Return ``count`` conversations of exactly ``turns`` turns each (at least 2). The same arguments give the
    same conversations.

    The first turn tells a fact and the last one asks for it. About four turns in ten are questions, most of
    them in the second half, about the oldest facts last. No two conversations are about the same person while
    there are enough people.

    Raises ValueError when a conversation would have too few turns, or more than a life has facts for.
    """
    if turns < 2:
        raise ValueError(f"a conversation needs at least 2 turns, not {turns}")
    lives = list(material().lives)
    random.Random(f"lives {seed}").shuffle(lives)
    return [
        _conversation(random.Random(f"conversation {seed} {index}"), lives[index % len(lives)], turns)
        for index in range(count)
    ]


def _conversation(rng: random.Random, life: tuple[Fact, ...], turns: int) -> Conversation:
    asked = max(1, round(turns * 0.42))
    chats = turns // 8
    told = turns - asked - chats
    if told > len(life):
        raise ValueError(f"too many turns for one conversation: {told} facts, but a life has {len(life)}")
    facts = [life[0], *rng.sample(life[1:], told - 1)]
    # First the order of the turns. A fact comes first; early questions may fall anywhere after the first third,
    # where some fact has certainly been told.
    acts = ["tell"] * (told - 1) + ["chat"] * chats
    rng.shuffle(acts)
    acts.insert(0, "tell")
    early = asked // 3
    for _ in range(early):
        acts.insert(rng.randint(max(1, len(acts) // 3), len(acts)), "ask")
    said: Conversation = []
    known = 0
    for act in acts:
        if act == "tell":
            said.append(Utterance(facts[known].tell))
            known += 1
        elif act == "chat":
            said.append(Utterance(rng.choice(material().chat)))
        else:
            said.append(rng.choice(facts[:known]).question(rng))
    # Late questions walk from newer facts to older ones: the very last turn asks for the very first fact.
    return said + [facts[number % told].question(rng) for number in reversed(range(asked - early))]


def long_conversation(stories: int, sentences: int, seed: int = 0) -> Conversation:
    """Return one growing conversation: five facts, then ``stories`` stories of ``sentences`` irrelevant
    sentences each.

    A story ends with a question for one of the facts: replies to small talk alone are near ties, which rounding
    may decide. After every fourth story comes another question, and the last five turns ask for all five facts,
    the oldest last. The same arguments give the same conversation.
    """
    rng = random.Random(f"long conversation {seed}")
    life = rng.choice(material().lives)
    facts = [life[0], *rng.sample(life[1:], LONG_FACTS - 1)]
    said = [Utterance(fact.tell) for fact in facts]
    for number in range(1, stories + 1):
        question = rng.choice(facts).question(rng)
        story = " ".join([*rng.choices(material().remarks, k=sentences), question.text])
        said.append(Utterance(story, question.expected))
        if number % 4 == 0:
            said.append(rng.choice(facts).question(rng))
    return said + [fact.question(rng) for fact in reversed(facts)]


def notes_and_questions(sentences: int, seed: int = 0) -> Conversation:
    """Return one long message of ``sentences`` irrelevant sentences, then short questions of general knowledge.

    It is for a real model, so no turn expects a fact. Answers to these questions are short and certain:
    rounding decides no token of them. The same arguments give the same conversation.
    """
    notes = " ".join(random.Random(f"notes {seed}").choices(material().notes, k=sentences))
    first = f"These are my notes. {notes} That was all. Thank you for reading."
    return [Utterance(first), *map(Utterance, SHORT_QUESTIONS)]
