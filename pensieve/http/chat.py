"""``POST /v1/chat/completions``: the client resends its history, and the door finds the session to continue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import (
    AsyncClient,
    AsyncSession,
    AsyncTurnStream,
    Candidate,
    Role,
    TokenLogprob,
    Turn,
    TurnOptions,
)
from pensieve.core import MAX_PREDICTION_CHARS
from pensieve.errors import AlreadyExists, DataLoss, NotFound, PensieveError
from pensieve.http.common.answers import (
    DONE,
    MAX_TOP_LOGPROBS,
    EventStream,
    SentText,
    SentTokens,
    cancel_on_disconnect,
    candidates_of,
    completion_usage,
    finish_reason,
    sse_event,
    token_scores,
)
from pensieve.http.common.calls import (
    UNDO_TIMEOUT_S,
    Call,
    CallPlan,
    adding_items,
    append_items,
    batches_of,
    begin_turn,
    check_subject,
    following_roles,
    is_absent,
    is_refusal,
    split_new,
)
from pensieve.http.common.contents import (
    Content,
    HashedHistory,
    Message,
    MessageHistory,
    make_history,
    parse_function_call,
    parse_message,
    text_of,
)
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import failure_from_error, invalid_field, unsupported_field
from pensieve.http.common.heads import TurnStarter, note_before_end
from pensieve.http.common.requests import (
    REFUSED_EVERYWHERE,
    CompletionFields,
    Nested,
    Positive,
    ResponseFormat,
    WantedForm,
    add_form,
    check_count,
    named_form,
    one_form,
)
from pensieve.http.output import ChatDeltas, chat_message
from pensieve.http.tools import OfferedTool, call_options, check_tools, tool_use
from pensieve.speech import PLAIN, SpeechForm, read


class ChatFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class ChatCall(msgspec.Struct, frozen=True):
    function: ChatFunction
    type: str = "function"
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
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


class Prediction(msgspec.Struct, frozen=True):
    """A guess at the answer. It affects the speed only."""

    content: Content
    type: Literal["content"] = "content"

    def text(self) -> str:
        """Raises HttpFailure for content that is not text or too long."""
        text = text_of(self.content, "prediction.content")
        if len(text) > MAX_PREDICTION_CHARS:
            raise invalid_field("prediction.content", f"is longer than {MAX_PREDICTION_CHARS} characters")
        return text


class ValidatedChat(NamedTuple):
    body: ChatRequest
    transcript: MessageHistory
    options: TurnOptions


class ChatRequest(CompletionFields, kw_only=True):
    """The request. ``session`` and ``subject`` are not OpenAI's."""

    NESTED: ClassVar[Nested] = {
        **CompletionFields.NESTED,
        "response_format": ResponseFormat,
        "tools": OfferedTool,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_prompt": "cached state is always used",
        "chat_id": "histories are found by their content",
        "metadata": "a completion is sent once",
        "prompt_cache_key": "prefixes are shared without it",
        "reasoning": "the chat template decides whether the model thinks",
        "reasoning_effort": "the chat template decides whether the model thinks",
        "safety_identifier": "users are not distinguished",
        "service_tier": "there is only one",
        "session_id": "histories are found by their content",
        "store": "histories are always kept for a day",
        "user": "users are not distinguished",
        "verbosity": "the model has no such setting",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "best_of": "belongs to completions",
        "conversation": "belongs to responses",
        "echo": "belongs to completions",
        "function_call": "use tools and tool_choice",
        "max_output_tokens": "is max_completion_tokens in chat completions",
        "previous_response_id": "belongs to responses",
        "suffix": "belongs to completions",
        "text": "belongs to responses",
    }
    messages: list[ChatMessage]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    tools: list[OfferedTool] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    session: str | None = None
    subject: str | None = None

    def validated(self) -> ValidatedChat:
        """Raises HttpFailure as ``check``, and for messages that are invalid."""
        self.check()
        return ValidatedChat(self, self.transcript, self.turn_options)

    def check(self) -> None:
        if not self.messages:
            raise invalid_field("messages", "must not be empty")
        check_count(self.messages, "messages")
        check_tools(self.tools or (), self.tool_choice)
        if self.functions:
            raise unsupported_field("functions", "use tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise invalid_field("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        if self.modalities and self.modalities != ["text"]:
            raise unsupported_field("modalities", "only text is supported")
        if self.audio is not None:
            raise unsupported_field("audio", "only text is supported")
        if self.web_search_options is not None:
            raise unsupported_field("web_search_options", "searching is not supported")

    @property
    def form(self) -> WantedForm | None:
        """The form of the answer. Raises HttpFailure for more than one."""
        own = self.response_format.wanted("response_format") if self.response_format is not None else None
        return one_form([*([own] if own is not None else []), *self.vllm_forms])

    @property
    def transcript(self) -> MessageHistory:
        spoken = [_to_message(one, f"messages[{number}]") for number, one in enumerate(self.messages)]
        return replace(make_history(spoken, "messages"), subject=self.subject or "")

    @property
    def turn_options(self) -> TurnOptions:
        options = self.options()
        options.update(call_options(self.tools or (), self.tool_choice, self.parallel_tool_calls))
        add_form(options, self.form, self.tool_choice)
        longest = self.max_completion_tokens or self.max_tokens
        if longest is not None:
            options["max_output_tokens"] = longest
        if self.n is not None and self.n > 1:
            options["candidates"] = self.n
        if self.prediction is not None:
            options["prediction"] = self.prediction.text()
        if self.logprobs:
            options["top_logprobs"] = self.top_logprobs or 0
        return options


def _to_message(message: ChatMessage, param: str) -> Message:
    if message.function_call is not None:
        raise unsupported_field(f"{param}.function_call", "use tool_calls")
    if message.audio is not None:
        raise unsupported_field(f"{param}.audio", "only text is supported")
    if message.role == "tool":
        text = text_of(message.content, f"{param}.content")
        return Message(Role.TOOL, text, call_id=message.tool_call_id or "")
    found = parse_message(message.role, message.content, param)
    if found.role is Role.ASSISTANT:
        found = replace(found, thought=(message.reasoning_content or message.reasoning or "").strip("\n"))
    if not message.tool_calls:
        return found
    if found.role is not Role.ASSISTANT:
        raise invalid_field(f"{param}.tool_calls", "only the assistant calls functions")
    calls = [
        parse_function_call(
            one.function.name, one.function.arguments, one.id, f"{param}.tool_calls[{number}].function"
        )
        for number, one in enumerate(message.tool_calls)
    ]
    return replace(found, calls=tuple(calls))


Scores = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    turn_id: str
    model: str
    session_id: str
    created: int
    form: SpeechForm = PLAIN

    @classmethod
    def from_stream(
        cls, stream: AsyncTurnStream, model: str, session_id: str, form: SpeechForm = PLAIN
    ) -> ChatCompletion:
        return cls(stream.request_id, model, session_id, int(time.time()), form)

    def whole(self, turn: Turn) -> dict[str, Any]:
        choices = [
            {
                "index": one.candidate,
                "message": chat_message(answer, self.turn_id, one.candidate),
                "logprobs": _logprobs(one.logprobs),
                "finish_reason": _finish_reason(one, len(answer.calls)),
            }
            for one in candidates_of(turn)
            for answer in (read(one.text, self.form),)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": completion_usage(turn)}

    async def chunks(
        self,
        stream: AsyncTurnStream,
        *,
        include_usage: bool,
        scored: bool,
        around: AbstractAsyncContextManager[None],
    ) -> AsyncIterator[bytes]:
        """Stream the answer, with log-probabilities if ``scored``. An error after the first chunk becomes an
        event. ``around`` is entered while the turn runs, and left before its error is sent."""
        deltas_by_candidate: dict[int, ChatDeltas] = {}
        sent, tokens = SentText(), SentTokens(scored)
        frame = self._frame("chat.completion.chunk")
        if include_usage:
            frame["usage"] = None  # until the last chunk, as OpenAI has it
        try:
            async with around:
                async for piece in stream:
                    text, (_, scores) = sent.new_text(piece), tokens.new_tokens(piece)
                    if text is None and not scores:
                        continue
                    deltas = self._deltas_of(deltas_by_candidate, piece.candidate)
                    if scores and not deltas.begun:
                        # As OpenAI does: its Node client repeats log-probabilities of the first chunk.
                        yield _chunk(frame, piece.candidate, deltas.empty_delta())
                    # A chunk without text carries the scores of tokens whose text is held back or dropped.
                    added = [*deltas.push(text or "")] or ([deltas.empty_delta()] if scores else [])
                    for delta in added:
                        yield _chunk(frame, piece.candidate, delta, scores=scores)
                        scores = ()
        except PensieveError as error:
            yield sse_event(failure_from_error(error).body)
            return
        for one in candidates_of(stream.turn):
            deltas = self._deltas_of(deltas_by_candidate, one.candidate)
            for delta in deltas.finish():
                yield _chunk(frame, one.candidate, delta)
            yield _chunk(frame, one.candidate, {}, _finish_reason(one, deltas.calls))
        if include_usage:
            yield sse_event({**frame, "choices": [], "usage": completion_usage(stream.turn)})
        yield DONE

    def _deltas_of(self, deltas_by_candidate: dict[int, ChatDeltas], candidate: int) -> ChatDeltas:
        if candidate not in deltas_by_candidate:
            deltas_by_candidate[candidate] = ChatDeltas(self.form, self.turn_id, candidate)
        return deltas_by_candidate[candidate]

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.turn_id.replace('-', '')}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": "default",
            "system_fingerprint": None,
            "session": self.session_id,
        }


def _chunk(
    frame: dict[str, Any], index: int, delta: dict[str, Any], reason: str | None = None, scores: Scores = ()
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": _logprobs(scores), "finish_reason": reason}
    return sse_event({**frame, "choices": [choice]})


def _finish_reason(answer: Candidate, calls: int) -> str:
    reason = finish_reason(answer.finish_reason)
    return "tool_calls" if calls and reason == "stop" else reason


def _logprobs(scores: Scores) -> dict[str, Any] | None:
    return {"content": token_scores(scores), "refusal": None} if scores else None


_MAX_ATTEMPTS: Final = 8
"""Attempts to find or make the session while other calls make and delete it."""


@dataclass(slots=True)
class _Made:
    session: AsyncSession
    records: int = 1
    """Records that this call has written. If the session has more, other calls have used it."""

    def note(self) -> None:
        self.records += 1

    async def take_back(self) -> None:
        """Delete the session unless other calls have used it or a turn runs in it. An overloaded server may
        refuse that too."""
        with contextlib.suppress(PensieveError, TimeoutError):
            async with asyncio.timeout(UNDO_TIMEOUT_S):
                await self.session.delete(
                    expected_revision=self.records, allow_missing=True, unused_only=True
                )


@dataclass(frozen=True, slots=True)
class NamedTurn:
    """An accepted turn in a session named by the client."""

    session: AsyncSession
    stream: AsyncTurnStream
    _client: AsyncClient
    _call: Call
    _made: _Made | None

    @asynccontextmanager
    async def undo_on_refusal(self) -> AsyncIterator[None]:
        """Wait for the answer in the block. A turn that is refused while queued leaves no session and no claim
        either."""
        try:
            yield
        except PensieveError as error:
            if is_refusal(error):
                if self._made is not None:
                    await self._made.take_back()
                await self._call.undo(self._client, CallPlan(session=self.session.id))
            raise


async def begin_named(
    client: AsyncClient, name: str, transcript: MessageHistory, call: Call, options: TurnOptions
) -> NamedTurn:
    """Begin a turn in the session that the client names. If it exists, the resent history is ignored.

    Otherwise it is created with that history. A session created for a call that is then refused must be
    deleted: the client will use the name again.
    """
    options["request_id"] = str(call.id)
    plan = CallPlan(session=name)
    await call.claim_plan(client, plan)
    async with call.undo_on_refusal(client, plan):
        attempts = 0
        while True:
            attempts += 1
            try:
                session, stream = await _continue_session(client.session(name), transcript, call, options)
                return NamedTurn(session, stream, client, call, None)
            except (NotFound, DataLoss) as error:
                if not _is_missing(error):
                    raise
            try:
                return await _begin_in_new_session(client, name, transcript, call, options)
            except AlreadyExists as error:  # another call has just made it: continue in that one
                if error.reason != "SESSION_EXISTS" or attempts == _MAX_ATTEMPTS:
                    raise
            except NotFound as error:  # another call made it and has deleted it
                if not _is_missing(error) or attempts == _MAX_ATTEMPTS:
                    raise


async def _continue_session(
    session: AsyncSession, transcript: MessageHistory, call: Call, options: TurnOptions
) -> tuple[AsyncSession, AsyncTurnStream]:
    early, last = split_new(transcript.new)
    await check_subject(session, transcript.subject)
    async with adding_items(session, early, call, last):
        return session, await begin_turn(session, last, options)


async def _begin_in_new_session(
    client: AsyncClient, name: str, transcript: MessageHistory, call: Call, options: TurnOptions
) -> NamedTurn:
    """Create the session and begin the turn. A call that fails here deletes the session."""
    early, last = split_new(transcript.new)
    first = (batches_of(transcript.history) or [()])[0]
    session = await client.create_session(
        session_id=name,
        system_prompt=transcript.system or None,
        tools=transcript.tools or None,
        subject=transcript.subject or None,
        initial_items=[one.sdk_input for one in first],
        followed_by=following_roles((*transcript.history, *transcript.new)[len(first) :]),
    )
    made = _Made(session)
    try:
        await append_items(
            session, transcript.history[len(first) :], call, "history", follow=transcript.new, note=made.note
        )
        await append_items(session, early, call, follow=last, note=made.note)
        stream = await begin_turn(session, last, options)
    except PensieveError as error:
        if not _is_missing(error):
            await made.take_back()
        raise
    return NamedTurn(session, stream, client, call, made)


def _is_missing(error: PensieveError) -> bool:
    """Whether no session has the name, or the store has lost it."""
    is_lost = error.reason == "HISTORY_REGRESSED" and error.metadata.get("current_revision") == "0"
    return is_absent(error) or is_lost


async def create(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    body, transcript, options = await door.bodies.read(request, ChatRequest, ChatRequest.validated)
    call = await door.bodies.offload(request, Call.from_request, request, body)
    async with AsyncExitStack() as held:
        caller = await held.enter_async_context(door.callers.for_request(request))
        model = await door.require_model(caller, body.model)
        info = await door.server_info(caller)
        tools, has_form = body.tools or (), body.form is not None
        use = await door.bodies.offload(request, tool_use, info, tools, body.tool_choice, has_form=has_form)
        held.enter_context(named_form(body.form))
        transcript = transcript.with_form(use.form, use.text)
        named: HashedHistory | None = None
        around: AbstractAsyncContextManager[None] = nullcontext()
        if body.session:
            # Its history may differ from the resent one, so it is not recorded for lookup.
            begun = await begin_named(caller.client, body.session, transcript, call, options)
            session, stream, around = begun.session, begun.stream, begun.undo_on_refusal()
        else:
            named = await door.bodies.offload(request, HashedHistory, transcript, caller.scope)
            ttl_s = door.settings.chat_ttl_s
            session, stream = await TurnStarter(caller, door.heads, named, call, options, ttl_s).begin()
        held.callback(stream.close)
        completion = ChatCompletion.from_stream(stream, model, session.id, use.form)

        def note(turn: Turn) -> None:
            if named is not None:
                door.heads.record_turn(named, session.id, turn)

        if not body.stream:
            async with around:
                turn = await cancel_on_disconnect(request, stream.finish())
            note(turn)
            return door.answer(completion.whole(turn), request)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = completion.chunks(
            stream, include_usage=include_usage, scored=bool(body.logprobs), around=around
        )
        chunks = note_before_end(events, stream, note)
        return EventStream(chunks, held.pop_all(), door.headers(request))
