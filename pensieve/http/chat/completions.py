"""Chat completions, as one document or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pensieve.client import AsyncTurnStream, TokenLogprob, Turn
from pensieve.errors import PensieveError
from pensieve.http.common.answers import SentText, SentTokens, finish_reason, usage_of
from pensieve.http.common.failures import failure_of
from pensieve.http.common.logprobs import token_scores
from pensieve.http.common.streams import DONE, event

Scores = tuple[TokenLogprob, ...]


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
                "logprobs": _scored(scores),
                "finish_reason": reason,
            }
            for index, text, reason, scores in _answers(turn)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage_of(turn)}

    async def chunks(
        self, stream: AsyncTurnStream, *, include_usage: bool, scored: bool
    ) -> AsyncIterator[bytes]:
        """The answer as it comes, ``scored`` with log-probabilities; errors after the first chunk are an event too."""
        begun: set[int] = set()
        sent, tokens = SentText(), SentTokens(scored)
        try:
            async for piece in stream:
                text, (_, scores) = sent.new_text(piece), tokens.new_tokens(piece)
                if text is None and not scores:
                    continue
                if piece.candidate not in begun:
                    begun.add(piece.candidate)
                    delta = {"role": "assistant", "content": text or ""}
                    yield self._chunk(piece.candidate, delta, scores=scores)
                elif text or scores:
                    yield self._chunk(piece.candidate, {"content": text or ""}, scores=scores)
        except PensieveError as error:
            yield event(failure_of(error).body)
            return
        for index, _, reason, _ in _answers(stream.turn):
            if index not in begun:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            yield self._chunk(index, {}, reason)
        if include_usage:
            yield event(
                {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage_of(stream.turn)}
            )
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, str], reason: str | None = None, scores: Scores = ()
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": _scored(scores), "finish_reason": reason}
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


def _answers(turn: Turn) -> list[tuple[int, str, str, Scores]]:
    """Number, text, reason and log-probabilities of each answer."""
    if turn.candidates:
        return [
            (one.candidate, one.text, finish_reason(one.finish_reason), one.logprobs)
            for one in turn.candidates
        ]
    return [(0, turn.text, finish_reason(turn.finish_reason), turn.logprobs)]


def _scored(scores: Scores) -> dict[str, Any] | None:
    return {"content": token_scores(scores), "refusal": None} if scores else None
