"""Checked bodies of ``POST /v1/responses``."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from pensieve.client import Role, TurnOptions
from pensieve.http.common.answers import MAX_TOP_LOGPROBS
from pensieve.http.common.contents import Content, Message, parse_function_call, parse_message, text_of
from pensieve.http.common.failures import invalid_field, unsupported_field
from pensieve.http.common.requests import (
    REFUSED_EVERYWHERE,
    VLLM_FIELDS,
    CacheOptions,
    Nested,
    Positive,
    SamplingFields,
    TextFormat,
    WantedForm,
    add_form,
    check_count,
)
from pensieve.http.tools import OfferedTool, call_options, check_tools

REFERENCE: Final = "item_reference"
COMPACTION: Final = "compaction"
DEFAULT_THRESHOLD: Final = 0.75
"""Share of the context limit at which ``context_management`` without a threshold compacts."""
MAX_METADATA: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512


class InputItem(msgspec.Struct, frozen=True):
    """An item of the input. Unknown types are refused by name."""

    type: str = "message"
    role: str | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    id: str | None = None
    encrypted_content: str | None = None


class InConversation(msgspec.Struct, frozen=True):
    id: str


class TextOptions(msgspec.Struct, frozen=True):
    NESTED: ClassVar[Nested] = {"format": TextFormat}
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseCacheOptions(CacheOptions, frozen=True):
    """``prewarm``: have the context computed, and answer nothing."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "comparison_response_id": "usage says how much was read from the cache"
    }
    prewarm: bool | None = None


class ContextManagement(msgspec.Struct, frozen=True):
    type: Literal["compaction"]
    compact_threshold: Positive | None = None


class ValidatedResponse(NamedTuple):
    body: ResponseRequest
    messages: list[Message]
    options: TurnOptions
    refers: bool = False
    """Whether referenced items must be read first; then ``messages`` is empty."""


class ResponseRequest(SamplingFields, kw_only=True):
    NESTED: ClassVar[Nested] = {
        "context_management": ContextManagement,
        "prompt_cache_options": ResponseCacheOptions,
        "text": TextOptions,
        "tools": OfferedTool,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "client_metadata": "clients are not distinguished",
        "include": "except message.output_text.logprobs, its values do not occur",
        "max_tool_calls": "the server runs no tools",
        "prompt_cache_key": "prefixes are shared without it",
        "reasoning": "the chat template decides whether the model thinks",
        "safety_identifier": "users are not distinguished",
        "service_tier": "there is only one",
        "stream_options": "events are never padded",
        "user": "users are not distinguished",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        **dict.fromkeys(VLLM_FIELDS, "belongs to the other endpoints: the form of a response is text.format"),
        "response_format": "is text.format in responses",
        "best_of": "belongs to completions",
        "logit_bias": "belongs to the other endpoints",
        "logprobs": 'is include: ["message.output_text.logprobs"] in responses',
        "max_completion_tokens": "is max_output_tokens in responses",
        "max_tokens": "is max_output_tokens in responses",
        "messages": "are input in responses",
        "n": "a response has one answer",
        "reasoning_effort": "is reasoning.effort in responses",
        "session": "belongs to chat completions; use conversation",
        "stop": "belongs to the other endpoints; stop_token_ids is honoured",
        "verbosity": "is text.verbosity in responses",
    }
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | InConversation | None = None
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    context_management: list[ContextManagement] | None = None
    max_output_tokens: Positive | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    parallel_tool_calls: bool | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Any = None
    text: TextOptions | None = None
    reasoning: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    subject: str | None = None

    def validated(self) -> ValidatedResponse:
        self.check()
        if isinstance(self.input, list) and any(one.type == REFERENCE for one in self.input):
            check_count(self.input, "input")
            return ValidatedResponse(self, [], self.turn_options, refers=True)
        return ValidatedResponse(self, self.messages, self.turn_options)

    def check(self) -> None:
        if self.conversation is not None and self.previous_response_id is not None:
            raise invalid_field(
                "previous_response_id", "cannot be combined with conversation", "mutually_exclusive"
            )
        if self.conversation is not None and not self.stored:
            raise invalid_field("store", "a response in a conversation is always stored")
        if self.background and not self.stored:
            raise invalid_field("background", "needs store: otherwise the answer could not be fetched")
        if self.truncation not in (None, "auto", "disabled"):
            raise invalid_field("truncation", "must be auto or disabled")
        check_tools(self.tools or (), self.tool_choice)
        if self.prewarms and (self.stream or self.background):
            raise invalid_field(
                "prompt_cache_options.prewarm", "cannot be combined with stream or background"
            )
        if self.prompt is not None:
            raise unsupported_field("prompt", "stored prompts are not supported")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise invalid_field("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        check_metadata(self.metadata or {})

    @property
    def prewarms(self) -> bool:
        return self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)

    def compact_threshold(self, context_limit: int) -> int | None:
        """Tokens of context from which on the conversation is compacted before this response; None: never."""
        given = [
            one.compact_threshold or int(DEFAULT_THRESHOLD * context_limit)
            for one in self.context_management or ()
        ]
        return min(given, default=None)

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def is_branch(self) -> bool:
        """Whether it is the end of a branch: it is not stored, and its client does not send the conversation again."""
        return not self.stored and self.previous_response_id is not None

    @property
    def drops_oldest(self) -> bool:
        """Whether the oldest turns are dropped when the context is full."""
        return self.truncation == "auto"

    @property
    def scored(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def conversation_id(self) -> str | None:
        found = self.conversation
        return found.id if isinstance(found, InConversation) else found

    @property
    def form(self) -> WantedForm | None:
        """The form of the answer. Raises HttpFailure for one that does not exist."""
        given = self.text.format if self.text is not None else None
        return given.wanted("text.format") if given is not None else None

    @property
    def messages(self) -> list[Message]:
        if isinstance(self.input, str):
            return [parse_message("user", self.input, "input")]
        if not self.input:
            if self.prewarms and (self.previous_response_id or self.conversation):
                return []
            raise invalid_field("input", "must not be empty")
        check_count(self.input, "input")
        found = messages_of(self.input, "input")
        if (self.previous_response_id or self.conversation) and any(one.is_summary for one in found):
            raise invalid_field(
                "input",
                "a compaction item begins a conversation: leave out previous_response_id and conversation",
            )
        return found

    @property
    def turn_options(self) -> TurnOptions:
        options = self.options()
        options.update(call_options(self.tools or (), self.tool_choice, self.parallel_tool_calls))
        add_form(options, self.form, self.tool_choice)
        if self.max_output_tokens is not None:
            options["max_output_tokens"] = self.max_output_tokens
        if self.scored:
            options["top_logprobs"] = self.top_logprobs or 0
        if self.is_branch:
            options["session_finished"] = True
        if self.background:
            options["on_disconnect"] = "finish"
            options["max_chunk_tokens"] = 1  # so that an event's number does not depend on timing
        return options


class CompactRequest(msgspec.Struct, kw_only=True):
    """A body of ``POST /v1/responses/compact``."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": "prefixes are shared without it",
        "prompt_cache_options": "the compacted context is computed in any case",
        "prompt_cache_retention": "the compacted context is computed in any case",
        "service_tier": "there is only one",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {"image": "pictures are not supported"}
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    subject: str | None = None

    def validated(self) -> ValidatedResponse:
        body = ResponseRequest(
            model=self.model,
            input=self.input,
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            subject=self.subject,
        )
        if not self.input and self.previous_response_id:
            return ValidatedResponse(body, [], {})
        return body.validated()


def messages_of(items: Sequence[InputItem], param: str) -> list[Message]:
    """Return items as messages. The items of one answer, without reasoning, become one message. Raises
    HttpFailure."""
    found: list[Message] = []
    parts: list[Message] = []
    """Parts of an answer. They are joined once: there may be thousands."""
    has_calls = False
    for number, item in enumerate(items):
        if item.type == COMPACTION:
            found, parts, has_calls = _compacted(item, found, f"{param}[{number}]"), [], False
            continue
        one = _said(item, f"{param}[{number}]")
        if one is None:
            continue
        if parts and not (one.role is Role.ASSISTANT and (one.calls or has_calls)):
            found.append(_joined(parts))
            parts, has_calls = [], False
        if one.role is Role.ASSISTANT:
            parts.append(one)
            has_calls = has_calls or bool(one.calls)
        else:
            found.append(one)
    return [*found, _joined(parts)] if parts else found


def _joined(parts: Sequence[Message]) -> Message:
    text = "".join(one.text for one in parts)
    return Message(Role.ASSISTANT, text, tuple(call for one in parts for call in one.calls))


def _said(item: InputItem, param: str) -> Message | None:
    """Return an item as a message; None for reasoning, which the model does not read again: the history has its
    thoughts."""
    match item.type:
        case "message":
            if item.role is None:
                raise invalid_field(f"{param}.role", "is missing")
            return parse_message(item.role, item.content, param)
        case "reasoning":
            return None
        case "function_call":
            if not item.name:
                raise invalid_field(f"{param}.name", "is missing")
            call = parse_function_call(item.name, item.arguments or "", item.call_id or "", param)
            return Message(Role.ASSISTANT, "", (call,))
        case "function_call_output":
            if item.output is None:
                raise invalid_field(f"{param}.output", "is missing")
            return Message(Role.TOOL, text_of(item.output, f"{param}.output"), call_id=item.call_id or "")
    raise unsupported_field(param, f"items of type {item.type!r} are not supported")


_COMPACTED: Final = "pensieve1."


class CarriedItem(InputItem, frozen=True, omit_defaults=True):
    """An item of an input within a compaction item."""


def _carried(message: Message) -> list[CarriedItem]:
    """Return a message as the items that ``messages_of`` makes it from."""
    if message.role is Role.TOOL:
        return [CarriedItem("function_call_output", output=message.text, call_id=message.call_id)]
    calls = [
        CarriedItem("function_call", name=one.name, arguments=one.arguments, call_id=one.id)
        for one in message.calls
    ]
    said = [CarriedItem(role=message.role.value, content=message.text)] if message.text or not calls else []
    return said + calls


def with_instructions(system: str, instructions: str | None) -> str:
    """Return the system prompt of a response. ``system``: the system messages of its conversation."""
    return "\n\n".join(part for part in (instructions, system) if part)


def without_instructions(prompt: str, instructions: str | None) -> str:
    """Return the ``system`` that ``with_instructions`` made ``prompt`` of."""
    if not instructions:
        return prompt
    return "" if prompt == instructions else prompt.removeprefix(f"{instructions}\n\n")


class CompactedContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation without its earlier messages: the content of a compaction item. It is encoded, not encrypted."""

    summary: str
    system: str = ""
    """The system messages of its input, for a client that keeps the item only."""
    new: tuple[CarriedItem, ...] = ()
    """The input of the response that the item is returned with: clients have it before the item."""

    @classmethod
    def from_prompt(
        cls, prompt: str, instructions: str | None, summary: str, new: Sequence[Message] = ()
    ) -> CompactedContext:
        """``prompt``: the session's system prompt. ``instructions`` at its beginning belong to one response."""
        carried = tuple(item for one in new for item in _carried(one))
        return cls(summary, without_instructions(prompt, instructions), carried)

    @property
    def content(self) -> str:
        return _COMPACTED + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def parse(cls, content: str | None, param: str) -> CompactedContext:
        """``param``: name of the content. Raises HttpFailure for any other content."""
        try:
            data = base64.b64decode((content or "").removeprefix(_COMPACTED), b"-_", validate=True)
            context = msgspec.json.decode(data, type=cls)
        except (binascii.Error, ValueError, RecursionError) as error:
            raise invalid_field(param, "was not made by such a server: send the messages instead") from error
        if not context.summary.strip():
            raise invalid_field(param, "has no summary")
        return context

    def messages(self, param: str) -> list[Message]:
        """Return ``new`` as messages. It comes from a client, and is checked as any input. Raises HttpFailure."""
        check_count(self.new, param)
        if any(one.type == COMPACTION for one in self.new):
            raise invalid_field(param, "has a compaction item in it")
        return messages_of(self.new, param)


def compaction_item(name: str, content: str) -> dict[str, Any]:
    """Return the output item that stands for a conversation."""
    return {"id": f"cmp_{name}", "type": COMPACTION, "encrypted_content": content}


def _compacted(item: InputItem, before: Sequence[Message], param: str) -> list[Message]:
    """Return a compaction item as messages, given those before it: of these, only the system messages at the
    beginning are read."""
    param = f"{param}.encrypted_content"
    context = CompactedContext.parse(item.encrypted_content, param)
    given = list(itertools.takewhile(lambda m: m.role is Role.SYSTEM and not m.is_summary, before))
    if context.system and not given:
        given.append(Message(Role.SYSTEM, context.system))
    return [*given, Message(Role.SYSTEM, context.summary, is_summary=True), *context.messages(param)]


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise HttpFailure when it exceeds the protocol's limits."""
    if len(metadata) > MAX_METADATA:
        raise invalid_field("metadata", f"has more than {MAX_METADATA} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise invalid_field(
                "metadata", f"keys have at most {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}"
            )
