"""Chat completions, as one document or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pensieve.client import AsyncTurnStream, FinishReason, Turn
from pensieve.errors import PensieveError
from pensieve.http.common.answers import SentText, cached_tokens, output_tokens, was_cut
from pensieve.http.common.failures import failure_of
from pensieve.http.common.streams import DONE, event


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What all parts of one answer say."""

    turn_id: str
    model: str
    session_id: str
    created: int

    @classmethod
    def of(cls, stream: AsyncTurnStream, model: str, session_id: str) -> ChatCompletion:
        return cls(stream.request_id, model, session_id, int(time.time()))

    def whole(self, turn: Turn) -> dict[str, Any]:
        """The answer as one document."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, text, reason in _answers(turn)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage_of(turn)}

    async def chunks(self, stream: AsyncTurnStream, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as it comes; errors after the first chunk are an event too."""
        begun: set[int] = set()
        sent = SentText()
        try:
            async for piece in stream:
                text = sent.new_text(piece)
                if text is None:
                    continue
                if piece.candidate not in begun:
                    begun.add(piece.candidate)
                    yield self._chunk(piece.candidate, {"role": "assistant", "content": text})
                elif text:
                    yield self._chunk(piece.candidate, {"content": text})
        except PensieveError as error:
            yield event(failure_of(error).body)
            return
        for index, _, reason in _answers(stream.turn):
            if index not in begun:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            yield self._chunk(index, {}, reason)
        if include_usage:
            yield event(
                {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage_of(stream.turn)}
            )
        yield DONE

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._frame("chat.completion.chunk"), "choices": [choice]})

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


def usage_of(turn: Turn) -> dict[str, Any]:
    """Token counts. ``cached_tokens``: of the context, what was not computed for this turn."""
    prompt, answer = turn.usage.context_tokens, output_tokens(turn)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(turn.usage), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _answers(turn: Turn) -> list[tuple[int, str, str]]:
    """Number, text and reason of each answer."""
    if turn.candidates:
        return [(one.candidate, one.text, _reason(one.finish_reason)) for one in turn.candidates]
    return [(0, turn.text, _reason(turn.finish_reason))]


def _reason(reason: FinishReason | int | None) -> str:
    return "length" if was_cut(reason) else "stop"
