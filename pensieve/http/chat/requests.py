"""Bodies of ``POST /v1/chat/completions``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import msgspec

from pensieve.client import Role, TurnOptions
from pensieve.http.common import fields
from pensieve.http.common.contents import Content, Said, Talk, called, said, talk_of, text_of
from pensieve.http.common.failures import bad, unsupported
from pensieve.http.common.logprobs import MAX_TOP
from pensieve.http.common.requests import ChunkOptions, Drawing, Positive, by_token, check_number
from pensieve.http.tools.definitions import OfferedTool, call_options, check_tools


class ChatFunction(msgspec.Struct, frozen=True):
    """What was called."""

    name: str
    arguments: str = "{}"


class ChatCall(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    function: ChatFunction
    type: str = "function"
    id: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message of the history that the client resends."""

    role: str
    content: Content = None
    name: str | None = None
    tool_calls: list[ChatCall] | None = None
    function_call: Any = None
    audio: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of ``reasoning_content``."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """Form of the answer."""

    type: str = "text"


class AskedChat(NamedTuple):
    """A checked request, and what is made of it."""

    body: ChatRequest
    talk: Talk
    options: TurnOptions
    """For the SDK."""


class ChatRequest(Drawing, kw_only=True):
    """The request; ``session`` is not OpenAI's."""

    NESTED: ClassVar[fields.Nested] = {
        **Drawing.NESTED,
        "stream_options": ChunkOptions,
        "tools": OfferedTool,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_prompt": "cached state is used wherever there is some",
        "chat_id": "histories are found by what they say",
        "metadata": "a completion is told once",
        "prediction": "it makes an answer faster, not another one",
        "prompt_cache_key": "beginnings are shared whatever it says",
        "reasoning": "the model thinks as its template has it",
        "reasoning_effort": "the model thinks as its template has it",
        "safety_identifier": "users are not told apart",
        "service_tier": "there is one",
        "session_id": "histories are found by what they say",
        "store": "histories are kept for a day, whatever it says",
        "user": "users are not told apart",
        "verbosity": "the model knows of none",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **fields.REFUSED,
        "best_of": "belongs to completions",
        "conversation": "belongs to responses",
        "echo": "belongs to completions",
        "function_call": "function calls go by tools and tool_choice",
        "max_output_tokens": "is max_completion_tokens in chat completions",
        "previous_response_id": "belongs to responses",
        "suffix": "belongs to completions",
        "text": "belongs to responses",
    }
    messages: list[Message]
    model: str | None = None
    stream: bool | None = False
    stream_options: ChunkOptions | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[OfferedTool] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    session: str | None = None

    def asked(self) -> AskedChat:
        """Raises HttpFailure as ``check``, and for messages that cannot be."""
        self.check()
        return AskedChat(self, self.talk, self.turn_options)

    def check(self) -> None:
        """Raises HttpFailure for what is asked for and not done."""
        if not self.messages:
            raise bad("messages", "must not be empty")
        check_number(self.messages, "messages")
        check_tools(self.tools or (), self.tool_choice)
        if self.functions:
            raise unsupported("functions", "function calls are not supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", "needs logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP:
            raise bad("top_logprobs", f"must be from 0 to {MAX_TOP}")
        if self.response_format is not None and self.response_format.type != "text":
            raise unsupported("response_format", "only text is supported")
        if self.modalities and self.modalities != ["text"]:
            raise unsupported("modalities", "only text is supported")
        if self.audio is not None:
            raise unsupported("audio", "only text is supported")
        if self.web_search_options is not None:
            raise unsupported("web_search_options", "searching is not supported")

    @property
    def talk(self) -> Talk:
        """What was said."""
        spoken = [_said(one, f"messages[{number}]") for number, one in enumerate(self.messages)]
        return talk_of(spoken, "messages")

    @property
    def turn_options(self) -> TurnOptions:
        """For the SDK."""
        options = self.options()
        options.update(call_options(self.tools or (), self.tool_choice, self.parallel_tool_calls))
        longest = self.max_completion_tokens or self.max_tokens
        if longest is not None:
            options["max_output_tokens"] = longest
        if self.stop:
            check_number([self.stop] if isinstance(self.stop, str) else self.stop, "stop")
            options["stop"] = self.stop
        if self.n is not None and self.n > 1:
            options["candidates"] = self.n
        if self.logit_bias:
            options["logit_bias"] = by_token(self.logit_bias)
        if self.logprobs:
            options["top_logprobs"] = self.top_logprobs or 0
        return options


def _said(message: Message, param: str) -> Said:
    if message.function_call is not None:
        raise unsupported(f"{param}.function_call", "calls are told as tool_calls")
    if message.audio is not None:
        raise unsupported(f"{param}.audio", "only text is supported")
    if message.role == "tool":
        text = text_of(message.content, f"{param}.content")
        return Said(Role.TOOL, text, call_id=message.tool_call_id or "")
    found = said(message.role, message.content, param)
    if found.role is Role.ASSISTANT:
        found = replace(found, thought=(message.reasoning_content or message.reasoning or "").strip("\n"))
    if not message.tool_calls:
        return found
    if found.role is not Role.ASSISTANT:
        raise bad(f"{param}.tool_calls", "only the assistant calls functions")
    calls = [
        called(one.function.name, one.function.arguments, one.id, f"{param}.tool_calls[{number}].function")
        for number, one in enumerate(message.tool_calls)
    ]
    return replace(found, calls=tuple(calls))
