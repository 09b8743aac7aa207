"""What the answers of all endpoints have in common: log-probabilities, events, and text that cannot be taken back."""

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

from pensieve.client import FinishReason, Piece, TokenLogprob, TokenText, Turn, Usage
from pensieve.errors import Internal
from pensieve.http.common.failures import HttpFailure

LEAST: Final = -9999.0
"""What stands for anything below it: JSON has no minus infinity."""
MAX_TOP: Final = 20
"""Likeliest tokens that may be asked for."""


def token_scores(scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """One entry for each token. A control token has its name as text, and no bytes."""
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
    """The value as it is sent."""
    return max(logprob, LEAST)


def _score(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.piece), "logprob": clamp_logprob(logprob)}


SILENT: Final = b":\n\n"
"""A comment, which clients drop: proxies and clients see that the answer is still to come."""
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second keeps nginx from holding events back."""


def sse_event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event, to be sent in one piece: some clients lose one that is split, and see none that ends in CRLF."""
    line = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line


class EventStream(StreamingResponse):
    """Sends events, and comments where there are none for the door's ``heartbeat_s``.

    ``held`` is closed when the last event is out or the client has gone.
    """

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        steady = _Steady(send, scope["app"].state.door.settings.heartbeat_s)
        try:
            await super().__call__(scope, receive, steady.send)
        finally:
            steady.end()
            await self._held.aclose()


class _Steady:
    """Sends what the answer says, and a comment after each ``heartbeat_s`` seconds without a byte."""

    def __init__(self, send: Send, heartbeat_s: float) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._one = asyncio.Lock()
        self._last = 0.0
        self._beating: asyncio.Task[None] | None = None
        """From the head of the answer to its end."""

    async def send(self, message: Message) -> None:
        async with self._one:
            await self._send(message)
            self._last = asyncio.get_running_loop().time()
            if message["type"] == "http.response.start":
                self._beating = asyncio.create_task(self._beat(), name="heartbeat")
            elif not message.get("more_body"):
                self.end()

    def end(self) -> None:
        """No more comments."""
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._last + self._heartbeat_s - loop.time())
            async with self._one:
                if loop.time() >= self._last + self._heartbeat_s:
                    await self._send({"type": "http.response.body", "body": SILENT, "more_body": True})
                    self._last = loop.time()


T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, which is cancelled when the caller goes: to nobody nothing is said.

    Raises HttpFailure then, so that what is held for the call is let go. The body has to have been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HttpFailure(400, "the caller left before the answer was whole", code="client_disconnected")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class SentText:
    """Texts of a turn's candidates as the client has them.

    When an attempt is lost the answer begins anew. It is the same answer nearly always; then what was sent stays, and
    the stream goes on behind it.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, str] = defaultdict(str)
        self._again: dict[int, str] = {}
        """Candidates whose answer began anew and is not yet as long as what was sent."""

    def new_text(self, piece: Piece) -> str | None:
        """What of this piece has not been sent; None when all was. Raises Internal (STREAM_INCONSISTENT) for another
        answer."""
        if piece.restarted:
            self._again = dict.fromkeys(self._sent, "")
            return None
        again = self._again.get(piece.candidate)
        sent = self._sent[piece.candidate]
        if again is None:
            self._sent[piece.candidate] = sent + piece.text
            return piece.text
        again += piece.text
        if not (sent.startswith(again) or again.startswith(sent)):
            raise _another_answer()
        if len(again) < len(sent):
            self._again[piece.candidate] = again
            return None
        del self._again[piece.candidate]
        self._sent[piece.candidate] = again
        return again[len(sent) :] or None


class SentTokens:
    """Tokens of a turn's candidates as the client has them, for protocols that show them: see ``SentText``."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: else there are never any."""
        self._wanted = wanted
        self._sent: defaultdict[int, list[int]] = defaultdict(list)

    def new_tokens(self, piece: Piece) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The ids of this piece that have not been sent, and their log-probabilities if there are any.

        Raises Internal (STREAM_INCONSISTENT) for other tokens than were sent.
        """
        if not self._wanted:
            return (), ()
        sent, begin = self._sent[piece.candidate], piece.token_offset
        again = sent[begin : begin + len(piece.token_ids)]
        if tuple(again) != piece.token_ids[: len(again)]:
            raise _another_answer()
        fresh = piece.token_ids[len(again) :]
        sent += fresh
        return fresh, piece.logprobs[len(again) :]


def _another_answer() -> Internal:
    return Internal(
        "the answer was lost while it was streamed, and the new one differs; send the request again",
        reason="STREAM_INCONSISTENT",
    )


def is_truncated(reason: FinishReason | int | None) -> bool:
    """Whether an answer ended before the model ended it."""
    return reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT)


def finish_reason(reason: FinishReason | int | None) -> str:
    """The word of both kinds of completions."""
    return "length" if is_truncated(reason) else "stop"


def cached_tokens(usage: Usage) -> int:
    """Tokens of the context that were not computed for this turn."""
    return usage.gpu_cached_tokens + usage.swapped_in_tokens


def output_tokens(turn: Turn) -> int:
    """Of all candidates together."""
    if turn.candidates:
        return sum(candidate.output_tokens for candidate in turn.candidates)
    return turn.usage.output_tokens


def completion_usage(*turns: Turn) -> dict[str, Any]:
    """Token counts, all turns together. ``cached_tokens``: of the contexts, what was not computed for these turns."""
    prompt = sum(turn.usage.context_tokens for turn in turns)
    answer = sum(map(output_tokens, turns))
    cached = sum(cached_tokens(turn.usage) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
