"""Writes training dialogues: endless streams of turns in which facts are told, asked, corrected, mixed with noise.

Everything is drawn from one ``random.Random``, so a seed gives the same dialogue for ever. The only state of a dialogue
is the ledger of facts told so far; the assistant's replies follow from it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pensieve.demo.talk import attributes, facts, smalltalk, words
from pensieve.demo.talk.facts import Attribute, Subject
from pensieve.demo.talk.values import Values
from pensieve.demo.training import phrasing


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """One exchange as the script has it: what the user types and what the assistant should reply."""

    user: str
    assistant: str
    expected: str | None = None
    """The value that the reply must hold; None where nothing known is asked."""
    told_at: int | None = None
    """Index of the last turn that mentioned the value before this one."""
    unknown: bool = False
    """Whether it asks for something never told."""
    kind: str = ""
    """Kind of the value asked for."""


@dataclass(slots=True)
class Fact:
    """What the dialogue knows about one (subject, attribute)."""

    subject: Subject
    attribute: Attribute
    value: str
    mentioned: int
    """Index of the last turn that held the value."""
    alias: Subject | None = None
    """The same subject by name, when it was told by name and relation at once ("my sister Emily is a baker")."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How a dialogue is composed; drawn per dialogue, so that the model meets dense and sparse ones."""

    tell: float
    ask: float
    unknown: float
    correct: float
    sloppy: float
    echo: float
    people: int

    @classmethod
    def draw(cls, rng: random.Random) -> Mix:
        ask = rng.uniform(0.25, 0.55)
        return cls(
            tell=(1 - ask) * rng.uniform(0.25, 0.95),
            ask=ask,
            unknown=rng.uniform(0.03, 0.2),
            correct=rng.choice((0.0, 0.05, 0.1, 0.2)),
            sloppy=rng.choice((0.0, 0.0, 0.1, 0.5, 1.0)),
            echo=rng.choice((1.0, 1.0, 0.8, 0.4)),
            people=rng.randint(0, 8),
        )


def _unknown(question: str, thing: str) -> WrittenTurn:
    return WrittenTurn(question, f"I don't know {thing} yet.", unknown=True, kind="(never told)")


@dataclass(slots=True)
class Writer:
    """Writes one dialogue, turn by turn. ``held_out`` takes names and values from the held-out side."""

    rng: random.Random
    held_out: bool = False
    mix: Mix | None = None
    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)
    people: list[Subject] = field(default_factory=list)
    turns: int = 0
    values: Values = field(init=False)

    def __post_init__(self) -> None:
        self.mix = self.mix or Mix.draw(self.rng)
        self.values = Values(self.rng, self.held_out)
        relations = self.rng.sample(facts.RELATIONS, self.rng.randint(0, 6))
        self.people = [facts.relation(noun) for noun in relations]
        names = {self.values.draw("name") for _ in range(self.mix.people)}
        self.people += [facts.person(name) for name in sorted(names)]

    @property
    def plan(self) -> Mix:
        assert self.mix is not None  # set by __post_init__
        return self.mix

    def next(self) -> WrittenTurn:
        """The next exchange."""
        turn = self._next()
        self.turns += 1
        return turn

    def _next(self) -> WrittenTurn:
        if self.turns == 0 and self.rng.random() < 0.3:
            user, reply = smalltalk.greeting(self.rng)
            return WrittenTurn(self._style(user, "!." if self.rng.random() < 0.5 else ""), reply)
        draw = self.rng.random()
        if draw < self.plan.ask:
            if self.rng.random() < self.plan.unknown:
                return self._ask_unknown()
            if self.facts:
                return self.ask(self.pick())
        if draw < self.plan.ask + self.plan.tell:
            if self.facts and self.rng.random() < self.plan.correct:
                return self._correct()
            return self.tell()
        return self.chat()

    def chat(self) -> WrittenTurn:
        """A turn without facts."""
        sentences, question, reply = smalltalk.exchange(self.rng, self.held_out)
        parts = [self._style(text, ".") for text in sentences[:-1]]
        return WrittenTurn(" ".join([*parts, self._style(sentences[-1], "?" if question else ".")]), reply)

    def pick(self) -> Fact:
        """A told fact to ask for: every other time one of those that were not mentioned for longest."""
        ledger = list(self.facts.values())
        if self.rng.random() < 0.5:
            return self.rng.choice(ledger)
        ledger.sort(key=lambda fact: fact.mentioned)
        return ledger[int(len(ledger) * self.rng.random() ** 3)]

    def tell(self) -> WrittenTurn:
        """New facts: one, or a few in a sentence; now and then asked for in the same breath."""
        count = self.rng.choices((1, 2, 3), (86, 11, 3))[0]
        # Two draws may hit the same topic: the later one counts.
        told = {
            (fact.subject.says, fact.attribute.key): fact for fact in (self._new_fact() for _ in range(count))
        }
        if self.rng.random() < 0.02:
            return self._two_pets()
        if count == 1 and (both := self._named_relation(*told.values())):
            return both
        turn = self._state(list(told.values()), self.rng.choice(phrasing.STATE))
        if self.rng.random() < 0.04:
            fact = self.rng.choice(list(told.values()))
            question = self._question(fact.subject, fact.attribute)
            user = turn.user + (" " if turn.user[-1] in ".!" else ". ") + question
            return WrittenTurn(
                user,
                phrasing.sentence(self._clause(fact)),
                expected=fact.value,
                told_at=self.turns,
                kind=fact.attribute.kind,
            )
        return self._after_chat(turn)

    def _two_pets(self) -> WrittenTurn:
        """ "I have a cat named Tom and a dog called Rex"."""
        subject = self.rng.choice([facts.SELF, facts.SELF, *self.people])
        one, other = self.rng.sample(attributes.PETS, 2)
        told = [
            Fact(subject, facts.pet(animal), self.values.draw("pet"), self.turns) for animal in (one, other)
        ]
        for fact in told:
            self.facts[fact.subject.says, fact.attribute.key] = fact
        named = [self.rng.choice(("named", "called")) for _ in told]
        verb = "has" if subject.third_person else "have"
        text = f"{subject.says} {verb} a {one} {named[0]} {told[0].value} and a {other} {named[1]} {told[1].value}"
        return WrittenTurn(self._style(text, ".", self.rng.choice(phrasing.STATE)), self._acknowledge(told))

    def _acknowledge(self, told: list[Fact]) -> str:
        if self.rng.random() >= self.plan.echo:
            return self.rng.choice(phrasing.BRIEF)
        return self.rng.choice(phrasing.ECHO).format(" and ".join(self._clause(fact) for fact in told))

    def _named_relation(self, fact: Fact) -> WrittenTurn | None:
        """Now and then: "my sister Emily is a baker" tells two facts about a relation whose name is not known yet."""
        relation = fact.subject
        known = (relation.says, facts.NAME.key) in self.facts
        if (
            known
            or fact.attribute is facts.NAME
            or not relation.says.startswith("my ")
            or self.rng.random() > 0.25
        ):
            return None
        name = self.values.draw("name")
        fact.alias = facts.person(name)
        both = facts.Subject(
            f"{relation.says} {name}", f"{relation.says} {name}'s", relation.reply, relation.reply_possessive
        )
        naming = Fact(relation, facts.NAME, name, self.turns)
        for told in (naming, fact):
            self.facts[told.subject.says, told.attribute.key] = told
        user = facts.fill(self.rng.choice(fact.attribute.statements), both, fact.value, by_assistant=False)
        user = self._style(user, ".", self.rng.choice(phrasing.STATE), sloppy=False, keep=fact.value)
        return WrittenTurn(user, self._acknowledge([naming, fact]))

    def _after_chat(self, turn: WrittenTurn) -> WrittenTurn:
        """The same turn, now and then with an unrelated sentence before it."""
        if self.rng.random() > 0.06:
            return turn
        return replace(
            turn, user=self._style(smalltalk.remark(self.rng, self.held_out), ".") + " " + turn.user
        )

    def _state(self, told: list[Fact], frame: str) -> WrittenTurn:
        sloppy = self._is_sloppy()
        for fact in told:
            if sloppy and self.rng.random() < 0.5 and fact.attribute.kind not in ("code", "email"):
                fact.value = fact.value.lower()
            fact.mentioned = self.turns
            self.facts[fact.subject.says, fact.attribute.key] = fact
        clauses = [
            facts.fill(self._statement(fact), fact.subject, fact.value, by_assistant=False) for fact in told
        ]
        separator = self.rng.choice((" and ", " and ", ", ", ". "))
        user = self._style(separator.join(clauses), ".", frame, sloppy, keep=told[0].value)
        return WrittenTurn(user, self._acknowledge(told))

    def ask(self, fact: Fact) -> WrittenTurn:
        """A question for a told fact, answered with its canonical clause."""
        if fact.attribute is facts.NAME and fact.subject.third_person and self.rng.random() < 0.15:
            return self._ask_who(fact)
        subject = fact.alias if fact.alias is not None and self.rng.random() < 0.5 else fact.subject
        user = self._question(subject, fact.attribute)
        reply = facts.fill(fact.attribute.clause, subject, fact.value, by_assistant=True)
        turn = WrittenTurn(
            user,
            phrasing.sentence(reply),
            expected=fact.value,
            told_at=fact.mentioned,
            kind=fact.attribute.kind,
        )
        fact.mentioned = self.turns
        return self._after_chat(turn)

    def _ask_who(self, fact: Fact) -> WrittenTurn:
        """The other way round: "who is Emily?" """
        user = self._style(
            self.rng.choice(("who is {}", "who's {}", "do you know who {} is")).format(fact.value), "?"
        )
        reply = f"{fact.value} is {fact.subject.reply}."
        turn = WrittenTurn(user, reply, expected=fact.subject.reply, told_at=fact.mentioned, kind="relation")
        fact.mentioned = self.turns
        return turn

    def _ask_unknown(self) -> WrittenTurn:
        if self.rng.random() < 0.06:
            name = self.values.draw("name")
            taken = name in {fact.value for fact in self.facts.values()} | {
                subject.says for subject in self.people
            }
            if not taken:
                return _unknown(self._style(f"who is {name}", "?"), f"who {name} is")
        subject, attribute = self._new_topic()
        thing = facts.fill(attribute.embedded, subject, "", by_assistant=True)
        return _unknown(self._question(subject, attribute), thing)

    def _correct(self) -> WrittenTurn:
        fact = self.pick()
        fact.value = self.values.draw(fact.attribute.kind)
        fact.alias = None
        return self._state([fact], self.rng.choice(phrasing.RESTATE))

    def _new_topic(self) -> tuple[Subject, Attribute]:
        """A subject and an attribute that nothing was told about."""
        while True:
            subject, attribute = self._draw_topic()
            if self.held_out and not facts.can_hold_out(attribute):
                continue
            if (subject.says, attribute.key) not in self.facts:
                return subject, attribute

    def _draw_topic(self) -> tuple[Subject, Attribute]:
        draw = self.rng.random()
        if draw < 0.07:
            return facts.WORLD, self.rng.choice(attributes.WORLD_FACTS)
        if draw < 0.11:
            return facts.WORLD, facts.world(words.invented_word(self.rng, self.held_out), "any")
        if draw < 0.13:
            noun = self.rng.choice(facts.OF_NOUNS)
            return facts.WORLD, facts.world(
                f"{noun} of {self.values.draw(self.rng.choice(('country', 'name', 'title')))}", "any"
            )
        if draw < 0.19:
            thing = self.values.draw("thing")
            return facts.WORLD, facts.place_of(thing, mine=self.rng.random() < 0.5)
        if draw < 0.25:  # any noun can be a key: "my zorrel is …"
            noun = self.rng.choice(words.pool(self.rng.choice(("thing", "item", "animal")), self.held_out))
            if noun in attributes.PETS or noun.endswith("s") or self.rng.random() < 0.5:
                noun = words.invented_word(self.rng, self.held_out)
            return facts.SELF, facts.noun(noun, "any")
        if draw < 0.60 or not self.people:
            return facts.SELF, facts.NAME if self.rng.random() < 0.08 else self.rng.choice(
                attributes.PERSONAL
            )
        subject = self.rng.choice(self.people)
        nameless = subject.says.startswith("my ") and self.rng.random() < 0.25
        return subject, facts.NAME if nameless else self.rng.choice(attributes.PERSONAL)

    def _new_fact(self) -> Fact:
        subject, attribute = self._new_topic()
        return Fact(subject, attribute, self.values.draw(attribute.kind), self.turns)

    def _statement(self, fact: Fact) -> str:
        if fact.attribute is facts.NAME and fact.subject is facts.SELF and self.rng.random() < 0.4:
            return self.rng.choice(facts.NAME_SELF_STATEMENTS)
        return self.rng.choice(fact.attribute.statements)

    def _question(self, subject: Subject, attribute: Attribute) -> str:
        if self.rng.random() < 0.7:
            template, frame = self.rng.choice(attribute.questions), self.rng.choice(phrasing.ASK)
        else:
            template, frame = (
                self.rng.choice((attribute.embedded, *attribute.objects)),
                self.rng.choice(phrasing.ASK_OBJECT),
            )
        if attribute.key.startswith("place of"):  # its embedded form is the assistant's
            template = template.replace("your ", "my ")
        mark = "." if frame.startswith(phrasing.NOT_QUESTIONS) else "?"
        return self._style(facts.fill(template, subject, "", by_assistant=False), mark, frame)

    @staticmethod
    def _clause(fact: Fact) -> str:
        return facts.fill(fact.attribute.clause, fact.subject, fact.value, by_assistant=True)

    def _is_sloppy(self) -> bool:
        return self.rng.random() < self.plan.sloppy

    def _style(
        self, text: str, mark: str, frame: str = "{}", sloppy: bool | None = None, keep: str = ""
    ) -> str:
        sloppy = self._is_sloppy() if sloppy is None else sloppy
        return phrasing.typed(self.rng, text, mark, frame, sloppy, keep)


def dialogue(rng: random.Random, held_out: bool = False) -> Iterator[WrittenTurn]:
    """An endless dialogue."""
    writer = Writer(rng, held_out)
    while True:
        yield writer.next()
