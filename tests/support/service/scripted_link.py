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
    Event,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
)
from pensieve.errors import PensieveError
from pensieve.server.links.engine_link import GenerationSink, LinkState
from pensieve.server.links.generations import Generations


class ScriptedGeneration:
    """What one turn asked for, and the levers to answer it: its events are dealt out as those of every link are."""

    def __init__(
        self,
        generations: Generations,
        sink: GenerationSink,
        session: SessionKey,
        tokens: TokenArray,
        num_new: int,
        sampling: Sampling,
    ) -> None:
        self._generations = generations
        self._open = generations.open(sink)
        self.session = session
        self.tokens = tokens.tolist()
        self.num_new = num_new
        self.sampling = sampling
        self.cancelled = False
        """The engine was told to stop."""

    @property
    def request(self) -> RequestKey:
        return self._open.request

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
        self._deal(Started(self.request, self.usage()), RequestProgress(self.request, Phase.DECODE))

    def progress(self, phase: Phase, **fields: int) -> None:
        self._deal(RequestProgress(self.request, phase, **fields))

    def emit(self, *tokens: int) -> None:
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.sampling.top_logprobs is not None:
            logprobs = tuple(TokenLogprob(t, -0.5, ((t, -0.5),)) for t in tokens)
        self._deal(Output(self.request, tokens, logprobs))

    def finish(self, reason: FinishReason = FinishReason.EOS, output: int = 0) -> None:
        self._deal(Finished(self.request, reason, self.usage(output)))

    def fail(self, error: PensieveError) -> None:
        self._generations.fail(self._open, error)

    def cancel(self) -> None:
        self._open.cancel()

    def _deal(self, *events: Event) -> None:
        self._generations.deal(events)


Answer = Callable[[ScriptedGeneration], Sequence[int]]


class ScriptedLink:
    """``answer`` set: every generation gets it at once, one event per token. ``answer`` None: the test does it all."""

    def __init__(self, answer: Answer | None, *, context_limit: int = 256, vocab_size: int = 420) -> None:
        self.answer = answer
        self.generations: list[ScriptedGeneration] = []
        self._dealer = Generations(self._cancelled)
        self.submitted = asyncio.Event()
        self.refuse: PensieveError | None = None
        self.evicted: list[SessionKey | None] = []
        self.info = EngineReady(context_limit, vocab_size, "cpu", "float32", 1 << 20, 1 << 20, 32)
        self.state = LinkState.SERVING
        self.stats = Stats(steps_total=1, device_used=7)
        self.stalled = False

    def submit(
        self, session: SessionKey, tokens: TokenArray, num_new: int, sampling: Sampling, sink: GenerationSink
    ) -> ScriptedGeneration:
        if self.refuse is not None:
            raise self.refuse
        generation = ScriptedGeneration(self._dealer, sink, session, tokens, num_new, sampling)
        self.generations.append(generation)
        self.submitted.set()
        if self.answer is not None:
            # Not before this returns: no link calls a sink that early.
            asyncio.get_running_loop().call_soon(_play, generation, self.answer(generation))
        return generation

    def _cancelled(self, request: RequestKey) -> None:
        next(one for one in self.generations if one.request == request).cancelled = True

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


def _play(generation: ScriptedGeneration, tokens: Sequence[int]) -> None:
    """A whole answer, one event per token."""
    generation.admit()
    for token in tokens:
        generation.emit(token)
    generation.finish(output=len(tokens))
