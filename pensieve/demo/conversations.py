"""What is said in the demo: facts told early and asked for late, put together from ``conversations.json``.

That file holds ``lives`` (for each of some people, facts with the sentence that tells them, their value and questions
for it), ``chat`` (turns without facts), ``remarks`` (sentences of stories) and ``notes`` (sentences of a message for a
real model). The training of the demo model never saw the names and values of the lives.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("conversations.json")
LONG_FACTS = 5
"""Facts that a long conversation begins with, and questions that it ends with."""
SHORT_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "What is the capital of Japan?",
)
"""They follow the notes, one a turn."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of the user. ``expected``: the value that the answer must hold; None if the turn asks for none."""

    text: str
    expected: str | None = None


Conversation = list[Utterance]


class Fact(msgspec.Struct, frozen=True):
    """One thing about a person, which the model knows once it was told."""

    tell: str
    value: str
    ask: tuple[str, ...]

    def question(self, rng: random.Random) -> Utterance:
        return Utterance(rng.choice(self.ask), self.value)


class Material(msgspec.Struct, frozen=True):
    """The file. A life begins with its name; values are never the same twice in one life."""

    lives: tuple[tuple[Fact, ...], ...]
    chat: tuple[str, ...]
    remarks: tuple[str, ...]
    notes: tuple[str, ...]


@functools.cache
def material() -> Material:
    return msgspec.json.decode(FILE.read_bytes(), type=Material)


def conversations(count: int, turns: int, seed: int = 0) -> list[Conversation]:
    """This many conversations of exactly this many turns each (at least 2). The same arguments give the same ones.

    The first turn tells a fact and the last one asks for it. About four turns in ten are questions, most of them in
    the second half, oldest facts last. No two are about the same person while there are people enough.

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
    # First the order of what happens. A fact comes first; early questions may fall anywhere behind the first third,
    # where something has been told for sure.
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
    """One conversation that grows: five facts, then this many stories of this many sentences of no interest.

    A story ends by asking for one of the facts: replies to chatter alone are near ties, which rounding may decide.
    After every fourth story comes a question of its own, and the last five turns ask for all five, the oldest last.
    The same arguments give the same conversation.
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
    """One long message of this many sentences of no interest, then short questions of general knowledge.

    It is for a real model, so no turn expects a fact. Answers to these questions are short and certain: rounding
    decides no token of them. The same arguments give the same conversation.
    """
    notes = " ".join(random.Random(f"notes {seed}").choices(material().notes, k=sentences))
    first = f"These are my notes. {notes} That was all. Thank you for reading."
    return [Utterance(first), *map(Utterance, SHORT_QUESTIONS)]
