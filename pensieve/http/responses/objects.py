"""Response objects and stream events. The request is stored with the turn, to show the response again later."""

from __future__ import annotations

import base64
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from starlette.requests import Request

from pensieve.client import (
    AsyncTurnStream,
    FinishReason,
    Item,
    Piece,
    Role,
    ServerInfo,
    Turn,
    TurnState,
    Usage,
)
from pensieve.errors import PensieveError
from pensieve.http.common.answers import (
    DONE,
    SentText,
    SentTokens,
    cached_tokens,
    is_truncated,
    sse_event,
    token_scores,
)
from pensieve.http.common.failures import failure_from_error, invalid_field
from pensieve.http.common.requests import parse_whole_number
from pensieve.http.output import OutputEvents, OutputItems, answer_parts, result_item, text_part
from pensieve.http.responses.ids import ResponseId, conversation_id, item_id
from pensieve.http.responses.requests import ResponseRequest, compaction_item
from pensieve.speech import PLAIN, SpeechForm, Words

_NAME: Final = "http.response"
"""Name of the turn's annotation. Its value is JSON, compressed if long, because it repeats the tools with every
turn."""
_LONG: Final = 1024
_COMPRESSED: Final = "zlib:"
_MOST: Final = 16 << 20
"""Bytes that are decompressed: more than the service takes as instructions and tools. Callers may write annotations
too."""


class KeptResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a response that the history does not hold. Stored with the turn."""

    created: int
    model: str
    asked: ResponseRequest
    """The request without its input, which the history has."""
    compaction: str = ""
    """Content of the item of the compaction before this response; "" if there was none."""

    @property
    def annotations(self) -> dict[str, str]:
        asked = msgspec.structs.replace(self.asked, input=None, stream=False)
        data = msgspec.json.encode(msgspec.structs.replace(self, asked=asked))
        if len(data) > _LONG:
            return {_NAME: _COMPRESSED + base64.b85encode(zlib.compress(data)).decode()}
        return {_NAME: data.decode()}

    @classmethod
    def from_turn(cls, turn: Turn) -> KeptResponse | None:
        """Return None if the turn has none, or one in another format."""
        value = turn.annotations.get(_NAME)
        if value is None:
            return None
        try:
            if value.startswith(_COMPRESSED):
                expander = zlib.decompressobj()
                data = expander.decompress(base64.b85decode(value.removeprefix(_COMPRESSED)), _MOST)
                value = data.decode() if expander.eof else ""
            return msgspec.json.decode(value, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError, zlib.error):
            return None


def reconstruct(found: ResponseId, model: str, turn: Turn) -> KeptResponse:
    """Reconstruct it from the id and the history, for a turn without the annotation."""
    times = [item.create_time for item in turn.items if item.create_time is not None]
    asked = ResponseRequest(
        background=found.background,
        truncation="auto" if found.drops_oldest else None,
        conversation=conversation_id(found.session_id),
    )
    return KeptResponse(int(times[0].timestamp()) if times else 0, model, asked)


Document = dict[str, Any]

_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant"}


@dataclass(frozen=True, slots=True)
class Response:
    id: ResponseId
    kept: KeptResponse
    form: SpeechForm = PLAIN

    @classmethod
    def from_turn(cls, found: ResponseId, info: ServerInfo, turn: Turn) -> Response:
        form = info.speech if found.calls else replace(info.speech, calls=None)
        kept = KeptResponse.from_turn(turn) or reconstruct(found, info.model, turn)
        return cls(found, kept, replace(form, tagged=kept.asked.form is not None))

    def in_progress(self) -> Document:
        return self._snapshot("in_progress")

    def finished(self, turn: Turn) -> Document:
        status = status_of(turn)
        output = self._output(turn, status) if turn.output is not None else []
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **(self.failed("server_error", _problem(turn)) if status == "failed" else self._snapshot(status)),
            "completed_at": completed_at(turn) if status == "completed" else None,
            "incomplete_details": cut,
            "output": output,
            "usage": usage_of(turn.usage),
        }

    def prewarmed(self, context_tokens: int) -> Document:
        """Return the response to a call that only had its context computed."""
        usage = usage_of(Usage(context_tokens=context_tokens))
        return {**self._snapshot("completed"), "completed_at": self.kept.created, "usage": usage}

    def failed(self, code: str, message: str) -> Document:
        return {**self._snapshot("failed"), "error": {"code": code, "message": message}}

    @property
    def items(self) -> OutputItems:
        return OutputItems(self.id.message.removeprefix("msg_"), self.id.turn_id)

    @property
    def compaction(self) -> list[Document]:
        """The item of the compaction for this response; [] if there was none."""
        suffix = self.id.message.removeprefix("msg_")
        return [compaction_item(suffix, self.kept.compaction)] if self.kept.compaction else []

    def _output(self, turn: Turn, status: str) -> list[Document]:
        answer = self.items.all(
            answer_parts(turn.text, self.form),
            "completed" if status == "completed" else "incomplete",
            turn.logprobs,
        )
        return [*self.compaction, *answer]

    def _snapshot(self, status: str) -> Document:
        asked = self.kept.asked
        conversation, sampling = asked.conversation_id, asked.sampling
        return {
            "id": str(self.id),
            "object": "response",
            "created_at": self.kept.created,
            "completed_at": None,
            "status": status,
            "background": bool(asked.background),
            "conversation": {"id": conversation} if conversation else None,
            "error": None,
            "frequency_penalty": sampling.get("frequency_penalty", 0.0),
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.kept.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "presence_penalty": sampling.get("presence_penalty", 0.0),
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "prompt_cache_options": _cache_options(asked),
            "prompt_cache_retention": asked.prompt_cache_retention,
            "reasoning": None,
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": asked.stored,
            "temperature": sampling.get("temperature", 1.0),
            "text": {"format": _format(asked)},
            "tool_choice": _tool_choice(asked.tool_choice),
            "tools": [tool.echo for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.get("top_p", 1.0),
            "truncation": asked.truncation or "disabled",
            "usage": None,
        }


def _problem(turn: Turn) -> str:
    if turn.discard_reason == "TURN_NOT_FOUND":
        return "the answer was lost with its server: send the request again"
    return (
        f"the answer was not completed ({turn.discard_reason.lower() or 'unknown'}): send the request again"
    )


def status_of(turn: Turn) -> str:
    if turn.state is TurnState.RUNNING:
        return "in_progress"
    if turn.finish_reason == FinishReason.CANCELLED or turn.discard_reason in (
        "TURN_CANCELLED",
        "CLIENT_DISCONNECTED",
    ):
        return "cancelled"
    if turn.state is not TurnState.COMMITTED:
        return "failed"
    return "incomplete" if is_truncated(turn.finish_reason) else "completed"


def _cache_options(asked: ResponseRequest) -> Document | None:
    options = asked.prompt_cache_options
    if options is None:
        return None
    prewarm = {"prewarm": True} if options.prewarm else {}
    return {"mode": options.mode or "implicit", "ttl": options.ttl or "30m", **prewarm}


def _format(asked: ResponseRequest) -> Document:
    given = asked.text.format if asked.text is not None else None
    return {"type": "text"} if given is None else given.echo


def _tool_choice(asked: Any) -> Any:
    """Return it as the protocol shows it: chat completions' form of a function name is accepted too, but not
    shown."""
    match asked:
        case {"type": "function", "function": {"name": name}}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "allowed_tools": {**inner}}:
            return {"type": "allowed_tools", **inner}
    return asked or "auto"


def completed_at(turn: Turn) -> int | None:
    time = turn.output.create_time if turn.output is not None else None
    return int(time.timestamp()) if time is not None else None


def usage_of(usage: Usage) -> Document:
    """Return token counts over the whole history. ``cached_tokens``: context tokens that were not computed for
    this turn."""
    return {
        "input_tokens": usage.context_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.context_tokens + usage.output_tokens,
    }


def input_message(session_id: str, item: Item) -> Document:
    if item.role == Role.TOOL:
        return result_item(item_id(session_id, item.item), item.text, item.call_id)
    role = item.role if isinstance(item.role, Role) else Role.USER
    part = (
        text_part(Words(item.text)) if role is Role.ASSISTANT else {"type": "input_text", "text": item.text}
    )
    return {
        "id": item_id(session_id, item.item),
        "type": "message",
        "role": _ROLES[role],
        "status": "completed",
        "content": [part],
    }


def history_items(session_id: str, item: Item, form: SpeechForm) -> list[Document]:
    """Return an item of a history as the output items of its response."""
    if item.role != Role.ASSISTANT or form.plain:
        return [input_message(session_id, item)]
    made = OutputItems(item_id(session_id, item.item).removeprefix("msg_"), item.request_id)
    return made.all(answer_parts(item.text, form), "completed")


def list_page(items: list[Document], *, has_more: bool = False) -> Document:
    ids = [str(item["id"]) for item in items]
    return {
        "object": "list",
        "data": items,
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": has_more,
    }


def page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Select from ``items``, oldest first, by ``order``, ``after``, ``before`` and ``limit``. Raises HttpFailure."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        items = items[_index(items, "after", after) + 1 :]
    if (before := query.get("before")) is not None:
        items = items[: _index(items, "before", before)]
    limit = parse_whole_number(query.get("limit", "20"))
    if limit is None or not 1 <= limit <= 100:
        raise invalid_field("limit", "must be from 1 to 100")
    return list_page(items[:limit], has_more=len(items) > limit)


def _index(items: list[dict[str, Any]], param: str, wanted: str) -> int:
    ids = [item["id"] for item in items]
    if wanted not in ids:
        raise invalid_field(param, f"no such item: {wanted}")
    return ids.index(wanted)


class Events:
    """Makes the events of one response in the order of the protocol, numbered from 0."""

    def __init__(self, response: Response, after: int = -1) -> None:
        """``after``: number of the last event that the client has; only later ones are made."""
        self._response = response
        self._after = after
        self._message = response.id.message
        self._sequence = 0
        self._items_before = 0
        """Output items before the answer's."""
        self._sent = SentText()
        self._tokens = SentTokens(response.kept.asked.scored)

    async def stream_events(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        """Yield all events. After a failure, its error event and the failed response are the last ones."""
        async for chunk in self._all(stream):
            if chunk:
                yield chunk
        yield DONE

    async def _all(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        yield self._whole("response.created", self._response.in_progress())
        yield self._whole("response.in_progress", self._response.in_progress())
        for item in self._response.compaction:
            for name in ("response.output_item.added", "response.output_item.done"):
                yield self._event(name, item=item, output_index=0)
            self._items_before = 1
        if not self._response.form.plain:
            async for chunk in self._spoken(stream):
                yield chunk
            return
        begun = self._response.items.item(Words(""), 0, 0, "in_progress", begun=True)
        yield self._event("response.output_item.added", item=begun, output_index=0)
        yield self._event("response.content_part.added", **self._place, part=text_part(Words("")))
        try:
            async for piece in stream:
                yield self._delta(piece)
        except PensieveError as error:
            for chunk in self._failed(error):
                yield chunk
        else:
            for chunk in self._ended(stream.turn):
                yield chunk

    async def _spoken(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        output = OutputEvents(self._response.items, self._response.form)
        try:
            async for piece in stream:
                text, (_, scores) = self._sent.new_text(piece), self._tokens.new_tokens(piece)
                for name, fields in output.push(text or "", scores):
                    yield self._event(name, **fields)
        except PensieveError as error:
            for chunk in self._failed(error):
                yield chunk
            return
        turn = stream.turn
        status = status_of(turn)
        for name, fields in output.finish("completed" if status == "completed" else "incomplete"):
            yield self._event(name, **fields)
        yield self._end(turn, status)

    def _end(self, turn: Turn, status: str) -> bytes:
        name = "response.completed" if status == "completed" else "response.incomplete"
        return self._whole(name, self._response.finished(turn))

    def _delta(self, piece: Piece) -> bytes:
        text, (_, scores) = self._sent.new_text(piece), self._tokens.new_tokens(piece)
        silent = text is None or not (text or self._response.id.background)
        if silent and not scores:
            return b""
        logprobs = token_scores(scores)
        return self._event("response.output_text.delta", **self._place, delta=text or "", logprobs=logprobs)

    def _ended(self, turn: Turn) -> list[bytes]:
        status = status_of(turn)
        done = "completed" if status == "completed" else "incomplete"
        words = Words(turn.text)
        part = text_part(words, turn.logprobs)
        item = self._response.items.item(words, 0, 0, done, scores=turn.logprobs)
        return [
            self._event(
                "response.output_text.done", **self._place, text=turn.text, logprobs=part["logprobs"]
            ),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", item=item, output_index=0),
            self._end(turn, status),
        ]

    def _failed(self, error: PensieveError) -> list[bytes]:
        failure = failure_from_error(error)
        code = failure.code or "server_error"
        # Both forms: the specification puts the fields under `error`, clients read them at the top.
        parts: dict[str, Any] = {"message": failure.message, "code": code, "param": failure.param}
        return [
            self._event("error", **parts, error={**parts, "type": failure.kind}),
            self._whole("response.failed", self._response.failed("server_error", failure.message)),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _whole(self, name: str, snapshot: dict[str, Any]) -> bytes:
        return self._event(name, response=snapshot)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        """Return the next event; empty if the client has it."""
        numbered = {"type": name, "sequence_number": self._sequence, **fields}
        if "output_index" in fields:
            numbered["output_index"] += self._items_before
        self._sequence += 1
        return sse_event(numbered, name) if self._sequence > self._after + 1 else b""
