"""What can be told and asked: subjects, attributes, and the sentences that state, ask and answer them.

Templates hold ``{s}`` (subject: "I", "my sister", "Tom"), ``{p}`` (possessive: "my", "my sister's", "Tom's"), ``{v}``
(value), ``{a}`` ("a" or "an" before the value), ``{be}`` (am, are, is) and verb forms
``[first or second person|third person]``. Every attribute has one canonical ``clause``; acknowledgements and answers
are made of it, so that an answer always holds the value verbatim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORMS = re.compile(r"\[([^|\]]*)\|([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom or what a fact is about, as the user says it and as the assistant says it."""

    says: str
    says_possessive: str
    reply: str
    reply_possessive: str
    third_person: bool = True


SELF = Subject("I", "my", "you", "your", third_person=False)
WORLD = Subject("the", "the", "the", "the")
RELATIONS = tuple(
    [
        "mother",
        "father",
        "sister",
        "brother",
        "wife",
        "husband",
        "son",
        "daughter",
        "uncle",
        "aunt",
        "cousin",
        "boss",
        "neighbour",
        "teacher",
        "friend",
        "grandmother",
        "grandfather",
        "roommate",
        "nephew",
        "niece",
        "colleague",
        "coach",
        "partner",
        "landlord",
        "dentist",
    ]
)


def relation(noun: str) -> Subject:
    """The user's relative or acquaintance: "my sister" / "your sister"."""
    return Subject(f"my {noun}", f"my {noun}'s", f"your {noun}", f"your {noun}'s")


def person(name: str) -> Subject:
    """Somebody with a name: the user and the assistant call them alike."""
    return Subject(name, f"{name}'s", name, f"{name}'s")


@dataclass(frozen=True, slots=True)
class Attribute:
    """One thing that a subject has exactly one of."""

    key: str
    kind: str
    """The kind of value, as ``Values.draw`` takes it."""
    clause: str
    """Canonical statement."""
    embedded: str
    """The attribute as the object of "I don't know …"; "can you tell me …" takes it as well."""
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    objects: tuple[str, ...] = ()
    """Further objects of "tell me …"."""


def noun(
    key: str, kind: str, *variants: str, statements: tuple[str, ...] = (), questions: tuple[str, ...] = ()
) -> Attribute:
    """An attribute that is a noun: "my favourite colour is teal". ``variants`` are other spellings of the noun."""
    names = (key, *variants)
    if kind == "date":
        questions = (*questions, f"when is {{p}} {key}", f"when's {{p}} {key}")
    stated = [f"{{p}} {name} is {{v}}" for name in names] * 3
    if kind != "date":
        stated += [f"{{v}} is {{p}} {name}" for name in names]
    asked = [
        form.format(name)
        for name in names
        for form in ("what is {{p}} {}", "what's {{p}} {}", "what is {{p}} {}")
    ]
    asked += [
        form.format(name)
        for name in names
        for form in ("what did I say {{p}} {} was", "{{p}} {}", "what {} [do|does] {{s}} have")
    ]
    return Attribute(
        key,
        kind,
        f"{{p}} {key} is {{v}}",
        f"{{p}} {key}",
        tuple(stated) + statements * 2,
        tuple(asked) + questions * 3,
        tuple(f"what {{p}} {name} is" for name in names) + tuple(f"{{p}} {name}" for name in names),
    )


def favourite(thing: str, kind: str, *synonyms: str) -> Attribute:
    """ "my favourite colour", in both spellings, and the ways people say it without the word."""
    names = [f"{word} {noun}" for noun in (thing, *synonyms) for word in ("favourite", "favorite")]
    return noun(
        names[0],
        kind,
        *names[1:],
        statements=(
            f"the {thing} {{s}} [like|likes] most is {{v}}",
            f"the {thing} that {{s}} [like|likes] best is {{v}}",
        ),
        questions=(f"what {thing} [do|does] {{s}} like most", f"which {thing} [do|does] {{s}} like best"),
    )


def pet(animal: str) -> Attribute:
    """The name of the subject's dog, cat, …"""
    return Attribute(
        f"{animal} name",
        "pet",
        f"{{p}} {animal}'s name is {{v}}",
        f"{{p}} {animal}'s name",
        (
            f"{{p}} {animal}'s name is {{v}}",
            f"{{p}} {animal} is called {{v}}",
            f"{{s}} [have|has] a {animal} called {{v}}",
            f"{{s}} [have|has] a {animal} named {{v}}",
            f"the name of {{p}} {animal} is {{v}}",
            f"{{p}} {animal} is {{v}}",
        ),
        (
            f"what is {{p}} {animal}'s name",
            f"what's {{p}} {animal}'s name",
            f"what is {{p}} {animal} called",
            f"what is the name of {{p}} {animal}",
            f"what's the name of {{p}} {animal}",
            f"how is {{p}} {animal} called",
        ),
        (f"what {{p}} {animal} is called", f"the name of {{p}} {animal}"),
    )


def pets(animal: str) -> Attribute:
    """The names of the subject's dogs, cats, … (one value)."""
    return Attribute(
        f"{animal} names", "names", f"{{p}} {animal}s are called {{v}}", f"what {{p}} {animal}s are called",
        (f"{{s}} [have|has] two {animal}s, {{v}}", f"{{p}} {animal}s are called {{v}}",
        f"{{s}} [have|has] {animal}s named {{v}}",
         f"{{s}} [have|has] two {animal}s called {{v}}"),
        (f"what are {{p}} {animal}s called", f"what are the names of {{p}} {animal}s",
        f"what are {{p}} {animal}s' names"),
        (f"the names of {{p}} {animal}s",),
    )  # fmt: skip


NAME = noun(
    "name",
    "name",
    statements=("{s} {be} called {v}", "{s} {be} {v}", "{s} {be} called {v}", "{p} name's {v}"),
    questions=("what {be} {s} called", "who {be} {s}", "how {be} {s} called"),
)
NAME_SELF_STATEMENTS = (
    "call me {v}",
    "i'm {v}",
    "I'm {v}",
    "you can call me {v}",
    "I am {v}",
    "people call me {v}",
    "it's {v} here",
)


def world(key: str, kind: str) -> Attribute:
    """A fact of no person: "the wifi password is K7Q2"."""
    asks = (
        ("when is", "when's", "when was") if kind in ("time", "date") else ("what is", "what's", "what was")
    )
    return Attribute(
        f"the {key}", kind, f"the {key} is {{v}}", f"the {key}",
        (f"the {key} is {{v}}", f"the {key} is {{v}}", f"{{v}} is the {key}")[: 2 if kind in ("time",
        "date") else 3],
        tuple(f"{ask} the {key}" for ask in asks),
        (f"the {key}", f"what the {key} is"),
    )  # fmt: skip


def place_of(thing: str, mine: bool) -> Attribute:
    """Where an object lies. ``mine``: "my keys" instead of "the keys"."""
    said, replied = (f"my {thing}", f"your {thing}") if mine else (f"the {thing}", f"the {thing}")
    verb = "are" if thing.endswith("s") else "is"
    return Attribute(
        f"place of {said}", "spot", f"{replied} {verb} {{v}}", f"where {replied} {verb}",
        (f"{said} {verb} {{v}}", f"I put {said} {{v}}", f"I left {said} {{v}}", f"{said} {verb} {{v}}",
        f"I parked {said} {{v}}")[
            : 5 if thing in ("car", "bicycle", "van", "truck") else 4
        ],
        (f"where {verb} {said}", f"where {verb} {said}", f"where did I put {said}",
        f"where did I leave {said}",
         f"where did I park {said}")[: 5 if thing in ("car", "bicycle", "van", "truck") else 4],
        (f"where {said} {verb}",),
    )  # fmt: skip


def to_remember(key: str, kind: str) -> Attribute:
    """ "remember the number 7781": a value without more context."""
    return Attribute(
        f"the {key}", kind, f"the {key} is {{v}}", f"the {key}",
        (f"remember the {key} {{v}}", f"please remember the {key} {{v}}", f"the {key} is {{v}}",
        f"keep the {key} {{v}} in mind"),
        (f"what was the {key}", f"what {key} did I ask you to remember", f"which {key} did I tell you",
        f"what is the {key}",
         f"what {key} should you remember"),
    )  # fmt: skip


OF_NOUNS = tuple(
    [
        "capital",
        "owner",
        "price",
        "colour",
        "name",
        "king",
        "queen",
        "president",
        "leader",
        "captain",
        "author",
        "size",
        "weight",
        "height",
        "length",
        "title",
        "age",
        "address",
        "number",
        "code",
        "winner",
        "founder",
        "symbol",
        "language",
        "currency",
        "flag",
        "mayor",
    ]
)
"""What "the … of X" can be."""


def fill(template: str, subject: Subject, value: str, by_assistant: bool) -> str:
    """A template with its subject, verb forms and value put in. No capital, no final punctuation."""
    form = 2 if subject.third_person else 1
    text = _FORMS.sub(lambda match: match.group(form), template) if "[" in template else template
    article = "an" if value[:1].lower() in ("a", "e", "i", "o", "u") else "a"
    return (
        text.replace("{s}", subject.reply if by_assistant else subject.says)
        .replace("{p}", subject.reply_possessive if by_assistant else subject.says_possessive)
        .replace("{a}", article)
        .replace("{be}", "is" if subject.third_person else "are" if by_assistant else "am")
        .replace("{v}", value)
    )


UNSPLIT = ("day", "month", "season", "date", "time")
"""Kinds of value with too few members for a held-out side."""


def can_hold_out(attribute: Attribute) -> bool:
    """Whether the attribute's values have a held-out side."""
    return attribute.kind not in UNSPLIT
