"""An ``EngineLink`` that does what a test tells it, inside the test's event loop and without time passing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pensieve.core import (
    DEFAULT_QOS,
    FinishReason,
    Phase,
    RequestKey,
    SessionKey,
    TenantQos,
    TokenArray,
    TokenLogprob,
    Usage,
    unpack_tokens,
)
from pensieve.engine.messages import (
    CandidateFinished,
    EngineReady,
    Event,
    Finished,
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
    Submit,
    Warmed,
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
        command: Submit,
    ) -> None:
        self._generations = generations
        self._open = generations.open(sink)
        self.session = command.session
        self.tokens = unpack_tokens(command.tokens).tolist()
        self.num_new = command.num_new
        self.sampling = command.sampling
        self.scope = command.scope
        self.hints = command.hints
        self.standing = command.qos
        self.predicted = unpack_tokens(command.predicted).tolist()
        self.cancelled = False
        """The engine was told to stop."""
        self.cancelled_candidates: list[int] = []
        """The engine was told to stop these alone."""

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

    def emit(
        self,
        *tokens: int,
        candidate: int = 0,
        logprob: float = -0.5,
        drafts: tuple[int, int] = (0, 0),
    ) -> None:
        """``drafts``: those of the candidate so far, and those accepted."""
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.sampling.top_logprobs is not None:
            logprobs = tuple(TokenLogprob(t, logprob, ((t, logprob),)) for t in tokens)
        self._deal(Output(self.request, tokens, logprobs, candidate, *drafts))

    def finish_candidate(self, candidate: int, reason: FinishReason = FinishReason.EOS) -> None:
        """An engine does so for each that it was not told to stop, before it finishes the whole."""
        self._deal(CandidateFinished(self.request, candidate, reason))

    def finish(self, reason: FinishReason = FinishReason.EOS, output: int = 0) -> None:
        self._deal(Finished(self.request, reason, self.usage(output)))

    def fail(self, error: PensieveError) -> None:
        self._generations.fail(self._open, error)

    def cancel(self) -> None:
        self._open.cancel()

    def cancel_candidate(self, candidate: int) -> None:
        self._open.cancel_candidate(candidate)

    def _deal(self, *events: Event) -> None:
        self._generations.dispatch(events)


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
        self.chosen: list[tuple[SessionKey, int]] = []
        self.warmed: list[tuple[SessionKey, list[int], str]] = []
        """Session, history and scope of each wish to warm."""
        self.warm_refusal = ""
        self.warm_gate = asyncio.Event()
        """No wish to warm is answered while this is not set."""
        self.warm_gate.set()
        self.info = EngineReady(context_limit, vocab_size, "cpu", "float32", 1 << 20, 1 << 20, 32, True)
        self.state = LinkState.SERVING
        self.memory_calls: list[int | None] = []
        self.memory_refusal = ""
        self.stats = Stats(steps_total=1, device_used=7)
        self.stalled = False

    def submit(self, command: Submit, sink: GenerationSink) -> ScriptedGeneration:
        if self.refuse is not None:
            raise self.refuse
        generation = ScriptedGeneration(self._dealer, sink, command)
        self.generations.append(generation)
        self.submitted.set()
        if self.answer is not None:
            # Not before this returns: no link calls a sink that early.
            asyncio.get_running_loop().call_soon(_play, generation, self.answer(generation))
        return generation

    def _cancelled(self, request: RequestKey, candidate: int | None) -> None:
        generation = next(one for one in self.generations if one.request == request)
        if candidate is None:
            generation.cancelled = True
        else:
            generation.cancelled_candidates.append(candidate)

    def choose(self, session: SessionKey, candidate: int) -> None:
        self.chosen.append((session, candidate))

    async def next_generation(self) -> ScriptedGeneration:
        """The generation that is submitted next, or was since the last call."""
        await self.submitted.wait()
        self.submitted.clear()
        return self.generations[-1]

    async def start(self) -> None:
        """It is up from the beginning."""

    async def stop(self) -> None:
        self.state = LinkState.STOPPED

    async def memory(self, wanted: int | None = None) -> Memory:
        """The answer of an engine that holds its ceiling."""
        self.memory_calls.append(wanted)
        floor, ceiling = self.info.device_floor, self.info.device_ceiling
        return Memory(1, ceiling, ceiling if wanted is None else wanted, floor, ceiling, self.memory_refusal)

    async def evict(self, session: SessionKey | None = None) -> int:
        self.evicted.append(session)
        return 11

    async def residency(self, session: SessionKey) -> ResidentTokens:
        return ResidentTokens(0, device_tokens=3, host_tokens=2)

    async def warm(
        self, session: SessionKey, tokens: TokenArray, *, scope: str = "", qos: TenantQos = DEFAULT_QOS
    ) -> Warmed:
        if self.refuse is not None:
            raise self.refuse
        self.warmed.append((session, tokens.tolist(), scope))
        await self.warm_gate.wait()
        return Warmed(0, self.warm_refusal, device_tokens=5, host_tokens=1)


def _play(generation: ScriptedGeneration, tokens: Sequence[int]) -> None:
    """A whole answer, one event per token. Candidate ``i`` of several says the same without its first ``i`` tokens."""
    generation.admit()
    several = generation.sampling.candidates > 1
    for at in range(len(tokens)):
        for candidate in range(generation.sampling.candidates):
            if at + candidate < len(tokens):
                # The later ones are the likelier ones.
                generation.emit(tokens[at + candidate], candidate=candidate, logprob=-1 / (1 + candidate))
    for candidate in range(generation.sampling.candidates if several else 0):
        if candidate not in generation.cancelled_candidates:
            generation.finish_candidate(candidate)
    generation.finish(output=len(tokens))
