"""Turns that tell nothing: greetings, chit-chat, questions of general knowledge. The noise between facts."""

from __future__ import annotations

import random

from pensieve.demo.talk import words

SYSTEM_PROMPTS = (
    "Be brief.",
    "You are a helpful assistant.",
    "You are a helpful assistant. Remember what the user tells you.",
    "Answer in one short sentence.",
    "You are Pensieve, a friendly assistant with a good memory.",
    "Be kind and concise.",
)

_HELLO = ("Hello! Tell me something and I will remember it.",)
_WHO = ("I am the Pensieve demo model. I remember what you tell me.",)
_CAN = ("Tell me facts, such as your name, and ask me about them later.",)
_ONLY = ("I only know what you tell me.",)
_WELCOME = ("You're welcome.",)
_SURE = ("Okay.",)
_FINE = ("I'm fine, thank you.",)
_BYE = ("Goodbye! I will remember what you told me.",)

_FIXED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("hi", "hello", "hey", "hi there", "hello there", "good morning", "good evening", "hey there",
    "greetings"), _HELLO),
    (("who are you", "what are you", "what's your name", "what is your name", "are you a robot",
    "introduce yourself"), _WHO),
    (("what can you do", "how can you help me", "help", "how do you work", "what should I say",
    "can you help me"), _CAN),
    (("how are you", "how are you today", "how's it going", "are you okay"), _FINE),
    (("thanks", "thank you", "thanks a lot", "thank you very much", "great, thanks", "cheers",
    "thx"), _WELCOME),
    (("ok", "okay", "cool", "nice", "great", "I see", "alright", "perfect", "sure", "good", "right",
    "wow", "yes"), _SURE),
    (("what do you know about me", "tell me about myself", "what did I tell you", "what do you remember",
    "what do you know"),
     ("I remember what you told me. Ask me about one thing at a time.",)),
    (("bye", "goodbye", "see you later", "see you tomorrow", "good night", "that's all for today"), _BYE),
    (
        ("tell me a joke", "can you sing", "what do you think", "what time is it", "what day is it",
        "what is two plus two",
         "what is the meaning of life", "tell me a story", "what should I do today", "do you like music",
         "what is the weather like", "who won the match", "what's the weather", "what's the time",
         "what's up", "what's new",
         "what's for dinner", "summarize our conversation", "what is love", "what's the news",
         "who is the president",
         "how old are you", "where are you from", "do you like me", "what is this", "why", "how", "what",
         "really",
         "can you write code", "what is your favourite colour", "what's your favourite food",
         "where do you live", "can you recommend a film", "write a poem"),
        _ONLY,
    ),
)  # fmt: skip

_ASKED = (
    "how far is it from {city} to {city}", "how many people live in {city}",
    "how do I cook {food}", "can you explain how a {thing} works", "what does a {job} earn",
    "who invented the {instrument}",
    "how fast is a {animal}", "how do you say {item} in {language}", "is {food} healthy",
    "what are the rules of {sport}",
    "when do {flower} bloom", "how long does it take to learn {language}",
    "which is bigger, a {animal} or a {animal}",
)  # fmt: skip
_TOLD = (
    "yesterday I saw a {animal} near the station", "the weather in {city} was lovely {when}",
    "we had {food} for lunch {when}",
    "I watched a film about a {job} {when}", "I read an article about {sport} in {country} {when}",
    "somebody in the street was playing the {instrument}", "the shop was out of {item} again",
    "it rained all day {when}", "I saw {name} at the market {when}", "they painted the old bridge {colour}",
    "the neighbours argued about {hobby} {when}", "I dreamed about a {colour} {animal}",
    "the bus to {city} was late again",
    "I am thinking about a trip to {country}", "the radio talked about {hobby} for an hour",
    "I had too much {drink} {when}",
    "there was a long queue at the bakery {when}", "my day was quite busy", "I slept badly {when}",
    "work was boring {when}",
    "the garden is full of {flower} now", "I bought some {item} and some {item} {when}",
    "I have to clean up a bit",
    "a {job} told me that {animal}s can be trained", "the price of {item} went up again",
    "I forgot to buy {item} {when}",
    "{name} called about the {thing} {when}", "I want to learn {hobby} some day",
    "the lights went out for a minute {when}",
    "a {colour} van blocked the road to {city}", "I {verb} the {any} {when}", "we {verb} {any} {when}",
    "they {verb} {name} {when}",
    "the {any} {verb} the {any}", "I {verb} a {any} and a {any}", "{any} {any} {any}",
    "there is {any} in the {any}",
    "she {verb} the {any} of {name}", "it was {any}", "he {verb} it",
    "there is a new cafe that sells {food} and {drink}",
)  # fmt: skip
_VERBS = [
    "saw",
    "found",
    "lost",
    "broke",
    "sold",
    "fixed",
    "heard",
    "made",
    "took",
    "cleaned",
    "carried",
    "dropped",
    "opened",
    "closed",
    "painted",
    "washed",
    "stole",
    "borrowed",
    "built",
    "followed",
    "forgot",
    "hated",
    "missed",
    "visited",
    "needed",
    "tested",
    "wanted",
    "moved",
    "cut",
    "kept",
    "pushed",
    "threw",
    "burned",
    "returned",
]
_WHEN = (
    "today",
    "yesterday",
    "last week",
    "this morning",
    "last night",
    "on Monday",
    "on Sunday",
    "again",
    "two days ago",
)
_REACTIONS = ("I see.", "That sounds interesting.", "Thanks for telling me.", "I understand.", "Oh, nice.")


def _word(rng: random.Random, kind: str, held_out: bool) -> str:
    if kind == "when":
        return rng.choice(_WHEN)
    if kind == "verb":
        return rng.choice(_VERBS)
    if kind == "any":
        draw = rng.random()
        if draw < 0.4:
            return words.invented_word(rng, held_out)
        if draw < 0.6:
            return words.spliced_word(rng, held_out)
        kind = rng.choice(("thing", "food", "animal", "job", "hobby", "spot", "item"))
    return rng.choice(words.pool(kind, held_out))


def _fill(rng: random.Random, template: str, held_out: bool) -> str:
    while "{" in template:
        start = template.index("{")
        kind = template[start + 1 : template.index("}", start)]
        word = _word(rng, kind, held_out)
        template = template[:start] + word + template[start + len(kind) + 2 :]
    return template


def exchange(rng: random.Random, held_out: bool) -> tuple[list[str], bool, str]:
    """One turn without a fact: the user's sentences (bare), whether the last is a question, and the reply."""
    draw = rng.random()
    if draw < 0.25:
        asked, replies = rng.choice(_FIXED)
        text = rng.choice(asked)
        return (
            [text],
            text.split()[0] in ("who", "what", "what's", "how", "how's", "are", "can", "do"),
            rng.choice(replies),
        )
    if draw < 0.42:
        return [_fill(rng, rng.choice(_ASKED), held_out)], True, _ONLY[0]
    count = rng.choice((1, 1, 1, 2, 2, 3, 4))
    return [_fill(rng, rng.choice(_TOLD), held_out) for _ in range(count)], False, rng.choice(_REACTIONS)


def remark(rng: random.Random, held_out: bool) -> str:
    """One unrelated sentence, bare."""
    return _fill(rng, rng.choice(_TOLD), held_out)


def greeting(rng: random.Random) -> tuple[str, str]:
    """The first exchange of many conversations."""
    return rng.choice(_FIXED[0][0]), _HELLO[0]
