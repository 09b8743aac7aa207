"""The messages of a request: roles, and texts that may come in parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from pensieve.client import CallingMessage, FunctionCall, InputLike, Role, ToolResult
from pensieve.client.arguments import Overflow
from pensieve.http.common.failures import invalid_field, unsupported_field
from pensieve.speech import CLOSE_THOUGHT, OPEN_THOUGHT, PLAIN, SpeechForm, is_json_object, read

ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_NUMBERS: Final = {role: role.number for role in Role}
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart] | None


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""
    """Id of the call that this result belongs to."""
    thought: str = ""
    is_summary: bool = False
    """A system message that stands for the conversation before it, which is not read."""

    @property
    def sdk_input(self) -> InputLike:
        text = (
            f"{OPEN_THOUGHT}\n{self.thought}\n{CLOSE_THOUGHT}\n\n{self.text}" if self.thought else self.text
        )
        if self.calls:
            return CallingMessage(self.calls, text)
        return ToolResult(text, self.call_id) if self.role is Role.TOOL else (self.role, text)


@dataclass(frozen=True, slots=True)
class MessageHistory:
    """A conversation as the client sends it."""

    system: str
    """System and developer messages at the beginning, joined by empty lines."""
    history: tuple[Message, ...]
    """The messages up to the last answer."""
    new: tuple[Message, ...]
    tools: str = ""
    summary: str = ""
    """Stands behind ``system`` for messages that were compacted."""
    subject: str = ""
    """The person whom its session is about."""
    form: SpeechForm = PLAIN
    drops_oldest: bool = False
    """Whether its session drops the oldest turns when the context is full. Other conversations never continue
    in such a session."""

    @property
    def preamble(self) -> str:
        """The text before the messages. Transcripts that differ in it are never the same conversation."""
        parts = self.system, self.tools, self.summary, self.subject
        if any("\0" in part for part in parts):  # their lengths tell them apart
            return "\0".join(("", *(str(len(part)) for part in parts), *parts))
        text = f"{self.system}\0{self.tools}" if self.tools else self.system
        text = f"{text}\0\0{self.summary}" if self.summary else text
        return f"{text}\0subject\0{self.subject}" if self.subject else text

    def with_form(self, form: SpeechForm, tools: str) -> MessageHistory:
        """Return the transcript for a model whose answers have this form, with these tools."""
        history = self.history if form.thinks else tuple(replace(one, thought="") for one in self.history)
        return replace(self, form=form, tools=tools, history=history)

    def answer_message(self, text: str) -> Message:
        """Return an answer as the client receives it, and will resend it."""
        if self.form.plain:
            return Message(Role.ASSISTANT, text)
        answer = read(text, self.form)
        return Message(Role.ASSISTANT, answer.words, answer.calls)

    def matches_answer(self, text: str, message: Message) -> bool:
        """Whether the history's text of an answer is the one that the client sends as ``message``."""
        return (text == message.text and not message.calls) or _same_answer(
            self.answer_message(text), message
        )


def overflow_policy(*, drops_oldest: bool) -> Overflow:
    return "drop_oldest_turns" if drops_oldest else "reject"


class HashedHistory:
    """A transcript and digests of its beginnings, computed once when this is made.

    They are blake2b over lengths and bytes, so different transcripts never collide by concatenation. The
    service stores them, so every release must compute the same ones.
    """

    def __init__(self, transcript: MessageHistory, scope: bytes) -> None:
        """``scope`` identifies the caller; ``history_key`` and ``key_after`` are valid for that caller only."""
        kind = b"drops" if transcript.drops_oldest else b""
        for_all, own = (hashlib.blake2b(start + kind, digest_size=16) for start in (b"", scope))

        def add(data: bytes) -> None:
            for_all.update(data)
            own.update(data)

        self.transcript = transcript
        self.last_answer: tuple[str, Message] | None = None
        add(_frame(Message(Role.SYSTEM, transcript.preamble)))
        frames = _frames((*transcript.history, *transcript.new))
        for number, one in enumerate(transcript.history, 1):
            if number == len(transcript.history):
                self.last_answer = for_all.hexdigest(), one
            add(next(frames))
        self.history_key = own.digest()
        for frame in frames:
            add(frame)
        self.mark = for_all.hexdigest()
        """Identifies all messages before the answer; the service finds the turn by it."""
        self._own = own

    def key_after(self, answer: str) -> bytes:
        """Return the ``history_key`` that the next request has after ``answer``."""
        found = self._own.copy()
        found.update(_frame(self.transcript.answer_message(answer)))
        return found.digest()


def text_of(content: Content, param: str) -> str:
    """Return the text of a content. Raises HttpFailure for parts that are not text."""
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
    """Return one message of a request. Raises HttpFailure for a role that is not known and for content that is
    not text."""
    if role not in ROLES:
        raise unsupported_field(f"{param}.role", f"{role!r} is not supported: one of {', '.join(ROLES)}")
    if content is None and ROLES[role] is not Role.ASSISTANT:
        raise invalid_field(f"{param}.content", "is missing", "missing_required_parameter")
    return Message(ROLES[role], text_of(content, f"{param}.content"))


def parse_function_call(name: str, arguments: str, call_id: str, param: str) -> FunctionCall:
    """Return a call in an earlier answer. Raises HttpFailure when its arguments are not a JSON object."""
    if not is_json_object(arguments or "{}"):
        raise invalid_field(f"{param}.arguments", "must be a JSON object")
    return FunctionCall(name, arguments or "{}", call_id)


def make_history(messages: Sequence[Message], param: str, *, answered: bool = False) -> MessageHistory:
    """Split messages into system prompt, summary, history and new messages. Raises HttpFailure when there is nothing
    to answer, unless the conversation may be ``answered``."""
    first = next((n for n, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages))
    last = max((n for n, one in enumerate(messages) if one.role is Role.ASSISTANT), default=first - 1)
    new = tuple(messages[last + 1 :])
    summary = next((one.text for one in messages[:first] if one.is_summary), "")
    system = "\n\n".join(one.text for one in messages[:first] if not one.is_summary)
    if not new and system and not summary and first == len(messages):
        # A system prompt alone is answered, as the model's template allows.
        return MessageHistory("", (), (Message(Role.SYSTEM, system),))
    if not new and not answered:
        raise invalid_field(param, "there is nothing to answer: the last message must not be the assistant's")
    return MessageHistory(system, tuple(messages[first : last + 1]), new, summary=summary)


def _frames(messages: Sequence[Message]) -> Iterator[bytes]:
    """Encode each message. Clients may change ids, but not which call a result belongs to: some templates write that.
    A result is told from others by its call only if results do not come in the order of the calls."""
    places: dict[str, int] = {}
    due = 0
    for one in messages:
        if one.role is Role.ASSISTANT:
            places, due = {call.id: place for place, call in enumerate(one.calls)}, 0
        link = b""
        if one.role is Role.TOOL:
            place = places.get(one.call_id)
            if one.call_id and place != due:
                name = one.call_id if place is None else str(place)
                link = f"for:{place is None}:{len(name)}:{name}".encode("utf-8", "surrogatepass")
            due += 1
        yield _frame(one) + link


def _frame(said: Message) -> bytes:
    """Encode a message with its lengths."""
    data = said.text.encode("utf-8", "surrogatepass")
    parts = [b"%d:%d:" % (_NUMBERS[said.role], len(data)), data]
    for call in said.calls:
        # Without the ids, which clients may change, and the arguments' white space.
        data = f"{call.name} {_canonical(call.arguments)}".encode("utf-8", "surrogatepass")
        parts += [b"call:%d:" % len(data), data]
    return b"".join(parts)


def _same_answer(one: Message, other: Message) -> bool:
    """Whether two answers say the same. White space around their text is ignored where they have calls:
    ``SpeechReader`` drops it."""
    texts = [each.text.strip() if each.calls else each.text for each in (one, other)]
    named = [[(call.name, _canonical(call.arguments)) for call in each.calls] for each in (one, other)]
    return texts[0] == texts[1] and named[0] == named[1]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
