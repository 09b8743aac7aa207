"""``POST /v1/messages``, Anthropic's protocol: the client resends its history, as with chat completions."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import AsyncTurnStream, FinishReason, Role, Turn, TurnOptions, Usage
from pensieve.errors import DataLoss, PensieveError
from pensieve.http.common.answers import (
    EventStream,
    SentText,
    cached_tokens,
    cancel_on_disconnect,
    is_truncated,
    sse_event,
)
from pensieve.http.common.calls import Call, count_ahead
from pensieve.http.common.contents import (
    Content,
    HashedHistory,
    Message,
    MessageHistory,
    make_history,
    parse_function_call,
    text_of,
)
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import (
    HttpFailure,
    failure_from_error,
    invalid_field,
    unsupported_field,
)
from pensieve.http.common.heads import TurnStarter, note_before_end, raise_unless_gone
from pensieve.http.common.requests import (
    REFUSED_EVERYWHERE,
    Nested,
    Positive,
    SamplingFields,
    WantedForm,
    add_form,
    check_count,
    named_form,
)
from pensieve.http.output import call_id
from pensieve.http.responses.chain import ResponseStarter, StartedResponse
from pensieve.http.responses.ids import ResponseId
from pensieve.http.responses.requests import ResponseRequest, ValidatedResponse
from pensieve.http.tools import FunctionDefinition, OfferedTool, call_options, check_tools, tool_use
from pensieve.speech import AnswerPart, FunctionCall, SpeechForm, SpeechReader, Thought, Words, read

PATH: Final = "/v1/messages"
_BILLING: Final = "x-anthropic-billing-header:"
"""Begins a system block in which Claude Code sends a digest of the request, for Anthropic only. It differs in
each request, so every conversation would look like another one."""


class Block(msgspec.Struct, frozen=True):
    """A content block. Unknown types are refused by name."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Content = None


class BlockMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [Block("text", self.content)] if isinstance(self.content, str) else self.content


class ClientTool(msgspec.Struct, frozen=True):
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_control": "reusable prefixes are found without it",
        "eager_input_streaming": "the arguments of a call come once they are complete",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "allowed_callers": "only the model calls functions",
        "defer_loading": "is not supported: the model sees all tools",
        "input_examples": "are not supported: put them into the description",
    }
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class BlockToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"budget_tokens": "max_tokens bounds thoughts, too"}
    type: Literal["adaptive", "disabled", "enabled"]
    display: Literal["omitted", "summarized"] | None = None


class MessageThread(msgspec.Struct, frozen=True):
    """``continue``: ``messages`` are only new ones, and the session has the others."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class BlockFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    NESTED: ClassVar[Nested] = {"format": BlockFormat}
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"effort": "the model has no such setting"}
    format: BlockFormat | None = None


class ValidatedMessages(NamedTuple):
    body: MessagesRequest
    transcript: MessageHistory
    tools: list[OfferedTool]
    choice: Any
    """``tool_choice`` as OpenAI writes it."""
    options: TurnOptions

    @property
    def form(self) -> WantedForm | None:
        given = self.body.output_config.format if self.body.output_config is not None else None
        return None if given is None else WantedForm("output_config.format", "schema", given.schema)

    @property
    def shows_thoughts(self) -> bool:
        return self.body.thinking is None or self.body.thinking.display != "omitted"


class MessagesRequest(SamplingFields, kw_only=True):
    NESTED: ClassVar[Nested] = {
        **SamplingFields.NESTED,
        "output_config": OutputConfig,
        "thinking": Thinking,
        "thread": MessageThread,
        "tool_choice": BlockToolChoice,
        "tools": ClientTool,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_control": "reusable prefixes are found without it",
        "diagnostics": "usage says how much was read from the cache",
        "inference_geo": "there is only one place",
        "metadata": "users are not distinguished",
        "service_tier": "there is only one",
        "speed": "there is only one",
        "user_profile_id": "users are not distinguished",
        "workspace_id": "the key says whose sessions they are",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "container": "is not supported: the server runs no tools",
        "context_management": "is not supported: the context is never edited",
        "fallbacks": "are not supported: one model is served",
        "max_completion_tokens": "is max_tokens in messages",
        "max_output_tokens": "is max_tokens in messages",
        "mcp_servers": "are not supported: the server runs no tools",
        "n": "a message has one answer",
        "output_format": "is output_config.format",
        "response_format": "is output_config.format in messages",
        "stop": "is stop_sequences in messages",
    }
    model: str | None = None
    messages: list[BlockMessage]
    max_tokens: Positive | None = None
    """Only counting does without it."""
    system: str | list[Block] | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: BlockToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: MessageThread | None = None
    subject: str | None = None
    """Not Anthropic's."""

    def validated(self) -> ValidatedMessages:
        """Raises HttpFailure for what cannot be answered."""
        if self.max_tokens is None:
            raise invalid_field("max_tokens", "is missing", "missing_required_parameter")
        if self.continues:
            self._check_continuing()
        return self._validated()

    def counted(self) -> ValidatedMessages:
        """As ``validated``, for a body whose tokens are counted."""
        if self.thread is not None:
            raise unsupported_field("thread", "is not counted: send all messages")
        return self._validated()

    @property
    def continues(self) -> bool:
        return self.thread is not None and self.thread.type == "continue"

    def _check_continuing(self) -> None:
        for name in ("system", "tools"):
            if getattr(self, name) is not None:
                raise invalid_field(name, "belongs to the thread: leave it out, or begin a new thread")
        if any(one.role == "assistant" for one in self.messages):
            raise invalid_field("messages", "a thread is continued with new messages only")
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            failure = unsupported_field(
                "tool_choice", "does not go with a thread: send all messages and tools"
            )
            failure.details = {"error_code": "thread_unsupported_request", "unsupported": ["tool_choice"]}
            raise failure

    def _validated(self) -> ValidatedMessages:
        if not self.messages:
            raise invalid_field("messages", "must not be empty")
        check_count(self.messages, "messages")
        tools, choice = [_offered(one, f"tools[{n}]") for n, one in enumerate(self.tools or ())], self.choice
        check_tools(tools, choice)
        found = ValidatedMessages(self, self.transcript, tools, choice, self.options())
        given = self.tool_choice
        parallel = False if given is not None and given.disable_parallel_tool_use else None
        found.options.update(call_options(tools, choice, parallel))
        add_form(found.options, found.form, choice)
        if self.max_tokens is not None:
            found.options["max_output_tokens"] = self.max_tokens
        if self.stop_sequences:
            check_count(self.stop_sequences, "stop_sequences")
            found.options["stop"] = self.stop_sequences
        return found

    @property
    def choice(self) -> Any:
        match self.tool_choice:
            case None:
                return None
            case BlockToolChoice(type="any"):
                return "required"
            case BlockToolChoice(type="tool", name=name):
                if not name:
                    raise invalid_field("tool_choice.name", "is missing", "missing_required_parameter")
                return {"type": "function", "name": name}
            case BlockToolChoice(type=kind):
                return kind

    @property
    def transcript(self) -> MessageHistory:
        system = [Block("text", self.system)] if isinstance(self.system, str) else self.system or []
        texts = [_text(one, f"system[{number}]") for number, one in enumerate(system)]
        prompt = "".join(one for one in texts if not one.startswith(_BILLING))
        given = [Message(Role.SYSTEM, prompt)] if prompt else []
        for number, message in enumerate(self.messages):
            given += _messages_of(message, f"messages[{number}]")
        if self.continues:
            return MessageHistory("", (), tuple(given))
        return replace(make_history(given, "messages"), subject=self.subject or "")


def _offered(tool: ClientTool, param: str) -> OfferedTool:
    if tool.type not in (None, "custom"):  # one of Anthropic's own tools, which ``check_tools`` refuses
        return OfferedTool(tool.type)
    if tool.input_schema is None:
        raise invalid_field(f"{param}.input_schema", "is missing", "missing_required_parameter")
    return OfferedTool(
        "function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict)
    )


def _messages_of(message: BlockMessage, param: str) -> list[Message]:
    """Return one message of the request: each tool's result is a message of its own. Raises HttpFailure."""
    param = f"{param}.content"
    if message.role == "assistant":
        return [_answer(message.blocks, param)]
    roles = {"user": Role.USER, "system": Role.SYSTEM}
    if message.role not in roles:
        raise unsupported_field(
            param.replace("content", "role"), f"{message.role!r} is not supported: user, assistant or system"
        )
    if not message.blocks:
        raise invalid_field(param, "must not be empty")
    found: list[Message] = []
    numbered = enumerate(message.blocks)
    for is_result, group in itertools.groupby(numbered, lambda one: one[1].type == "tool_result"):
        if is_result and message.role == "user":
            found += [_result(block, f"{param}[{number}]") for number, block in group]
        else:
            texts = [_text(block, f"{param}[{number}]") for number, block in group]
            found.append(Message(roles[message.role], "".join(texts)))
    return found


def _result(block: Block, param: str) -> Message:
    if not block.tool_use_id:
        raise invalid_field(f"{param}.tool_use_id", "is missing", "missing_required_parameter")
    return Message(Role.TOOL, text_of(block.content, f"{param}.content"), call_id=block.tool_use_id)


def _text(block: Block, param: str) -> str:
    if block.type != "text":
        raise unsupported_field(param, f"blocks of type {block.type!r} are not supported here")
    if not block.text:
        raise invalid_field(f"{param}.text", "must not be empty")
    return block.text


def _answer(blocks: Sequence[Block], param: str) -> Message:
    """Return an earlier answer. It may be empty, as a model's answer may."""
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                if not block.name:
                    raise invalid_field(f"{place}.name", "is missing", "missing_required_parameter")
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(parse_function_call(block.name, arguments, block.id or "", place))
            case _:
                raise unsupported_field(place, f"blocks of type {block.type!r} are not supported here")
    return Message(Role.ASSISTANT, "".join(texts), tuple(calls), thought="".join(thoughts).strip("\n"))


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts. All tokens of a prompt that were not read from the cache were computed and are kept there,
    so ``input_tokens``, which counts neither, is 0."""
    read = cached_tokens(usage)
    return {
        "input_tokens": 0,
        "cache_creation_input_tokens": usage.context_tokens - read,
        "cache_read_input_tokens": read,
        "output_tokens": usage.output_tokens,
        "service_tier": "standard",
    }


def _stop_reason(turn: Turn, calls: int) -> str:
    if turn.finish_reason is FinishReason.CONTEXT_FULL:
        return "model_context_window_exceeded"
    if is_truncated(turn.finish_reason):
        return "max_tokens"
    if calls:
        return "tool_use"
    return "stop_sequence" if turn.finish_reason is FinishReason.STOP_SEQUENCE else "end_turn"


@dataclass(frozen=True, slots=True)
class BlockAnswer:
    turn: ResponseId
    model: str
    form: SpeechForm
    shows_thoughts: bool

    @property
    def id(self) -> str:
        """The message's id. A thread continues after it."""
        return str(self.turn).replace("resp_", "msg_", 1)

    def whole(self, turn: Turn) -> dict[str, Any]:
        parts = read(turn.text, self.form).parts
        content, calls = [], 0
        for part in parts:
            content.append(self.block(part, calls))
            calls += isinstance(part, FunctionCall)
        return {**self.frame(turn.usage), "content": content, **self.end(turn, calls)}

    def frame(self, usage: Usage) -> dict[str, Any]:
        """Return the message as it begins."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def end(self, turn: Turn, calls: int) -> dict[str, Any]:
        reason = _stop_reason(turn, calls)
        return {
            "stop_reason": reason,
            "stop_sequence": turn.stop_sequence if reason == "stop_sequence" else None,
        }

    def block(self, part: AnswerPart, calls_before: int, *, begun: bool = False) -> dict[str, Any]:
        """Return a content block. ``begun``: as it is announced, without content."""
        match part:
            case Words():
                return {"type": "text", "text": "" if begun else part.text}
            case Thought():
                thought = part.text if self.shows_thoughts and not begun else ""
                # Clients drop a thought without a signature. This one is not checked when it comes back.
                return {"type": "thinking", "thinking": thought, "signature": "" if begun else self.id}
            case FunctionCall():
                return {
                    "type": "tool_use",
                    "id": call_id(self.turn.turn_id, calls_before, part),
                    "name": part.name,
                    "input": {} if begun else msgspec.Raw(part.arguments.encode()),
                }


class BlockEvents:
    """The events of one answer."""

    def __init__(self, answer: BlockAnswer) -> None:
        self._answer = answer
        self._reader = SpeechReader(answer.form)
        self._open: type[Words | Thought] | None = None
        self._index = 0
        self._calls = 0

    async def stream_events(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        """Yield all events. An error after the first one is an event, and the last one."""
        sent = SentText()
        yield _event("message_start", message=self._answer.frame(Usage()))
        try:
            async for piece in stream:
                for part in self._reader.push(sent.new_text(piece) or ""):
                    for event in self._add(part):
                        yield event
        except PensieveError as error:
            yield sse_event(failure_from_error(error, PATH).messages_body(self._answer.id), "error")
            return
        for part in self._reader.finish():
            for event in self._add(part):
                yield event
        for event in self._close():
            yield event
        turn = stream.turn
        yield _event("message_delta", delta=self._answer.end(turn, self._calls), usage=_usage(turn.usage))
        yield _event("message_stop")

    def _add(self, part: AnswerPart) -> Iterator[bytes]:
        if type(part) is not self._open:
            yield from self._close()
            yield self._at(
                "content_block_start", content_block=self._answer.block(part, self._calls, begun=True)
            )
        match part:
            case Words():
                self._open = Words
                yield self._delta("text_delta", text=part.text)
            case Thought():
                self._open = Thought
                if self._answer.shows_thoughts:
                    yield self._delta("thinking_delta", thinking=part.text)
            case FunctionCall():
                yield self._delta("input_json_delta", partial_json=part.arguments)
                yield self._at("content_block_stop")
                self._index += 1
                self._calls += 1

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open is Thought:
            yield self._delta("signature_delta", signature=self._answer.id)
        yield self._at("content_block_stop")
        self._open = None
        self._index += 1

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return self._at("content_block_delta", delta={"type": kind, **fields})

    def _at(self, name: str, **fields: Any) -> bytes:
        return _event(name, index=self._index, **fields)


def _event(name: str, **fields: Any) -> bytes:
    return sse_event({"type": name, **fields}, name)


async def create(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, MessagesRequest, MessagesRequest.validated)
    call = await door.bodies.offload(request, Call.from_request, request, asked.body)
    async with AsyncExitStack() as held:
        starter, model = await _starter(request, held, asked, call)
        held.enter_context(named_form(asked.form))
        begun = await (_continued(door, starter, asked) if asked.body.continues else _begun(starter))
        held.callback(begun.stream.close)
        answer = BlockAnswer(begun.id, model, begun.form, asked.shows_thoughts)
        if not asked.body.stream:
            turn = await cancel_on_disconnect(request, begun.stream.finish())
            begun.record(door.heads, turn)
            return door.answer(answer.whole(turn), request)
        events = BlockEvents(answer).stream_events(begun.stream)
        noted = note_before_end(events, begun.stream, partial(begun.record, door.heads))
        return EventStream(noted, held.pop_all(), door.headers(request))


async def _begun(starter: TurnStarter) -> StartedResponse:
    session, stream = await starter.begin()
    assert stream.base_revision is not None, "accepted"
    form = starter.hashed.transcript.form
    turn = ResponseId(session.id, stream.request_id, stream.base_revision + 1, calls=form.calls is not None)
    return StartedResponse(session, stream, turn, form, starter.hashed)


_LOST: Final = {
    "previous_response_not_found": (404, "thread_not_found"),
    "response_in_progress": (409, "thread_continue_in_flight"),
}
"""Code of a failure → status and code by which Anthropic's SDKs know that they have to resend the conversation."""


async def _continued(door: HttpDoor, starter: TurnStarter, asked: ValidatedMessages) -> StartedResponse:
    """Begin the turn after the message that the thread ends with. Its session has the system prompt and tools.
    Raises HttpFailure as ``_LOST`` where the thread cannot be continued."""
    thread, caller = asked.body.thread, starter.caller
    assert thread is not None, "it continues"
    previous = f"resp_{(thread.previous_message_id or '').removeprefix('msg_')}"
    info = await door.server_info(caller)
    body = ResponseRequest(previous_response_id=previous, subject=asked.body.subject)
    said = ValidatedResponse(body, list(starter.hashed.transcript.new), asked.options)
    use = tool_use(info, (), asked.choice, has_form=asked.form is not None)
    chain = ResponseStarter(caller, said, starter.call, {}, use, info, None, keeps_settings=True)
    try:
        return await chain.begin(door.heads, door.settings.unstored_ttl_s)
    except DataLoss as error:
        raise_unless_gone(error)
        raise _lost("previous_response_not_found") from error
    except HttpFailure as error:
        if error.code not in _LOST:
            raise
        raise _lost(error.code) from error


def _lost(code: str) -> HttpFailure:
    status, name = _LOST[code]
    problem = "the thread cannot be continued from this message now: send the whole conversation"
    failure = HttpFailure(status, f"thread: {problem}", param="thread", code=code)
    failure.details = {"error_code": name}
    return failure


async def count_tokens(request: Request) -> Response:
    """Return the tokens of the prompt that these messages make, without an answer."""
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, MessagesRequest, MessagesRequest.counted)
    async with AsyncExitStack() as held:
        starter, _ = await _starter(request, held, asked, Call(uuid.uuid4()))
        tokens = await count_ahead(starter.caller.client, starter.look_ahead)
        return door.answer({"input_tokens": tokens}, request)


async def _starter(
    request: Request, held: AsyncExitStack, asked: ValidatedMessages, call: Call
) -> tuple[TurnStarter, str]:
    """Return the turn that is asked for, and the model's name. Raises HttpFailure for another model."""
    door = HttpDoor.from_request(request)
    caller = await held.enter_async_context(door.callers.for_request(request))
    model = await door.require_model(caller, asked.body.model)
    info = await door.server_info(caller)
    thinking = asked.body.thinking
    if thinking is not None and thinking.type == "disabled" and info.speech.thinks:
        raise unsupported_field("thinking.type", "this model always thinks: leave thinking out")
    has_form = asked.form is not None
    use = await door.bodies.offload(request, tool_use, info, asked.tools, asked.choice, has_form=has_form)
    transcript = asked.transcript.with_form(use.form, use.text)
    hashed = await door.bodies.offload(request, HashedHistory, transcript, caller.scope)
    return TurnStarter(caller, door.heads, hashed, call, asked.options, door.settings.chat_ttl_s), model
