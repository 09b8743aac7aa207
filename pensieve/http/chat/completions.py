"""Chat completions, as one document or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from pensieve.client import AsyncTurnStream, TokenLogprob, Turn
from pensieve.errors import PensieveError
from pensieve.http.common.answers import SentText, SentTokens, finish_reason, usage_of
from pensieve.http.common.failures import failure_of
from pensieve.http.common.logprobs import token_scores
from pensieve.http.common.streams import DONE, event
from pensieve.http.tools.events import ChatTeller, chat_teller
from pensieve.http.tools.outputs import chat_message
from pensieve.speech import PLAIN, SpeechForm, read

Scores = tuple[TokenLogprob, ...]


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
                "logprobs": _scored(scores),
                "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,
            }
            for index, text, reason, scores in _answers(turn)
            for answer in (read(text, self.form),)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage_of(turn)}

    async def chunks(
        self,
        stream: AsyncTurnStream,
        *,
        include_usage: bool,
        scored: bool,
        around: AbstractAsyncContextManager[None],
    ) -> AsyncIterator[bytes]:
        """The answer as it comes, ``scored`` with log-probabilities; errors after the first chunk are an event too.

        ``around`` is entered while the turn runs, and left before its error is told.
        """
        tellers: dict[int, ChatTeller] = {}
        sent, tokens = SentText(), SentTokens(scored)
        try:
            async with around:
                async for piece in stream:
                    text, (_, scores) = sent.new_text(piece), tokens.new_tokens(piece)
                    if text is None and not scores:
                        continue
                    teller = self._teller(tellers, piece.candidate)
                    if scores and not teller.begun:
                        # As OpenAI does: its client for Node tells scores twice that come with an answer's first chunk.
                        yield self._chunk(piece.candidate, teller.nothing())
                    # A chunk without text carries the scores of tokens whose text is held back or belongs to no part.
                    deltas = [*teller.push(text or "")] or ([teller.nothing()] if scores else [])
                    for delta in deltas:
                        yield self._chunk(piece.candidate, delta, scores=scores)
                        scores = ()
        except PensieveError as error:
            yield event(failure_of(error).body)
            return
        for index, _, reason, _ in _answers(stream.turn):
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

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, scores: Scores = ()
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
