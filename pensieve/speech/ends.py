"""Finds the end of an answer's first call, for answers with one call only, and the end of its thought."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from pensieve.speech.calls import (
    CLOSE_CALL,
    OPEN_CALL,
    PYTHON_TAG,
    TOOL_CALLS,
    CallForm,
    StringState,
    parse_call,
    parse_mistral_calls,
)
from pensieve.speech.reader import CLOSE_THOUGHT, OPEN_THOUGHT, SpeechForm

Scan = Generator[int | None, str, None]
"""Takes one character at a time. Yields how many characters ago a call ended, or None."""
Part = Generator[None, str, str]
"""Takes one character at a time, and returns them."""

_BETWEEN: Final = " \t\r\n;"


class FirstCall:
    """Takes the text of one answer as it comes. Each character is processed once, however long a call gets. If
    the answer ends where it says, ``SpeechReader`` finds the same call."""

    def __init__(self, form: SpeechForm) -> None:
        self._scan = _scan(form)
        next(self._scan, None)
        self._chars = 0
        self._over = form.calls is None

    def push(self, text: str) -> int | None:
        """Take more text. Return where the call ends, in characters of the answer; None if it has not ended."""
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
    """Finds where an answer continues after its thought and the white space that follows. Takes the text of one
    answer as it comes. Agrees with ``SpeechReader`` on where a thought ends."""

    def __init__(self, form: SpeechForm) -> None:
        self._chars = 0
        self._tail = ""
        self._state = self._thinking if form.begins_thinking else self._beginning
        self._thinks = form.thinks or form.begins_thinking
        self.inside = form.begins_thinking
        """Whether all text so far belongs to a thought, or to the white space after it."""

    def push(self, text: str) -> int | None:
        """Take more text. Return where the answer continues, in characters; None while that is unknown. Returns
        0 for an answer without a thought. After the first number, push no more."""
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
        head = yield from _skip_space()
        while OPEN_THOUGHT.startswith(head) and head != OPEN_THOUGHT:
            head += yield None
        if head == OPEN_THOUGHT:
            yield from _until(CLOSE_THOUGHT)
            head = ""
    match form.calls:
        case CallForm.HERMES:
            yield from _hermes(head)
        case CallForm.LLAMA3:
            yield from _llama(head, form.tagged)
        case CallForm.MISTRAL:
            yield from _mistral(head)


def _hermes(head: str) -> Scan:
    while True:
        yield from _until(OPEN_CALL, head)
        inside, head, quotes = "", "", StringState()
        while not inside.endswith(CLOSE_CALL) or quotes.inside:
            char = yield None
            inside += char
            quotes.push(char)
        if parse_call(inside.removesuffix(CLOSE_CALL)):
            yield 0


def _llama(head: str, tagged: bool) -> Scan:
    head = head or (yield from _skip_space())
    if tagged or not head.startswith("{"):
        yield from _until(PYTHON_TAG, head)
        between = yield from _until("{")
        if between[:-1].replace(PYTHON_TAG, "").strip(_BETWEEN):
            return
    called = yield from _object()
    if parse_call(called, needs_arguments=True):
        yield 0


def _mistral(head: str) -> Scan:
    yield from _until(TOOL_CALLS, head)
    first = yield from _skip_space()
    if first != "[":
        name = yield from _until("{", first)
        called = yield from _object()
        if parse_mistral_calls(name[:-1] + called):
            yield 0
        return
    if (yield from _skip_space()) != "{":
        return
    called = yield from _object()
    if not parse_mistral_calls(f"[{called}]"):
        return
    # A list with one call: the model may close it itself.
    behind = yield None
    while behind[-1].isspace():
        behind += yield None
    if behind[-1] in "],":
        yield 0 if behind[-1] == "]" else len(behind)


def _until(mark: str, seen: str = "") -> Part:
    """Return all characters up to and including ``mark``. ``seen``: characters taken before."""
    while not seen.endswith(mark):
        seen += yield None
    return seen


def _skip_space() -> Part:
    """Return the first character that is not white space."""
    char = yield None
    while char.isspace():
        char = yield None
    return char


def _object() -> Part:
    """Return a JSON object, by braces and quotes only. Its first brace was taken before."""
    text, depth, quotes = "{", 1, StringState()
    while depth:
        char = yield None
        text += char
        quotes.push(char)
        if not quotes.inside:
            depth += (char == "{") - (char == "}")
    return text
