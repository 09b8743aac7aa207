"""Parses an answer into words, thoughts and calls. Text in pieces gives the same parts as the whole text.

Text that may still change its meaning is held back: the beginning of a marker, and an incomplete call, which is
words if it turns out not to be JSON. So a part that was returned never changes.

``FirstCall`` finds the end of an answer's first call, for answers with one call only, and ``ThoughtEnd`` that of its
thought.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from pensieve.speech.calls import (
    CLOSE_CALL,
    OPEN_CALL,
    PYTHON_TAG,
    TOOL_CALLS,
    CallForm,
    FunctionCall,
    StringState,
    parse_call,
    parse_llama_calls,
    parse_mistral_calls,
)

OPEN_THOUGHT: Final = "<think>"
CLOSE_THOUGHT: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the user."""

    text: str
    end: int = field(default=0, compare=False, repr=False)
    """Where it ends in the answer, in characters."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The model's reasoning before its answer."""

    text: str


AnswerPart = Words | Thought | FunctionCall


@dataclass(frozen=True, slots=True)
class SpeechForm:
    calls: CallForm | None = None
    """None: calls are not parsed; they stay words."""
    thinks: bool = False
    """A ``<think>`` block at the beginning is a thought."""
    begins_thinking: bool = False
    """The chat template opens the block before the answer begins."""
    tagged: bool = False
    """Calls of Llama need their tag: the answer may be JSON of another kind."""

    @property
    def plain(self) -> bool:
        """Whether every answer is words only."""
        return self.calls is None and not self.thinks


PLAIN: Final = SpeechForm()
"""Every answer is words only."""


@dataclass(frozen=True, slots=True)
class Answer:
    parts: tuple[AnswerPart, ...]
    """In order. Neighbours are never of the same kind, except calls."""

    @property
    def words(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Words))

    @property
    def thoughts(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, FunctionCall))


def read(text: str, form: SpeechForm) -> Answer:
    reader = SpeechReader(form)
    return Answer(merge_parts([*reader.push(text), *reader.finish()]))


def merge_parts(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """Merge neighbouring parts of the same kind; calls stay separate."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Words) and isinstance(last, Words):
            found[-1] = Words(last.text + part.text, part.end)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return tuple(found)


class SpeechReader:
    """Parses the text of one answer as it comes. White space around thoughts and calls is dropped."""

    def __init__(self, form: SpeechForm) -> None:
        self._form = form
        self._text = ""
        self._pushed = 0
        self._state = self._thinking if form.begins_thinking else self._beginning
        if form.plain:
            self._state = self._only_words
        self._skips_space = not form.plain
        """No words since the beginning, a thought or a call: white space that follows is dropped."""
        self._scanned = 0
        self._quotes = StringState()
        """State of the current call's JSON, up to the character ``_scanned`` of the text."""

    def push(self, text: str) -> list[AnswerPart]:
        """Take more text and return the parts that are certain."""
        self._text += text
        self._pushed += len(text)
        return self._run(last=False)

    def finish(self) -> list[AnswerPart]:
        return self._run(last=True)

    def _run(self, *, last: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            state = self._state
            taken = state(last)
            end = self._pushed - len(self._text)
            parts += [replace(part, end=end) if isinstance(part, Words) else part for part in taken]
            if self._state == state:
                return [part for part in parts if isinstance(part, FunctionCall) or part.text]

    # ---- states: each returns the parts that it can, and may set the next state

    def _beginning(self, last: bool) -> list[AnswerPart]:
        self._skips_space = False  # here white space before words is kept
        text = self._text.lstrip()
        if self._form.thinks and text.startswith(OPEN_THOUGHT):
            self._text = text.removeprefix(OPEN_THOUGHT)
            self._state = self._thinking
        elif last or not (self._form.thinks and OPEN_THOUGHT.startswith(text)):
            self._state = self._talk
        return []

    def _thinking(self, last: bool) -> list[AnswerPart]:
        self._skips_space = True
        self._state = self._in_thought
        return []

    def _in_thought(self, last: bool) -> list[AnswerPart]:
        if self._skips_space:
            # The model may open the block again that its template has opened.
            self._text = self._text.lstrip()
            if not last and OPEN_THOUGHT.startswith(self._text):
                return []
            self._text = self._text.removeprefix(OPEN_THOUGHT).lstrip()
            if not (self._text or last):
                return []
        if CLOSE_THOUGHT in self._text:
            thought, _, self._text = self._text.partition(CLOSE_THOUGHT)
            self._skips_space, self._state = True, self._talk
            return [Thought(thought.rstrip())]
        self._skips_space = False
        return [Thought(self._take_certain(CLOSE_THOUGHT, last))]

    def _talk(self, last: bool) -> list[AnswerPart]:
        text = self._text.lstrip()
        if not (text or last):
            return []
        match self._form.calls:
            case None:
                self._state = self._only_words
            case CallForm.HERMES:
                self._state = self._words_or_call
            case CallForm.MISTRAL:
                self._state = self._words_or_tail
            case CallForm.LLAMA3:
                bare = text.startswith("{") and not self._form.tagged
                self._state = self._tail if bare else self._words_or_tail
        return []

    def _only_words(self, last: bool) -> list[AnswerPart]:
        text, self._text = self._text, ""
        return [self._words(text)]

    def _words_or_call(self, last: bool) -> list[AnswerPart]:
        if OPEN_CALL in self._text:
            at = self._text.index(OPEN_CALL)
            words = self._text[:at].rstrip()
            self._text, self._state = self._text[len(words) :], self._call
            self._scanned, self._quotes = 0, StringState()
            return [self._words(words)]
        return [self._words(self._take_certain(OPEN_CALL, last))]

    def _call(self, last: bool) -> list[AnswerPart]:
        """The text is white space, the opening of a call, and its content."""
        start = self._text.index(OPEN_CALL) + len(OPEN_CALL)
        end = self._text.find(CLOSE_CALL, max(start, self._scanned))
        while end >= 0:
            # Each character is processed once: a prompt may make a model write many closings inside a string.
            self._quotes.push(self._text[max(start, self._scanned) : end])
            self._scanned = end
            if not self._quotes.inside:
                call = parse_call(self._text[start:end])
                end += len(CLOSE_CALL)
                return self._called(call, end) if call else self._not_called(end)
            end = self._text.find(CLOSE_CALL, end + 1)
        if not last:
            return []
        # Some models end their answer without closing the call.
        if call := parse_call(self._text[start:]):
            return self._called(call, len(self._text))
        return self._not_called(len(self._text))

    def _called(self, call: FunctionCall, end: int) -> list[AnswerPart]:
        self._text, self._skips_space = self._text[end:], True
        self._state = self._words_or_call
        return [call]

    def _not_called(self, end: int) -> list[AnswerPart]:
        text, self._text = self._text[:end], self._text[end:]
        self._state = self._words_or_call
        return [self._words(text)]

    def _words_or_tail(self, last: bool) -> list[AnswerPart]:
        marker = TOOL_CALLS if self._form.calls is CallForm.MISTRAL else PYTHON_TAG
        if marker in self._text:
            words = self._text[: self._text.index(marker)].rstrip()
            self._text, self._state = self._text[len(words) :], self._tail
            return [self._words(words)]
        return [self._words(self._take_certain(marker, last))]

    def _tail(self, last: bool) -> list[AnswerPart]:
        """Calls until the end of the answer, or words."""
        if not last:
            return []
        text, self._text = self._text, ""
        if self._form.calls is CallForm.MISTRAL:
            calls = parse_mistral_calls(text.lstrip().removeprefix(TOOL_CALLS))
        else:
            calls = parse_llama_calls(text)
        return list(calls) or [self._words(text)]

    # ---- helpers of the states

    def _words(self, text: str) -> Words:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return Words(text)

    def _take_certain(self, marker: str, last: bool) -> str:
        """Take the text that cannot belong to ``marker`` or to white space before it; at the end take all."""
        keep = 0 if last else _held_back(self._text, marker)
        split = len(self._text) - keep
        text, self._text = self._text[:split], self._text[split:]
        return text


def _held_back(text: str, marker: str) -> int:
    """Return the number of characters at the end of ``text`` that are white space before a possible ``marker``,
    or its beginning."""
    partial = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())


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
