"""The stream of one completion in the OpenAI protocol: bytes to tokens and times."""

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


class _Event(msgspec.Struct):
    """What is read of a streamed event; the rest of it is passed over."""

    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Completion:
    """What came of one completion, filled by ``feed``."""

    pieces: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time); a piece that does not tell its ids is taken for one token until the server says how many."""
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    _rest: bytes = b""
    """Of what has come, the event that is not whole yet."""

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

    def settle(self) -> None:
        """Make the pieces' tokens add up to what the server counted; the last pieces give or take the difference."""
        total = self.usage.get("completion_tokens")
        if self.ids or total is None or not self.pieces:
            return
        excess = sum(count for count, _ in self.pieces) - int(total)
        while excess > 0 and self.pieces:
            self.pieces.pop()
            excess -= 1
        if excess < 0:
            count, at = self.pieces[-1]
            self.pieces[-1] = count - excess, at
