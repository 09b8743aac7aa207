"""The events of a response's stream, in the order of the protocol, numbered from 0."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pensieve.client import AsyncTurnStream, Piece, Turn
from pensieve.errors import PensieveError
from pensieve.http.common.answers import SentText, SentTokens
from pensieve.http.common.failures import failure_of
from pensieve.http.common.logprobs import token_scores
from pensieve.http.common.streams import DONE, event
from pensieve.http.responses.objects import Response, status_of, text_part
from pensieve.http.tools.events import OutputTeller


class Events:
    """Makes the events of one response."""

    def __init__(self, response: Response, after: int = -1) -> None:
        """``after``: the number of the last event that the client has; only later ones are made."""
        self._response = response
        self._after = after
        self._message = response.id.message
        self._sequence = 0
        self._sent = SentText()
        self._tokens = SentTokens(response.kept.asked.scored)

    async def of(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        """All of them; a failure is the last but one."""
        async for chunk in self._all(stream):
            if chunk:
                yield chunk
        yield DONE

    async def _all(self, stream: AsyncTurnStream) -> AsyncIterator[bytes]:
        yield self._whole("response.created", self._response.begun())
        yield self._whole("response.in_progress", self._response.begun())
        if not self._response.form.plain:
            async for chunk in self._spoken(stream):
                yield chunk
            return
        yield self._event("response.output_item.added", item=self._item("in_progress", []), output_index=0)
        yield self._event("response.content_part.added", **self._place, part=text_part(""))
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
        """The output where it is more than words."""
        teller = OutputTeller(self._response.items, self._response.form)
        try:
            async for piece in stream:
                text, (_, scores) = self._sent.new_text(piece), self._tokens.new_tokens(piece)
                for name, fields in teller.push(text or "", scores):
                    yield self._event(name, **fields)
        except PensieveError as error:
            for chunk in self._failed(error):
                yield chunk
            return
        turn = stream.turn
        status = status_of(turn)
        for name, fields in teller.finish("completed" if status == "completed" else "incomplete"):
            yield self._event(name, **fields)
        yield self._end(turn, status)

    def _end(self, turn: Turn, status: str) -> bytes:
        name = "response.completed" if status == "completed" else "response.incomplete"
        return self._whole(name, self._response.ended(turn))

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
        part = text_part(turn.text, turn.logprobs)
        return [
            self._event(
                "response.output_text.done", **self._place, text=turn.text, logprobs=part["logprobs"]
            ),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", item=self._item(done, [part]), output_index=0),
            self._end(turn, status),
        ]

    def _failed(self, error: PensieveError) -> list[bytes]:
        failure = failure_of(error)
        code = failure.code or "server_error"
        # Both forms: the specification has the parts under `error`, clients look for them at the top.
        parts: dict[str, Any] = {"message": failure.message, "code": code, "param": failure.param}
        return [
            self._event("error", **parts, error={**parts, "type": failure.kind}),
            self._whole("response.failed", self._response.failed("server_error", failure.message)),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {**self._response.message("", status), "status": status, "content": content}

    def _whole(self, name: str, snapshot: dict[str, Any]) -> bytes:
        return self._event(name, response=snapshot)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        """The next event; empty when the client has it."""
        numbered = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(numbered, name) if self._sequence > self._after + 1 else b""
