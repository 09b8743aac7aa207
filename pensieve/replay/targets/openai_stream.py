"""The stream of one completion or response in the OpenAI protocol: bytes to tokens and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pensieve.replay.targets.base import TurnFailed


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    delta: _Delta | None = None


class _Response(msgspec.Struct):
    id: str = ""
    usage: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    """What is read of a streamed event; the rest of it is passed over."""

    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None
    # Of the Responses protocol.
    type: str = ""
    delta: str | None = None
    response: _Response | None = None


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Completion:
    """What came of one completion, filled by ``feed``."""

    pieces: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time); a piece that does not tell its ids is taken for one token until the server says how many."""
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    response_id: str = ""
    """In the Responses protocol: what the next turn names to go on."""
    _rest: bytes = b""
    """The end of what has come: an event that is not whole yet."""

    def feed(self, data: bytes, at: float) -> None:
        """Take in what came at a time: any part of a stream of server-sent events."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and (value := line[5:].strip()) != b"[DONE]":
                    self._take(_event_decoder.decode(value), at)

    def _take(self, event: _Event, at: float) -> None:
        if event.error:
            raise TurnFailed("SERVER_ERROR", str(event.error)[:300])
        self.usage = event.usage or self.usage
        for choice in event.choices:
            ids = choice.token_ids or ()
            text = choice.text or (choice.delta and choice.delta.content) or ""
            self.ids += ids
            if text:
                self.texts.append(text)
            if ids or text:
                self.pieces.append((len(ids) or 1, at))
        if event.type == "response.output_text.delta" and event.delta:
            self.texts.append(event.delta)
            self.pieces.append((1, at))
        if event.response is not None:
            self.response_id = event.response.id
            self.usage = _as_of_completions(event.response.usage) or self.usage

    def settle(self) -> None:
        """Make the pieces' tokens add up to what the server counted; the last pieces give or take the difference."""
        total = self.usage.get("completion_tokens")
        # Where ids came, every piece's count is exact already; without a total there is nothing to settle with.
        if self.ids or total is None or not self.pieces:
            return
        excess = sum(count for count, _ in self.pieces) - int(total)
        while excess > 0 and self.pieces:
            self.pieces.pop()
            excess -= 1
        if excess < 0:
            count, at = self.pieces[-1]
            self.pieces[-1] = count - excess, at


def _as_of_completions(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Counts of the Responses protocol under the names of the other."""
    if not usage:
        return {}
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
    }
