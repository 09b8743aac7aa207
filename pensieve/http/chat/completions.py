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
from pensieve.http.tools.events import ChatTeller, chat_teller
from pensieve.http.tools.outputs import chat_message
from pensieve.speech import PLAIN, SpeechForm, read


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What all parts of one answer say."""

    turn_id: str
    model: str
    session_id: str
    created: int
    form: SpeechForm = PLAIN
    """How answers are read."""

    @classmethod
    def of(
        cls, stream: AsyncTurnStream, model: str, session_id: str, form: SpeechForm = PLAIN
    ) -> ChatCompletion:
        return cls(stream.request_id, model, session_id, int(time.time()), form)

    def whole(self, turn: Turn) -> dict[str, Any]:
        """The answer as one document."""
        choices = [
            {
                "index": index,
                "message": chat_message(answer, self.turn_id, index),
                "logprobs": None,
                "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,
            }
            for index, text, reason in _answers(turn)
            for answer in (read(text, self.form),)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage_of(turn)}

    async def chunks(self, stream: AsyncTurnStream, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as it comes; errors after the first chunk are an event too."""
        tellers: dict[int, ChatTeller] = {}
        sent = SentText()
        try:
            async for piece in stream:
                text = sent.new_text(piece)
                if text is None:
                    continue
                for delta in self._teller(tellers, piece.candidate).push(text):
                    yield self._chunk(piece.candidate, delta)
        except PensieveError as error:
            yield event(failure_of(error).body)
            return
        for index, _, reason in _answers(stream.turn):
            teller = self._teller(tellers, index)
            for delta in teller.finish():
                yield self._chunk(index, delta)
            yield self._chunk(index, {}, "tool_calls" if teller.calls and reason == "stop" else reason)
        if include_usage:
            yield event(
                {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage_of(stream.turn)}
            )
        yield DONE

    def _teller(self, tellers: dict[int, ChatTeller], candidate: int) -> ChatTeller:
        if candidate not in tellers:
            tellers[candidate] = chat_teller(self.form, self.turn_id, candidate)
        return tellers[candidate]

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
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
