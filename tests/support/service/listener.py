"""A sink for one generation that keeps what it hears, for tests that read it in their own time."""

from __future__ import annotations

import asyncio
from typing import Any

from pensieve.core import Sampling, SessionKey, TokenArray, pack_tokens
from pensieve.engine.messages import CandidateFinished, Finished, Output, RequestProgress, Started, Submit
from pensieve.server.links.engine_link import EngineLink, Generation

Heard = Started | RequestProgress | Output | CandidateFinished | Finished


class Listener:
    """``GenerationSink``. Iteration gives the events in their order; it ends, or raises, as the generation did."""

    def __init__(self) -> None:
        self.events: list[Heard] = []
        self.error: Exception | None = None
        self.ends = 0
        """Calls of ``finished`` and ``failed``: the protocol promises one at most."""
        self._read = 0
        self._news = asyncio.Event()

    def started(self, event: Started) -> None:
        self._hear(event)

    def progress(self, event: RequestProgress) -> None:
        self._hear(event)

    def tokens(self, event: Output) -> None:
        self._hear(event)

    def candidate_finished(self, event: CandidateFinished) -> None:
        self._hear(event)

    def finished(self, event: Finished) -> None:
        self.ends += 1
        self._hear(event)

    def failed(self, error: Exception) -> None:
        self.ends += 1
        self.error = error
        self._news.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Output) for token in event.token_ids]

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> Heard:
        while self._read == len(self.events):
            if self.error is not None:
                raise self.error
            if self.ends:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._read += 1
        return self.events[self._read - 1]

    async def first_output(self) -> None:
        """Wait until tokens have come."""
        async for event in self:
            if isinstance(event, Output):
                return

    def _hear(self, event: Heard) -> None:
        self.events.append(event)
        self._news.set()


def submission(
    session: SessionKey, tokens: TokenArray, sampling: Sampling, *, num_new: int = 3, **more: Any
) -> Submit:
    return Submit(0, session, pack_tokens(tokens), num_new, sampling, **more)


class Listened(Listener):
    """A listener and the handle of its generation, submitted with it."""

    def __init__(self, link: EngineLink, session: SessionKey, tokens: TokenArray, sampling: Sampling) -> None:
        """Three of ``tokens`` are new."""
        super().__init__()
        self.generation: Generation = link.submit(submission(session, tokens, sampling), self)

    def cancel(self) -> None:
        self.generation.cancel()
