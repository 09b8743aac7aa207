"""Generations and calls that wait for an engine: common to all links. Used on one event loop only."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from pensieve.core import FinishReason, RequestKey, Usage
from pensieve.engine.messages import (
    CandidateFinished,
    EngineReady,
    Event,
    Evicted,
    Failed,
    Finished,
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stepping,
    Strips,
    Warmed,
)
from pensieve.errors import (
    ContextLimitExceeded,
    Internal,
    InvalidArgument,
    PensieveError,
    ResourceExhausted,
    Unavailable,
)
from pensieve.logs import bound_fields
from pensieve.server.links.engine_link import GenerationSink

CallAnswer = Evicted | Memory | ResidentTokens | Strips | Warmed
GenerationEvent = Started | RequestProgress | Output | CandidateFinished | Finished | Failed
OVERLOAD_RETRY_S: Final = 1.0
"""When to retry after the engine's queue was full."""


class GenerationObserver(Protocol):
    """Receives data for metrics when it arrives from the engine."""

    def first_token(self, seconds: float, usage: Usage) -> None:
        """The first token came ``seconds`` after submission; ``usage`` is the engine's receipt at admission."""
        ...

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """``tokens`` more came ``seconds`` after the previous ones."""
        ...

    def on_generation_end(self, outcome: str) -> None:
        """``outcome``: ``FinishReason`` in lower case, ``cancelled``, or the reason of the failure."""
        ...


class NullObserver:
    def first_token(self, seconds: float, usage: Usage) -> None:
        return

    def next_tokens(self, seconds: float, tokens: int) -> None:
        return

    def on_generation_end(self, outcome: str) -> None:
        return


class OpenGeneration:
    """A generation that has not ended, from its submission on."""

    __slots__ = (
        "_owner",
        "log_fields",
        "num_output_tokens",
        "request",
        "sink",
        "submitted_at",
        "token_at",
        "usage",
    )

    def __init__(self, owner: Generations, request: RequestKey, sink: GenerationSink, now: float) -> None:
        self._owner = owner
        self.request = request
        self.sink = sink
        self.submitted_at = now
        self.token_at: float | None = None
        self.usage = Usage()
        self.num_output_tokens = 0
        """Output tokens so far, of candidate 0."""
        self.log_fields = bound_fields()
        """Log fields of the task that opened it, which is its turn's."""

    def cancel(self) -> None:
        self._owner.cancel(self)

    def cancel_candidate(self, candidate: int) -> None:
        self._owner.cancel_candidate(self, candidate)


class Generations:
    """Dispatches an engine's events to the sinks and calls they belong to."""

    def __init__(
        self,
        cancel: Callable[[RequestKey, int | None], None],
        observer: GenerationObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cancel`` tells the engine to stop a generation, or one candidate of it."""
        self._send_cancel = cancel
        self._observer = observer or NullObserver()
        self._clock = clock
        self._ids = itertools.count(1)
        self._open: dict[int, OpenGeneration] = {}
        self._calls: dict[int, asyncio.Future[CallAnswer]] = {}
        self.on_closed: Callable[[OpenGeneration, bool], None] = lambda generation, finished: None
        """Called with each generation that is over, and whether the engine finished it."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def open(self, sink: GenerationSink) -> OpenGeneration:
        generation = OpenGeneration(self, RequestKey(next(self._ids)), sink, self._clock())
        self._open[generation.request] = generation
        return generation

    def drop(self, generation: OpenGeneration) -> None:
        """Remove a generation that never reached the engine."""
        self._open.pop(generation.request, None)

    def cancel(self, generation: OpenGeneration) -> None:
        """Cancelling a generation that has ended has no effect."""
        if self._open.pop(generation.request, None) is not None:
            self._observer.on_generation_end("cancelled")
            self._send_cancel(generation.request, None)
            self.on_closed(generation, False)

    def cancel_candidate(self, generation: OpenGeneration, candidate: int) -> None:
        if generation.request in self._open:
            self._send_cancel(generation.request, candidate)

    def fail(self, generation: OpenGeneration, error: PensieveError) -> None:
        """End a generation with ``error``. No effect if it has ended."""
        if self._open.pop(generation.request, None) is not None:
            self._observer.on_generation_end(error.reason.lower())
            self.on_closed(generation, False)
            generation.sink.failed(error)

    def fail_all(self, make_error: Callable[[], PensieveError]) -> None:
        """Fail every generation and call, each with an error of its own, when the engine is gone."""
        for generation in list(self._open.values()):
            self.fail(generation, make_error())
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(make_error())

    def open_call(self) -> tuple[int, asyncio.Future[CallAnswer]]:
        """The number of a new call, and the future of its answer."""
        call = next(self._ids)
        future: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        future.add_done_callback(lambda _: self._calls.pop(call, None))
        return call, future

    def dispatch(self, events: Iterable[Event]) -> None:
        """Dispatch the events of one report; drop those of cancelled generations and calls."""
        now = self._clock()
        for event in events:
            match event:
                case Output() | RequestProgress() | Started() | CandidateFinished() | Finished() | Failed():
                    generation = self._open.get(event.request)
                    if generation is not None:
                        self._dispatch_one(generation, event, now)
                case Evicted() | Memory() | ResidentTokens() | Strips() | Warmed():
                    future = self._calls.get(event.call)
                    if future is not None and not future.done():
                        future.set_result(event)
                case EngineReady() | Stepping():
                    """Handled by the link itself."""

    def _dispatch_one(self, generation: OpenGeneration, event: GenerationEvent, now: float) -> None:
        try:
            match event:
                case Output():
                    # The other candidates' tokens come in the same steps, and would count each gap again.
                    if event.candidate == 0:
                        generation.num_output_tokens += len(event.token_ids)
                        self._observe_tokens(generation, len(event.token_ids), now)
                    generation.sink.tokens(event)
                case RequestProgress():
                    generation.sink.progress(event)
                case Started():
                    generation.usage = event.usage
                    generation.sink.started(event)
                case CandidateFinished():
                    generation.sink.candidate_finished(event)
                case Finished():
                    del self._open[event.request]
                    self._observer.on_generation_end(FinishReason(event.reason).name.lower())
                    self.on_closed(generation, True)
                    generation.sink.finished(event)
                case Failed():
                    self.fail(generation, _failure(event))
        except Exception as error:
            # A bug in one sink must cost one turn, not the rest of this report and with it the engine.
            self.cancel(generation)
            generation.sink.failed(error)

    def _observe_tokens(self, generation: OpenGeneration, tokens: int, now: float) -> None:
        if generation.token_at is None:
            self._observer.first_token(now - generation.submitted_at, generation.usage)
        else:
            self._observer.next_tokens(now - generation.token_at, tokens)
        generation.token_at = now


def _failure(event: Failed) -> PensieveError:
    """The error a caller sees for a request that the engine could not serve."""
    kinds: dict[str, type[PensieveError]] = {
        "CONTEXT_LIMIT_EXCEEDED": ContextLimitExceeded,
        "SERVER_OVERLOADED": ResourceExhausted,
        "DRAINING": Unavailable,
        "GRAMMAR_TOO_COSTLY": InvalidArgument,
    }
    wait = OVERLOAD_RETRY_S if event.reason in ("SERVER_OVERLOADED", "DRAINING") else None
    return kinds.get(event.reason, Internal)(event.message, reason=event.reason, retry_after_s=wait)
