"""The act of a real model: a long message and short turns, on a server that keeps its state and on one that does not.

It is ``long_talk`` with another model and another conversation. The answers are not judged by what they say: both
servers have to give the same ones.
"""

from __future__ import annotations

from typing import Final

from pensieve.demo.acts.long_talk import FORGETS, KEEPS
from pensieve.demo.talk.scenario import SHORT_QUESTIONS, Conversation, notes_and_questions

CONTEXT_TOKENS: Final = 4000
"""How long the conversation is, unless an option says otherwise."""
LAST_TURNS: Final = len(SHORT_QUESTIONS)
"""The closing number is taken over the short turns."""
SENTENCE_TOKENS: Final = 8.55
"""Tokens of SmolLM2 per sentence of the notes, on average."""
OTHER_TOKENS: Final = 150
"""Tokens of the system prompt, the questions and the answers, about."""


def script(context_tokens: int, seed: int) -> Conversation:
    """A conversation of about this many tokens of SmolLM2."""
    return notes_and_questions(max(1, round((context_tokens - OTHER_TOKENS) / SENTENCE_TOKENS)), seed)


def servers(model: str) -> dict[str, list[str]]:
    """Name → options of its ``pensieve serve``: memory for all of SmolLM2's context, 8,192 tokens."""
    ample = [*("--model", model, "--device", "cpu"), *("--device-cache", "8192tokens", "--host-cache", "0")]
    return {KEEPS: ample, FORGETS: [*ample, "--stateless"]}
