"""Where parts of an answer end: its first call, for answers that may have one only, and its thought."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from pensieve.speech.calls import (
    CLOSE_CALL,
    OPEN_CALL,
    PYTHON_TAG,
    TOOL_CALLS,
    CallForm,
    Quotes,
    mistral_calls,
    parse_call,
)
from pensieve.speech.reader import CLOSE_THOUGHT, OPEN_THOUGHT, SpeechForm

Scan = Generator[int | None, str, None]
"""Takes one character after the other. Yields how many characters ago a call has ended, or None."""
Part = Generator[None, str, str]
"""Takes characters as well, and returns them."""

_BETWEEN: Final = " \t\r\n;"
"""Stands between calls of Llama's form."""


class FirstCall:
    """Takes the text of one answer as it comes. Each character is looked at once, however long a call gets.

    What it takes for a call is one for ``SpeechReader`` too, in the answer that ends where it says.
    """

    def __init__(self, form: SpeechForm) -> None:
        self._scan = _scan(form)
        next(self._scan, None)
        self._chars = 0
        self._over = form.calls is None
        """It was found, or there will be none."""

    def push(self, text: str) -> int | None:
        """With some more text: where the call ends, in characters of the answer; None: nowhere yet."""
        for char in text if not self._over else "":
            self._chars += 1
            try:
                ago = self._scan.send(char)
            except StopIteration:
                self._over = True
                return None
            if ago is not None:
                self._over = True
                return self._chars - ago
        return None


class ThoughtEnd:
    """Finds where an answer goes on behind its thought and the white space after that.

    Takes the text of one answer as it comes. It agrees with ``SpeechReader`` on what is a thought.
    """

    def __init__(self, form: SpeechForm) -> None:
        self._chars = 0
        self._tail = ""
        """What is still needed of the text so far."""
        self._state = self._thinking if form.begins_thinking else self._beginning
        self._thinks = form.thinks or form.begins_thinking
        self.inside = form.begins_thinking
        """Whether all text so far belongs to a thought, or to the white space behind it."""

    def push(self, text: str) -> int | None:
        """Take some more text. Returns where the answer goes on, in characters; None while that is not known.

        Returns 0 for an answer without a thought. Nothing may be pushed after the first number.
        """
        self._chars += len(text)
        self._tail += text
        return self._state()

    def _beginning(self) -> int | None:
        self._tail = self._tail.lstrip()
        if self._thinks and self._tail.startswith(OPEN_THOUGHT):
            self.inside, self._state = True, self._thinking
            return self._thinking()
        return None if self._thinks and OPEN_THOUGHT.startswith(self._tail) else 0

    def _thinking(self) -> int | None:
        _, closed, behind = self._tail.partition(CLOSE_THOUGHT)
        if not closed:
            self._tail = self._tail[1 - len(CLOSE_THOUGHT) :]
            return None
        self._tail, self._state = behind, self._behind
        return self._behind()

    def _behind(self) -> int | None:
        self._tail = self._tail.lstrip()
        return self._chars - len(self._tail) if self._tail else None


def _scan(form: SpeechForm) -> Scan:
    head = ""
    if form.begins_thinking:
        yield from _until(CLOSE_THOUGHT)
    elif form.thinks:
        head = yield from _behind_space()
        while OPEN_THOUGHT.startswith(head) and head != OPEN_THOUGHT:
            head += yield None
        if head == OPEN_THOUGHT:
            yield from _until(CLOSE_THOUGHT)
            head = ""
    match form.calls:
        case CallForm.HERMES:
            yield from _hermes(head)
        case CallForm.LLAMA3:
            yield from _llama(head)
        case CallForm.MISTRAL:
            yield from _mistral(head)


def _hermes(head: str) -> Scan:
    while True:
        yield from _until(OPEN_CALL, head)
        inside, head, quotes = "", "", Quotes()
        while not inside.endswith(CLOSE_CALL) or quotes.inside:
            char = yield None
            inside += char
            quotes.push(char)
        if parse_call(inside.removesuffix(CLOSE_CALL)):
            yield 0


def _llama(head: str) -> Scan:
    head = head or (yield from _behind_space())
    if not head.startswith("{"):
        yield from _until(PYTHON_TAG, head)
        between = yield from _until("{")
        if between[:-1].replace(PYTHON_TAG, "").strip(_BETWEEN):
            return
    called = yield from _object()
    if parse_call(called, needs_arguments=True):
        yield 0


def _mistral(head: str) -> Scan:
    yield from _until(TOOL_CALLS, head)
    first = yield from _behind_space()
    if first != "[":
        name = yield from _until("{", first)
        called = yield from _object()
        if mistral_calls(name[:-1] + called):
            yield 0
        return
    if (yield from _behind_space()) != "{":
        return
    called = yield from _object()
    if not mistral_calls(f"[{called}]"):
        return
    # Models close the list themselves where it has one call.
    behind = yield None
    while behind[-1].isspace():
        behind += yield None
    if behind[-1] in "],":
        yield 0 if behind[-1] == "]" else len(behind)


def _until(mark: str, seen: str = "") -> Part:
    """All characters to the end of ``mark``; ``seen``: those that were taken before."""
    while not seen.endswith(mark):
        seen += yield None
    return seen


def _behind_space() -> Part:
    """The first character that is no white space."""
    char = yield None
    while char.isspace():
        char = yield None
    return char


def _object() -> Part:
    """A JSON object, or what braces and quotes make look like one; its first brace was taken before."""
    text, depth, quotes = "{", 1, Quotes()
    while depth:
        char = yield None
        text += char
        quotes.push(char)
        if not quotes.inside:
            depth += (char == "{") - (char == "}")
    return text
