"""Generations and calls that wait for an engine: the common half of every link. Used on one event loop only.

A generation needs no task and no queue. Events are merged where they arrive: token ids are appended to one list, of
progress and receipt only the latest is kept. So a reader that has fallen behind costs as much memory as its answer has
tokens, gets everything in one event when it returns, and never holds up the engine or another reader.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from pensieve.core import FinishReason, RequestKey, TokenLogprob, Usage
from pensieve.engine.messages import (
    EngineReady,
    Event,
    Evicted,
    Failed,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
)
from pensieve.errors import (
    ContextLimitExceeded,
    Internal,
    PensieveError,
    ResourceExhausted,
    Unavailable,
)
from pensieve.server.links.engine_link import GenerationEvent

log = logging.getLogger(__name__)

Answer = Evicted | ResidentTokens
OVERLOAD_RETRY_S: Final = 1.0
"""When to try again after the engine's queue was full."""


class GenerationObserver(Protocol):
    """Is told what metrics want to know, when it arrives from the engine (not when a reader takes it)."""

    def first_token(self, seconds: float, usage: Usage) -> None:
        """``seconds`` since submission."""
        ...

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """``tokens`` more came ``seconds`` after the ones before."""
        ...

    def ended(self, outcome: str) -> None:
        """``FinishReason`` in lower case, ``cancelled``, or the reason of the failure."""
        ...


class NullObserver:
    """Ignores everything."""

    def first_token(self, seconds: float, usage: Usage) -> None:
        return

    def next_tokens(self, seconds: float, tokens: int) -> None:
        return

    def ended(self, outcome: str) -> None:
        return


class BufferedGeneration:
    """``engine_link.Generation``: what came and was not read yet, at most one event of each kind.

    Read in the order receipt, progress, output, finish. One reader.
    """

    def __init__(self, request: RequestKey, cancel: Callable[[RequestKey], None]) -> None:
        self._request = request
        self._cancel = cancel
        self._started: Started | None = None
        self._progress: RequestProgress | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: Finished | None = None
        self._error: PensieveError | None = None
        self._over = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def request(self) -> RequestKey:
        return self._request

    def __aiter__(self) -> BufferedGeneration:
        return self

    async def __anext__(self) -> GenerationEvent:
        while True:
            event = self._take()
            if event is not None:
                return event
            if self._over:
                raise StopAsyncIteration
            if self._error is not None:
                self._over = True
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def cancel(self) -> None:
        if self._over:
            return
        self._over = True
        self._started = self._progress = self._finished = None
        self._token_ids, self._logprobs = [], []
        self._cancel(self._request)
        self._wake()

    def put(self, event: GenerationEvent) -> None:
        """Merge ``event`` into what waits to be read."""
        if self._over:
            return
        if isinstance(event, Output):
            self._token_ids += event.token_ids
            self._logprobs += event.logprobs
        elif isinstance(event, RequestProgress):
            self._progress = event
        elif isinstance(event, Started):
            self._started = event
        else:
            self._finished = event
        self._wake()

    def fail(self, error: PensieveError) -> None:
        """Raise ``error`` to the reader once it has read what came before."""
        self._error = error
        self._wake()

    def _take(self) -> GenerationEvent | None:
        if self._started is not None:
            started, self._started = self._started, None
            return started
        if self._progress is not None:
            progress, self._progress = self._progress, None
            return progress
        if self._token_ids:
            output = Output(self._request, tuple(self._token_ids), tuple(self._logprobs))
            self._token_ids, self._logprobs = [], []
            return output
        if self._finished is not None:
            finished, self._finished = self._finished, None
            self._over = True
            return finished
        return None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Running:
    """A generation and what its metrics need."""

    __slots__ = ("generation", "submitted_at", "token_at", "usage")

    def __init__(self, generation: BufferedGeneration, now: float) -> None:
        self.generation = generation
        self.submitted_at = now
        self.token_at: float | None = None
        self.usage = Usage()


class Generations:
    """Deals an engine's events to the generations and calls they belong to."""

    def __init__(
        self, observer: GenerationObserver | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._observer = observer or NullObserver()
        self._clock = clock
        self._ids = itertools.count(1)
        self._running: dict[int, _Running] = {}
        self._calls: dict[int, asyncio.Future[Answer]] = {}

    def __len__(self) -> int:
        """Generations the engine still works on, read to the end or not."""
        return len(self._running)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def open(self, cancel: Callable[[RequestKey], None]) -> BufferedGeneration:
        """A new generation; ``cancel`` is called with its key when its reader gives up before the end."""

        def give_up(request: RequestKey) -> None:
            if self._running.pop(request, None) is not None:
                self._observer.ended("cancelled")
                cancel(request)

        request = RequestKey(next(self._ids))
        generation = BufferedGeneration(request, give_up)
        self._running[request] = _Running(generation, self._clock())
        return generation

    def drop(self, generation: BufferedGeneration) -> None:
        """Forget a generation that never reached the engine."""
        self._running.pop(generation.request, None)

    def open_call(self) -> tuple[int, asyncio.Future[Answer]]:
        """Number of a new call, and where its answer will be."""
        call = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        future.add_done_callback(lambda _: self._calls.pop(call, None))
        return call, future

    def deal(self, events: Iterable[Event]) -> None:
        """Hand out one report. What belongs to nobody any more (just cancelled) is dropped."""
        now = self._clock()
        for event in events:
            if isinstance(event, EngineReady):
                continue
            if isinstance(event, Evicted | ResidentTokens):
                future = self._calls.get(event.call)
                if future is not None and not future.done():
                    future.set_result(event)
                continue
            running = self._running.get(event.request)
            if running is not None:
                self._deal_one(running, event, now)

    def fail_all(self, make_error: Callable[[], PensieveError]) -> None:
        """Every generation and call ends with an error of its own: the engine that worked on them is gone."""
        running, self._running = self._running, {}
        for entry in running.values():
            error = make_error()
            self._observer.ended(error.reason.lower())
            entry.generation.fail(error)
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(make_error())

    def _deal_one(self, running: _Running, event: GenerationEvent | Failed, now: float) -> None:
        if isinstance(event, Failed):
            del self._running[event.request]
            self._observer.ended(event.reason.lower())
            running.generation.fail(_failure(event))
            return
        if isinstance(event, Started):
            running.usage = event.usage
        elif isinstance(event, Output):
            self._observe_tokens(running, len(event.token_ids), now)
        elif isinstance(event, Finished):
            del self._running[event.request]
            self._observer.ended(FinishReason(event.reason).name.lower())
        running.generation.put(event)

    def _observe_tokens(self, running: _Running, tokens: int, now: float) -> None:
        if running.token_at is None:
            self._observer.first_token(now - running.submitted_at, running.usage)
        else:
            self._observer.next_tokens(now - running.token_at, tokens)
        running.token_at = now


def _failure(event: Failed) -> PensieveError:
    """The error a caller sees for a request that the engine could not serve."""
    kinds: dict[str, type[PensieveError]] = {
        "CONTEXT_LIMIT_EXCEEDED": ContextLimitExceeded,
        "SERVER_OVERLOADED": ResourceExhausted,
        "DRAINING": Unavailable,
    }
    wait = OVERLOAD_RETRY_S if event.reason in ("SERVER_OVERLOADED", "DRAINING") else None
    return kinds.get(event.reason, Internal)(event.message, reason=event.reason, retry_after_s=wait)
