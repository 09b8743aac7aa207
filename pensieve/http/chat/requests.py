"""Bodies of ``POST /v1/chat/completions``, checked."""

from __future__ import annotations

from typing import Any

import msgspec

from pensieve.client import TurnOptions
from pensieve.http.common.contents import Content, Talk, said, talk_of
from pensieve.http.common.failures import bad, unsupported
from pensieve.http.common.logprobs import MAX_TOP
from pensieve.http.common.requests import ChunkOptions, Drawing, Positive, by_token


class Message(msgspec.Struct, frozen=True):
    """One message of the history that the client resends."""

    role: str
    content: Content = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Form of the answer."""

    type: str = "text"


class ChatRequest(Drawing, kw_only=True):
    """The request; ``session`` is not OpenAI's. Fields that are not here are ignored."""

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
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    session: str | None = None

    def check(self) -> None:
        """Raises HttpFailure for what is asked for and not done."""
        if not self.messages:
            raise bad("messages", "must not be empty")
        if self.tools and self.tool_choice != "none":
            raise unsupported("tools", "tool calls are not supported")
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
        for number, message in enumerate(self.messages):
            if message.tool_calls:
                raise unsupported(f"messages[{number}].tool_calls", "tool calls are not supported")

    @property
    def talk(self) -> Talk:
        """What was said."""
        spoken = [
            said(one.role, one.content, f"messages[{number}]") for number, one in enumerate(self.messages)
        ]
        return talk_of(spoken, "messages")

    @property
    def turn_options(self) -> TurnOptions:
        """For the SDK."""
        options = self.options()
        longest = self.max_completion_tokens or self.max_tokens
        if longest is not None:
            options["max_output_tokens"] = longest
        if self.stop:
            options["stop"] = self.stop
        if self.n is not None and self.n > 1:
            options["candidates"] = self.n
        if self.logit_bias:
            options["logit_bias"] = by_token(self.logit_bias)
        if self.logprobs:
            options["top_logprobs"] = self.top_logprobs or 0
        return options
