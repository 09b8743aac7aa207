"""How sentences are typed: what people put before them, how carefully they write, how the assistant acknowledges."""

from __future__ import annotations

import random

STATE = (
    "{}",) * 12 + (
    "by the way, {}", "just so you know, {}", "remember that {}", "please remember that {}",
    "note that {}", "oh, and {}",
    "hi, {}", "hello, {}", "I should tell you that {}", "well, {}", "so, {}", "for the record, {}",
    "did you know that {}",
    "don't forget that {}", "I want you to know that {}", "please note: {}", "fyi, {}",
    "one more thing: {}", "also, {}",
)  # fmt: skip
RESTATE = ("actually, {}", "actually {} now", "sorry, {}", "no, {}", "correction: {}", "things changed: {}",
           "{} now", "{}",
            "I was wrong, {}", "update: {}", "wait, {}", "from now on {}")  # fmt: skip
ASK = ("{}",) * 8 + (
    "hey, {}",
    "so, {}",
    "and {}",
    "by the way, {}",
    "ok, {}",
    "remind me, {}",
    "quick question: {}",
    "now, {}",
)
ASK_OBJECT = (
    "do you remember {}", "do you know {}", "can you tell me {}", "tell me {}", "remind me {}",
    "please tell me {}",
    "do you still know {}", "could you remind me {}", "I forgot {}", "do you still remember {}", "say {}",
    "I want to know {}",
)  # fmt: skip
NOT_QUESTIONS = ("tell me", "remind me", "please", "I forgot", "say", "I want")
ECHO = ("Got it, {}.", "Got it, {}.", "Okay, {}.", "Noted: {}.")
BRIEF = ("Got it.", "Okay.", "Noted.", "Thanks, I will remember that.")


def sentence(clause: str) -> str:
    """A clause with its capital and full stop."""
    return clause[:1].upper() + clause[1:] + "."


def _contract(rng: random.Random, text: str) -> str:
    """ "I am" as "I'm", half of the time."""
    return "I'm" + text[4:] if text.startswith("I am ") and rng.random() < 0.5 else text


def typed(rng: random.Random, text: str, mark: str, frame: str, sloppy: bool, keep: str) -> str:
    """A bare sentence as people type it, inside a frame like "by the way, {}".

    ``mark`` is its final punctuation. ``sloppy`` leaves out capitals, apostrophes and marks. ``keep`` is a value that
    must not get a capital at the beginning of the sentence: answers repeat it as it was written.
    """
    if sloppy:
        text = _contract(rng, text)
        if text.startswith(("I ", "I'm ")):
            text = "i" + text[1:]
        if rng.random() < 0.5:
            text = text.replace("what's", "whats").replace("I'm", "im").replace("i'm", "im")
        return frame.format(text) + (mark if rng.random() < 0.4 else "")
    text = frame.format(_contract(rng, text))
    if not (keep and text.startswith(keep)):
        text = text[:1].upper() + text[1:]
    if rng.random() < 0.04:
        text = text.replace("'", "\u2019")
    draw = rng.random()
    return text + ("" if draw < 0.08 else "!" if draw < 0.12 and mark == "." else mark[-1:])
