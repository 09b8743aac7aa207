"""The tables of what can be told about people and the world."""

from __future__ import annotations

from pensieve.demo.talk.facts import Attribute, favourite, noun, pet, pets, to_remember, world

_LIVES = Attribute(
    "home", "city", "{s} [live|lives] in {v}", "where {s} [live|lives]",
    ("{s} [live|lives] in {v}", "{s} [live|lives] in {v}", "{p} home is in {v}", "{s} {be} living in {v}",
     "{s} moved to {v}"),
    ("where [do|does] {s} live", "where [do|does] {s} live", "which city [do|does] {s} live in",
    "in which city [do|does] {s} live",
     "what city [do|does] {s} live in", "where is {p} home"),
)  # fmt: skip
_ORIGIN = Attribute(
    "origin", "country", "{s} [come|comes] from {v}", "where {s} [come|comes] from",
    ("{s} [come|comes] from {v}", "{s} {be} from {v}", "{s} {be} originally from {v}",
    "{p} home country is {v}",
     "{s} grew up in {v}"),
    ("where [do|does] {s} come from", "where {be} {s} from", "which country [do|does] {s} come from",
     "what country {be} {s} from", "where did {s} grow up"),
)  # fmt: skip
_JOB = Attribute(
    "job", "job", "{s} [work|works] as {a} {v}", "what {s} [do|does] for a living",
    ("{s} [work|works] as {a} {v}", "{s} {be} {a} {v}", "{p} job is {v}", "{s} {be} {a} {v} by trade"),
    ("what [do|does] {s} do for a living", "what is {p} job", "what's {p} job",
    "what [do|does] {s} work as",
     "what [do|does] {s} do for work", "what is {p} profession"),
    ("{p} job", "what {p} job is"),
)  # fmt: skip
_PLAYS = Attribute(
    "instrument", "instrument", "{s} [play|plays] the {v}", "which instrument {s} [play|plays]",
    ("{s} [play|plays] the {v}", "{s} can play the {v}", "{p} instrument is the {v}",
    "{s} {be} learning the {v}"),
    ("which instrument [do|does] {s} play", "what instrument [do|does] {s} play",
    "what instrument can {s} play"),
    ("what instrument {s} [play|plays]",),
)  # fmt: skip
_SPEAKS = Attribute(
    "language", "language", "{s} [speak|speaks] {v}", "which language {s} [speak|speaks]",
    ("{s} [speak|speaks] {v}", "{s} can speak {v}", "{p} language is {v}", "{p} mother tongue is {v}"),
    ("which language [do|does] {s} speak", "what language [do|does] {s} speak",
    "what is {p} mother tongue"),
    ("what language {s} [speak|speaks]",),
)  # fmt: skip
_AGE = Attribute(
    "age", "number2", "{s} {be} {v} years old", "how old {s} {be}",
    ("{s} {be} {v} years old", "{s} {be} {v}", "{p} age is {v}", "{s} just turned {v}",
    "{s} {be} {v} years of age"),
    ("how old {be} {s}", "what is {p} age", "what's {p} age", "what age {be} {s}"),
    ("{p} age",),
)  # fmt: skip
_ALLERGY = Attribute(
    "allergy", "food", "{s} {be} allergic to {v}", "what {s} {be} allergic to",
    ("{s} {be} allergic to {v}", "{s} can't eat {v}", "{p} allergy is {v}",
    "{s} [have|has] an allergy to {v}"),
    ("what {be} {s} allergic to", "what food can't {s} eat", "what is {p} allergy"),
    ("{p} allergy",),
)  # fmt: skip
_HOBBY = Attribute(
    "hobby", "hobby", "{p} hobby is {v}", "{p} hobby",
    ("{p} hobby is {v}", "{s} [enjoy|enjoys] {v}", "{s} [do|does] {v} in {p} free time",
    "{p} hobby is {v}"),
    ("what is {p} hobby", "what's {p} hobby", "what [do|does] {s} enjoy",
    "what [do|does] {s} do in {p} free time"),
    ("what {p} hobby is",),
)  # fmt: skip
_LIKES = Attribute(
    "liking", "food", "{s} [like|likes] {v}", "what {s} [like|likes]",
    ("{s} [like|likes] {v}", "{s} [love|loves] {v}", "{s} really [like|likes] {v}"),
    ("what [do|does] {s} like", "what [do|does] {s} love"),
)  # fmt: skip
_WORKPLACE = Attribute(
    "workplace", "title", "{s} [work|works] at {v}", "where {s} [work|works]",
    ("{s} [work|works] at {v}", "{s} [work|works] for {v}", "{p} workplace is {v}"),
    ("where [do|does] {s} work", "where [do|does] {s} work", "who [do|does] {s} work for",
    "what is {p} workplace"),
)  # fmt: skip
_SHOPPING = noun(
    "shopping list",
    "list",
    statements=("{s} [need|needs] to buy {v}", "{p} shopping list: {v}", "{s} [have|has] to buy {v}"),
    questions=(
        "what [do|does] {s} need to buy",
        "what is on {p} shopping list",
        "what's on {p} shopping list",
    ),
)
_BIRTHDAY = noun(
    "birthday", "date", statements=("{p} birthday is on {v}", "{s} was born on {v}", "{p} birthday is on {v}")
)
_BIRTH_YEAR = noun(
    "birth year",
    "number4",
    "year of birth",
    statements=("{s} was born in {v}", "{s} was born in {v}", "{s} was born in the year {v}"),
    questions=("when was {s} born", "what year was {s} born in", "in which year was {s} born"),
)

_FAVOURITES = (
    ("colour", "colour", "color"), ("food", "food", "dish", "meal"), ("drink", "drink"), ("animal",
    "animal"),
    ("city", "city"), ("country", "country"), ("sport", "sport"), ("flower", "flower"), ("season",
    "season"),
    ("number", "number"), ("book", "title"), ("film", "title", "movie"), ("song", "title"), ("band",
    "title"),
    ("game", "title"), ("fruit", "food"), ("day", "day"), ("singer", "name"), ("language", "language"),
    ("instrument", "instrument"), ("month", "month"), ("dessert", "food"), ("writer", "name"), ("snack",
    "food"),
    ("thing", "any"), ("word", "any"), ("restaurant", "title"), ("place", "city"), ("subject", "any"),
    ("team", "title"),
)  # fmt: skip
_NOUNS = (
    ("lucky number", "number"), ("phone number", "phone"), ("pin", "number4", "pin code"), ("hometown",
    "city"),
    ("password", "code"), ("middle name", "name"), ("last name", "name", "surname", "family name"),
    ("nickname", "name"), ("best friend", "name"), ("house number", "number"),
    ("street", "title"), ("school", "title"), ("car", "title"), ("shoe size", "number2"),
    ("room number", "number3"), ("locker code", "code"), ("dream job", "job"), ("dream", "any"),
    ("packing list", "list"),
    ("to-do list", "list"), ("bus line", "number2"), ("company", "title"), ("username", "any"), ("email",
    "email"),
    ("height", "number3"), ("horoscope", "any"), ("secret word", "any"),
    ("seat", "code"), ("flight", "code"), ("wedding month", "month"), ("favourites", "list"), ("lunch",
    "food"),
    ("breakfast", "food"), ("dinner", "food"), ("wish", "any"), ("goal", "any"), ("budget", "number4"),
)  # fmt: skip
PETS = [
    "dog",
    "cat",
    "horse",
    "rabbit",
    "parrot",
    "hamster",
    "turtle",
    "goldfish",
    "canary",
    "snake",
    "lizard",
    "pony",
    "puppy",
    "kitten",
    "pet",
    "bird",
    "fish",
]

PERSONAL = (
    tuple(favourite(*row) for row in _FAVOURITES)
    + tuple(noun(*row) for row in _NOUNS)
    + tuple(pet(animal) for animal in PETS)
    + tuple(pets(animal) for animal in PETS[:8])
    + (
        _LIVES,
        _ORIGIN,
        _JOB,
        _PLAYS,
        _SPEAKS,
        _AGE,
        _ALLERGY,
        _HOBBY,
        _LIKES,
        _WORKPLACE,
        _SHOPPING,
        _BIRTHDAY,
        _BIRTH_YEAR,
    )
    * 3
)
"""Attributes of the user, relations and named people. Those made of verbs stand three times: people use them most."""

_WORLD_NOUNS = (
    ("wifi password", "code"), ("door code", "number4"), ("safe code", "number"), ("project name", "any"),
    ("meeting room", "code"),
    ("gate", "code"), ("train", "time"), ("meeting", "time"), ("deadline", "date"), ("party", "date"),
    ("price", "number"),
    ("team captain", "name"), ("winner", "name"), ("new manager", "name"), ("budget", "number"), ("exam",
    "date"),
    ("secret word", "any"), ("code word", "any"), ("magic word", "any"), ("first prize", "any"), ("topic",
    "any"),
    ("order number", "phone"), ("ticket number", "phone"), ("guest list", "list"), ("menu", "list"),
    ("hotel", "title"),
)  # fmt: skip

WORLD_FACTS = tuple(world(*row) for row in _WORLD_NOUNS) + tuple(
    to_remember(key, kind)
    for key, kind in (("number", "number"), ("word", "any"), ("code", "code"), ("name", "name")) * 2
)
