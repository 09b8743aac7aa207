"""What is said in a request: roles, and texts that may come in parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from pensieve.client import CallingMessage, FunctionCall, InputLike, Item, Role, ToolResult
from pensieve.http.common.failures import invalid_field, unsupported_field
from pensieve.speech import CLOSE_THOUGHT, OPEN_THOUGHT, PLAIN, SpeechForm, is_json_object, read

ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_NUMBERS: Final = {role: role.number for role in Role}
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart] | None


@dataclass(frozen=True, slots=True)
class Message:
    """One message: who, and the whole text."""

    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    """Of an answer."""
    call_id: str = ""
    """Id of the call whose result this is."""
    thought: str = ""
    """What the model thought before this answer; "" where it does not think."""

    @property
    def sdk_input(self) -> InputLike:
        """For the SDK."""
        text = (
            f"{OPEN_THOUGHT}\n{self.thought}\n{CLOSE_THOUGHT}\n\n{self.text}" if self.thought else self.text
        )
        if self.calls:
            return CallingMessage(self.calls, text)
        return ToolResult(text, self.call_id) if self.role is Role.TOOL else (self.role, text)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation as a client tells it."""

    system: str
    """System and developer messages before anything else, joined by empty lines."""
    history: tuple[Message, ...]
    """Up to the last answer."""
    new: tuple[Message, ...]
    """What came after it."""
    tools: str = ""
    """Definitions of the functions that the model may call, JSON."""
    form: SpeechForm = PLAIN
    """How answers are read."""
    drops_oldest: bool = False
    """Whether it is held in a session that drops its oldest turns: others do not go on in one."""

    @property
    def beginning(self) -> str:
        """What stands before the messages: two talks with other beginnings are never one."""
        return f"{self.system}\0{self.tools}" if self.tools else self.system

    def with_form(self, form: SpeechForm, tools: str) -> Transcript:
        """The same talk, for a model whose answers are read in this form, with these tools."""
        history = self.history if form.thinks else tuple(replace(one, thought="") for one in self.history)
        return replace(self, form=form, tools=tools, history=history)

    def answer_message(self, text: str) -> Message:
        """An answer to it as a client knows it, and will say it again."""
        if self.form.plain:
            return Message(Role.ASSISTANT, text)
        answer = read(text, self.form)
        return Message(Role.ASSISTANT, answer.words, answer.calls)

    def holds(self, item: Item, told: Message) -> bool:
        """Whether an item of a session is this message."""
        if item.role is not told.role:
            return False
        return self.matches_answer(item.text, told) if told.role is Role.ASSISTANT else item.text == told.text

    def matches_answer(self, text: str, told: Message) -> bool:
        """Whether the history's text of an answer is what a client tells as ``told``."""
        return (text == told.text and not told.calls) or _alike(self.answer_message(text), told)


class NamedTalk:
    """A talk and its names, digests of what is said. All of it is read once, when this is made.

    They are blake2b over lengths and bytes, so that no two talks run together, and stand in histories: what was said
    has the same names in every release.
    """

    def __init__(self, talk: Transcript, scope: bytes) -> None:
        """``scope``: names the caller, for whom alone ``before`` and ``after`` are."""
        kind = b"drops" if talk.drops_oldest else b""
        for_all, own = (hashlib.blake2b(start + kind, digest_size=16) for start in (b"", scope))

        def add(data: bytes) -> None:
            for_all.update(data)
            own.update(data)

        self.talk = talk
        self.end: tuple[str, Message] | None = None
        """Mark of the last answer of the history, and the answer; None: there is none."""
        add(_framed(Message(Role.SYSTEM, talk.beginning)))
        for number, one in enumerate(talk.history, 1):
            if number == len(talk.history):
                self.end = for_all.hexdigest(), one
            add(_framed(one))
        self.history_key = own.digest()
        """Names the history, for one caller."""
        for one in talk.new:
            add(_framed(one))
        self.mark = for_all.hexdigest()
        """Names all that is said before the answer, for the service to find the turn by."""
        self._own = own

    def key_after(self, answer: str) -> bytes:
        """Names what will be the history once ``answer`` is in it, for one caller."""
        found = self._own.copy()
        found.update(_framed(self.talk.answer_message(answer)))
        return found.digest()


def text_of(content: Content, param: str) -> str:
    """The text of a content. Raises HttpFailure for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise unsupported_field(
                f"{param}[{number}]", f"parts of type {part.type!r} are not supported: text only"
            )
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise invalid_field(f"{param}[{number}].text", "is missing", "missing_required_parameter")
        texts.append(text)
    return "".join(texts)


def parse_message(role: str, content: Content, param: str) -> Message:
    """One message of a request."""
    if role not in ROLES:
        raise unsupported_field(f"{param}.role", f"{role!r} is not supported: one of {', '.join(ROLES)}")
    if content is None and ROLES[role] is not Role.ASSISTANT:
        raise invalid_field(f"{param}.content", "is missing", "missing_required_parameter")
    return Message(ROLES[role], text_of(content, f"{param}.content"))


def parse_function_call(name: str, arguments: str, call_id: str, param: str) -> FunctionCall:
    """A call in an earlier answer. Raises HttpFailure when its arguments are no JSON object."""
    if not is_json_object(arguments or "{}"):
        raise invalid_field(f"{param}.arguments", "must be a JSON object")
    return FunctionCall(name, arguments or "{}", call_id)


def make_transcript(messages: Sequence[Message], param: str) -> Transcript:
    """System prompt, history and new messages. Raises HttpFailure when there is nothing to answer."""
    first = next((n for n, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages))
    last = max((n for n, one in enumerate(messages) if one.role is Role.ASSISTANT), default=first - 1)
    new = tuple(messages[last + 1 :])
    if not new and messages and first == len(messages):
        # A system prompt alone is answered, as the model's template has it.
        return Transcript("", (), (Message(Role.SYSTEM, "\n\n".join(one.text for one in messages)),))
    if not new:
        raise invalid_field(param, "there is nothing to answer: the last message must not be the assistant's")
    system = "\n\n".join(one.text for one in messages[:first])
    return Transcript(system, tuple(messages[first : last + 1]), new)


def _framed(said: Message) -> bytes:
    """What is said, and how long it is."""
    data = said.text.encode("utf-8", "surrogatepass")
    parts = [b"%d:%d:" % (_NUMBERS[said.role], len(data)), data]
    for call in said.calls:
        # Not the ids, which clients may change, nor the arguments' white space.
        data = f"{call.name} {_canonical(call.arguments)}".encode("utf-8", "surrogatepass")
        parts += [b"call:%d:" % len(data), data]
    return b"".join(parts)


def _alike(one: Message, other: Message) -> bool:
    """Whether two answers say the same: white space around words with calls belongs to nobody, see ``SpeechReader``."""
    named = [[(call.name, _canonical(call.arguments)) for call in each.calls] for each in (one, other)]
    return one.text.strip() == other.text.strip() and named[0] == named[1]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
