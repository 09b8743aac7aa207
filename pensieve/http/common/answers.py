"""Shared by the answers of all endpoints: log-probabilities, server-sent events, text that was already sent."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from pensieve.client import Candidate, FinishReason, Piece, TokenLogprob, TokenText, Turn, Usage
from pensieve.errors import Internal
from pensieve.http.common.failures import HttpFailure

MIN_LOGPROB: Final = -9999.0
"""Stands for any lower value: JSON has no minus infinity."""
MAX_TOP_LOGPROBS: Final = 20


def token_scores(scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return one entry per token. A control token has its name as text, and no bytes."""
    return [
        {
            **_score(one.token, one.logprob),
            "top_logprobs": [
                _score(text, logprob) for text, (_, logprob) in zip(one.top_tokens, one.top, strict=True)
            ],
        }
        for one in scores
    ]


def clamp_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _score(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.piece), "logprob": clamp_logprob(logprob)}


HEARTBEAT: Final = b":\n\n"
"""A comment, which clients ignore. It tells proxies and clients that the answer is still to come."""
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second header keeps nginx from buffering events."""


def sse_event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encode one event. It must be sent in one piece: some clients lose an event that is split. Lines end in
    LF, because some clients see no event that ends in CRLF."""
    line = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line


class EventStream(StreamingResponse):
    """Sends events, and a comment whenever the stream was silent for the door's ``heartbeat_s``. ``held`` is
    closed after the last event, or when the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _HeartbeatSender(send, scope["app"].state.door.settings.heartbeat_s)
        try:
            await super().__call__(scope, receive, sender.send)
        finally:
            sender.stop()
            await self._held.aclose()


class _HeartbeatSender:
    """Forwards ASGI messages, and sends a comment after each ``heartbeat_s`` seconds without a byte."""

    def __init__(self, send: Send, heartbeat_s: float) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._lock = asyncio.Lock()
        self._last_sent = 0.0
        self._heartbeat: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        async with self._lock:
            await self._send(message)
            self._last_sent = asyncio.get_running_loop().time()
            if message["type"] == "http.response.start":
                self._heartbeat = asyncio.create_task(self._run_heartbeat(), name="heartbeat")
            elif not message.get("more_body"):
                self.stop()

    def stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    async def _run_heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._last_sent + self._heartbeat_s - loop.time())
            async with self._lock:
                if loop.time() >= self._last_sent + self._heartbeat_s:
                    await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
                    self._last_sent = loop.time()


T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it when the client disconnects. Then raises HttpFailure, so that
    the call's resources are released. The body must have been read."""
    working, disconnecting = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HttpFailure(
                400, "the client disconnected before the answer was complete", code="client_disconnected"
            )
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.wait((working, disconnecting))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class SentText:
    """The text of each candidate that the client has received.

    When an attempt is lost, the answer restarts from its beginning, nearly always with the same text. Then the
    text that was sent stays valid, and the stream continues after it.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, str] = defaultdict(str)
        self._restarted: dict[int, str] = {}
        """The new text of each restarted candidate that is still shorter than the text that was sent."""

    def new_text(self, piece: Piece) -> str | None:
        """Return the part of this piece that was not sent yet, or None. Raises Internal (STREAM_INCONSISTENT)
        when the new attempt's text differs."""
        if piece.restarted:
            self._restarted = dict.fromkeys(self._sent, "")
            return None
        again = self._restarted.get(piece.candidate)
        sent = self._sent[piece.candidate]
        if again is None:
            self._sent[piece.candidate] = sent + piece.text
            return piece.text
        again += piece.text
        if not (sent.startswith(again) or again.startswith(sent)):
            raise _inconsistent()
        if len(again) < len(sent):
            self._restarted[piece.candidate] = again
            return None
        del self._restarted[piece.candidate]
        self._sent[piece.candidate] = again
        return again[len(sent) :] or None


class SentTokens:
    """The tokens of each candidate that the client has received, for protocols that show them. See ``SentText``."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._sent: defaultdict[int, list[int]] = defaultdict(list)

    def new_tokens(self, piece: Piece) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Return the ids of this piece that were not sent yet, and their log-probabilities if it has any.
        Raises Internal (STREAM_INCONSISTENT) when the new attempt's tokens differ."""
        if not self._wanted:
            return (), ()
        sent, begin = self._sent[piece.candidate], piece.token_offset
        again = sent[begin : begin + len(piece.token_ids)]
        if tuple(again) != piece.token_ids[: len(again)]:
            raise _inconsistent()
        fresh = piece.token_ids[len(again) :]
        sent += fresh
        return fresh, piece.logprobs[len(again) :]


def _inconsistent() -> Internal:
    return Internal(
        "the answer was lost while it was streamed, and the new one differs; send the request again",
        reason="STREAM_INCONSISTENT",
    )


def is_truncated(reason: FinishReason | int | None) -> bool:
    """Whether an answer ended before the model ended it."""
    return reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT)


def finish_reason(reason: FinishReason | int | None) -> str:
    return "length" if is_truncated(reason) else "stop"


def cached_tokens(usage: Usage) -> int:
    """Return the tokens of the context that were not computed for this turn."""
    return usage.gpu_cached_tokens + usage.swapped_in_tokens


def candidates_of(turn: Turn) -> list[Candidate]:
    """Return a turn's answers; the only answer of most turns counts as candidate 0."""
    return list(turn.candidates) or [
        Candidate(
            candidate=0,
            text=turn.text,
            output_tokens=turn.usage.output_tokens,
            finish_reason=turn.finish_reason,
            stop_sequence=turn.stop_sequence,
            seed=turn.seed,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
        )
    ]


def completion_usage(*turns: Turn) -> dict[str, Any]:
    """Return token counts, summed over all turns. ``cached_tokens``: context tokens that were not computed for
    these turns."""
    prompt = sum(turn.usage.context_tokens for turn in turns)
    answer = sum(one.output_tokens for turn in turns for one in candidates_of(turn))
    cached = sum(cached_tokens(turn.usage) for turn in turns)
    drafted, accepted = (
        sum(getattr(turn.usage, name) for turn in turns) for name in ("drafted_tokens", "accepted_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
