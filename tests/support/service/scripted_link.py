"""An ``EngineLink`` that does what a test tells it, inside the test's event loop and without time passing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pensieve.core import (
    FinishReason,
    Phase,
    RequestKey,
    Sampling,
    SessionKey,
    TokenArray,
    TokenLogprob,
    Usage,
)
from pensieve.engine.messages import (
    EngineReady,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
)
from pensieve.errors import PensieveError
from pensieve.server.links.engine_link import GenerationEvent, LinkState


class ScriptedGeneration:
    """What one turn asked for, and the levers to answer it."""

    def __init__(
        self, request: int, session: SessionKey, tokens: TokenArray, num_new: int, sampling: Sampling
    ) -> None:
        self._request = RequestKey(request)
        self.session = session
        self.tokens = tokens.tolist()
        self.num_new = num_new
        self.sampling = sampling
        self.cancelled = False
        self._events: asyncio.Queue[GenerationEvent | PensieveError | None] = asyncio.Queue()
        self._over = False

    @property
    def request(self) -> RequestKey:
        return self._request

    def usage(self, output: int = 0) -> Usage:
        old = len(self.tokens) - self.num_new
        return Usage(
            context_tokens=len(self.tokens),
            new_tokens=self.num_new,
            gpu_cached_tokens=old - old // 2,
            recomputed_tokens=old // 2,
            output_tokens=output,
        )

    def admit(self) -> None:
        self._events.put_nowait(Started(self._request, self.usage()))
        self._events.put_nowait(RequestProgress(self._request, Phase.DECODE))

    def progress(self, phase: Phase, **fields: int) -> None:
        self._events.put_nowait(RequestProgress(self._request, phase, **fields))

    def emit(self, *tokens: int) -> None:
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.sampling.top_logprobs is not None:
            logprobs = tuple(TokenLogprob(t, -0.5, ((t, -0.5),)) for t in tokens)
        self._events.put_nowait(Output(self._request, tokens, logprobs))

    def finish(self, reason: FinishReason = FinishReason.EOS, output: int = 0) -> None:
        self._events.put_nowait(Finished(self._request, reason, self.usage(output)))

    def fail(self, error: PensieveError) -> None:
        self._events.put_nowait(error)

    def cancel(self) -> None:
        if not self._over:
            self.cancelled = self._over = True
            self._events.put_nowait(None)

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> GenerationEvent:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None or self.cancelled:
            raise StopAsyncIteration
        if isinstance(event, PensieveError):
            self._over = True
            raise event
        self._over = isinstance(event, Finished)
        return event


Answer = Callable[[ScriptedGeneration], Sequence[int]]


class ScriptedLink:
    """``answer`` set: every generation gets it at once, one event per token. ``answer`` None: the test does it all."""

    def __init__(self, answer: Answer | None, *, context_limit: int = 256, vocab_size: int = 420) -> None:
        self.answer = answer
        self.generations: list[ScriptedGeneration] = []
        self.submitted = asyncio.Event()
        self.refuse: PensieveError | None = None
        self.evicted: list[SessionKey | None] = []
        self.info = EngineReady(context_limit, vocab_size, "cpu", "float32", 1 << 20, 1 << 20, 32)
        self.state = LinkState.SERVING
        self.stats = Stats(steps_total=1, device_used=7)
        self.stalled = False

    def submit(
        self, session: SessionKey, tokens: TokenArray, num_new: int, sampling: Sampling
    ) -> ScriptedGeneration:
        if self.refuse is not None:
            raise self.refuse
        generation = ScriptedGeneration(len(self.generations), session, tokens, num_new, sampling)
        self.generations.append(generation)
        self.submitted.set()
        if self.answer is not None:
            tokens_out = self.answer(generation)
            generation.admit()
            for token in tokens_out:
                generation.emit(token)
            generation.finish(output=len(tokens_out))
        return generation

    async def next_generation(self) -> ScriptedGeneration:
        """The generation that is submitted next, or was since the last call."""
        await self.submitted.wait()
        self.submitted.clear()
        return self.generations[-1]

    async def start(self) -> None:
        """It is up from the beginning."""

    async def stop(self) -> None:
        self.state = LinkState.STOPPED

    async def evict(self, session: SessionKey | None = None) -> int:
        self.evicted.append(session)
        return 11

    async def residency(self, session: SessionKey) -> ResidentTokens:
        return ResidentTokens(0, device_tokens=3, host_tokens=2)
