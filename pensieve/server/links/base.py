"""The transport-independent half of a link: states, generations, calls, the watchdog.

The watchdog detects an engine that makes no progress, by comparing its current step with earlier ones. A step's
expected time is the slowest recent step of similar size, scaled by tokens. Beyond one multiple of that the engine
counts as stalled, beyond a larger one as hung. A step larger than any before, such as the first, may have to compile:
only ``limit_s`` bounds it. A process that the system reports as stopped needs no estimate.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from pensieve.core import DEFAULT_QOS, RequestKey, SessionKey, TenantQos, TokenArray, pack_tokens
from pensieve.engine.messages import (
    Cancel,
    Choose,
    Command,
    EngineReady,
    Evict,
    Evicted,
    GetResidency,
    GetStrips,
    Memory,
    Report,
    ResidentTokens,
    SessionStrip,
    SetMemory,
    Stats,
    Stepping,
    Strips,
    Submit,
    Warm,
    Warmed,
)
from pensieve.errors import Internal, PensieveError
from pensieve.server.child import SilenceTimer
from pensieve.server.failures import draining, restarting, starting
from pensieve.server.links.engine_link import GenerationSink, LinkState
from pensieve.server.links.generations import CallAnswer, GenerationObserver, Generations, OpenGeneration
from pensieve.server.links.quarantine import ProbationGate, quarantined
from pensieve.server.tasks import cancel_and_wait

log = logging.getLogger(__name__)

STALLED_FACTOR: Final = 8.0
"""Multiple of a step's expected time after which health reports a stall."""
STALLED_FLOOR_S: Final = 3.0
"""The least time for that. With the interval of health checks it is below 5 s."""
HUNG_FACTOR: Final = 24.0
"""Multiple after which the engine is replaced. That loses its turns, so the limit is longer."""
HUNG_FLOOR_S: Final = 20.0
_KEPT_STEPS: Final = 16


class StepTimes:
    """Recent step times: the slowest of the latest few in each power of two of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            recent = self._seconds.setdefault(tokens.bit_length(), deque(maxlen=_KEPT_STEPS))
            recent.append(seconds)

    def expected(self, tokens: int) -> float | None:
        """Upper estimate of the seconds for a step of ``tokens``; None for one larger than any before. A step
        has a fixed cost and a cost per token. So a smaller step, scaled by tokens, gives an upper bound, and
        so does a larger one."""
        if not self._seconds or tokens.bit_length() > max(self._seconds):
            return None
        return min(
            max(recent) * max(1.0, tokens / (1 << (size - 1))) for size, recent in self._seconds.items()
        )


class Watchdog:
    """Progress is a finished step, or having nothing to do. Heartbeats show only that an idle engine lives."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: limit for a step without an estimate; caps the floors of the other limits."""
        self.limit_s = limit_s
        self.tick_s = min(0.25, limit_s / 8)
        self._silence = SilenceTimer(self.tick_s)
        self.reset()

    def reset(self) -> None:
        """A new engine starts: the old one's times say nothing about it."""
        self._times = StepTimes()
        self._steps = -1
        self._tokens: int | None = None
        self._busy = self._has_work = False
        self._without_step_s = self._frozen_s = 0.0
        self._silence.reset()

    @property
    def stalled(self) -> bool:
        return self._is_late(STALLED_FLOOR_S, STALLED_FACTOR)

    @property
    def hung(self) -> bool:
        """No progress for so long that none is likely."""
        return self._is_late(HUNG_FLOOR_S, HUNG_FACTOR)

    @property
    def frozen(self) -> bool:
        """The process was stopped from outside; the engine's requests are not to blame."""
        return self._frozen_s > 0

    @property
    def quiet_s(self) -> float:
        return self._silence.seconds

    def on_step_begin(self, tokens: int) -> None:
        self._silence.reset()
        self._tokens, self._busy = tokens, True

    def on_report(self, stats: Stats) -> None:
        self._silence.reset()
        self._busy = stats.running + stats.queued > 0
        if stats.steps_total != self._steps:
            self._times.observe(stats.last_batch_tokens, stats.last_step_seconds)
            self._steps = stats.steps_total
            self._without_step_s = 0.0

    def tick(self, elapsed_s: float, *, work_waits: bool, frozen: bool = False) -> None:
        """Time has passed. ``frozen``: the system reports that the engine's process is stopped."""
        elapsed = self._silence.advance(elapsed_s)
        # The current step may hold only requests that were cancelled meanwhile.
        self._has_work = work_waits or self._busy
        self._without_step_s = self._without_step_s + elapsed if work_waits else 0.0
        self._frozen_s = self._frozen_s + elapsed if frozen else 0.0

    def _is_late(self, floor_s: float, factor: float) -> bool:
        floor = min(floor_s, self.limit_s)
        if self._frozen_s > floor:
            return True
        quiet = max(self._without_step_s, self._silence.seconds)
        if not self._has_work:
            return quiet > floor  # idle, and without heartbeats
        expected = None if self._tokens is None else self._times.expected(self._tokens)
        return quiet > (self.limit_s if expected is None else max(floor, factor * expected))


DEFAULT_STALL_LIMIT_S: Final = 60.0
QUIET_S: Final = 0.6
"""Slightly longer than an idle engine's heartbeat."""
T = TypeVar("T", bound=CallAnswer)


class BaseLink(abc.ABC):
    """``EngineLink`` without the transport. Subclasses call ``_receive`` and ``_on_engine_lost``."""

    def __init__(self, observer: GenerationObserver | None, stall_limit_s: float) -> None:
        self._generations = Generations(self._cancel, observer)
        self._watchdog = Watchdog(stall_limit_s)
        self._gate = ProbationGate(self._send, self._generations.fail)
        self._generations.on_closed = lambda generation, finished: self._gate.on_closed(
            generation, finished=finished
        )
        self._state = LinkState.STARTING
        self._ready: EngineReady | None = None
        self._stats = Stats()
        self._watch_task: asyncio.Task[None] | None = None
        self._wanted_memory: int | None = None
        """As the operator last asked, in bytes; None: not yet."""
        self._memory_task: asyncio.Task[None] | None = None
        """Tells a new engine."""
        self.restarts_total = 0
        self.on_state_change: Callable[[], None] = lambda: None
        """Called on the event loop after each change of ``state``."""

    @property
    def info(self) -> EngineReady:
        if self._ready is None:
            raise starting()
        return self._ready

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def stats(self) -> Stats:
        return self._stats

    @property
    def stalled(self) -> bool:
        return self._state is LinkState.SERVING and self._watchdog.stalled

    @property
    def condemned_turns_total(self) -> int:
        """Turns that were found guilty of ending engines."""
        return self._gate.blocklist.turns_total

    @property
    def condemned_sessions_total(self) -> int:
        """Times that a session was blocked for its guilty turns."""
        return self._gate.blocklist.sessions_total

    def submit(self, command: Submit, sink: GenerationSink) -> OpenGeneration:
        self._check_serving()
        generation = self._generations.open(sink)
        command = msgspec.structs.replace(command, request=generation.request)
        try:
            self._gate.check(command)
            self._gate.enter(generation, command)
        except PensieveError:
            self._generations.drop(generation)
            raise
        return generation

    def choose(self, session: SessionKey, candidate: int) -> None:
        self._send_best_effort(Choose(session=session, candidate=candidate), "which candidate was chosen")

    async def evict(self, session: SessionKey | None = None) -> int:
        return (await self._call(lambda call: Evict(call=call, session=session or ""), Evicted)).tokens

    async def residency(self, session: SessionKey) -> ResidentTokens:
        return await self._call(lambda call: GetResidency(call=call, session=session), ResidentTokens)

    async def memory(self, wanted: int | None = None) -> Memory:
        answer = await self._call(lambda call: SetMemory(call=call, wanted=wanted), Memory)
        if wanted is not None and not answer.refused:
            self._wanted_memory = wanted
        return answer

    async def read_strips(self) -> list[SessionStrip]:
        strips: list[SessionStrip] = []
        at = 0
        while True:
            piece = await self._call(functools.partial(GetStrips, at=at), Strips)
            strips += piece.sessions
            at = piece.next
            if not at:
                return strips

    async def warm(
        self, session: SessionKey, tokens: TokenArray, *, scope: str = "", qos: TenantQos = DEFAULT_QOS
    ) -> Warmed:
        if not self._gate.may_warm(session):
            held = await self.residency(session)
            return Warmed(held.call, "busy", held.device_tokens, held.host_tokens)
        packed = pack_tokens(tokens)
        return await self._call(
            lambda call: Warm(call=call, session=session, tokens=packed, scope=scope, qos=qos),
            Warmed,
        )

    @abc.abstractmethod
    async def start(self) -> None: ...

    @abc.abstractmethod
    async def stop(self) -> None: ...

    @abc.abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command without waiting. Raises PensieveError."""

    @abc.abstractmethod
    def _on_hang(self) -> None:
        """Called each tick while the engine counts as hung."""

    def _is_frozen(self) -> bool:
        """Whether the engine's process is stopped, by the system. Called when it has been quiet for a while."""
        return False

    def _set_state(self, state: LinkState) -> None:
        self._state = state
        self.on_state_change()

    def _receive(self, report: Report) -> None:
        for event in report.events:
            if isinstance(event, Stepping):
                self._watchdog.on_step_begin(event.tokens)
                self._gate.on_step_begin(event.requests)
                return
            if isinstance(event, EngineReady):
                self._ready = event
                if event.elastic_refusal:
                    log.warning("the device cache does not grow or shrink: %s", event.elastic_refusal)
        stats = report.stats
        if stats.held is None:
            before = self._stats
            stats = msgspec.structs.replace(stats, held=before.held, computed_ahead=before.computed_ahead)
        self._stats = stats
        self._watchdog.on_report(report.stats)
        self._generations.dispatch(report.events)
        self._gate.on_tokens()

    def _on_engine_up(self) -> None:
        self._watchdog.reset()
        if self._wanted_memory is not None:  # before the state, so that it precedes an operator's next call
            restoring = self._restore_memory(self._wanted_memory)
            self._memory_task = asyncio.create_task(restoring, name="wanted memory")
        self._set_state(LinkState.SERVING)
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch(), name="engine watchdog")

    async def _restore_memory(self, wanted: int) -> None:
        """Tell a new engine the wanted size of its device tier: each begins with the ceiling."""
        try:
            refused = (await self.memory(wanted)).refused
        except PensieveError as error:
            refused = error.reason
        if refused:
            log.warning("the new engine does not resize its device tier to %d bytes: %s", wanted, refused)

    def _on_engine_lost(self, *, killed_externally: bool = False) -> None:
        # Set the state first: a caller that hears of the failure and retries at once must be refused.
        self._set_state(LinkState.RESTARTING)
        self._stats = Stats()
        guilty = self._gate.on_engine_lost(killed_externally=killed_externally)
        if guilty is not None:
            log.error(
                "a request has ended the engine twice and is refused from now on: its session is told",
                extra=dict(guilty.log_fields),
            )
            self._generations.fail(guilty, quarantined())
        self._generations.fail_all(restarting)

    async def _shut_down(self) -> None:
        """Running generations fail with DRAINING."""
        self._set_state(LinkState.STOPPED)
        self._gate.reset()
        self._generations.fail_all(draining)
        for task in (self._watch_task, self._memory_task):
            if task is not None:
                await cancel_and_wait(task)
        self._watch_task = self._memory_task = None

    def _check_serving(self) -> None:
        if self._state is LinkState.SERVING:
            return
        errors = {LinkState.STARTING: starting, LinkState.RESTARTING: restarting, LinkState.STOPPED: draining}
        raise errors[self._state]()

    def _cancel(self, request: RequestKey, candidate: int | None) -> None:
        # The caller ignores all further events. An engine that reads its commands late computes in vain, or
        # is found to stall.
        self._send_best_effort(Cancel(request=request, candidate=candidate), "to cancel a generation")

    def _send_best_effort(self, command: Command, what: str) -> None:
        """Send a command without a reply, if an engine serves. ``what`` completes the warning when it fails."""
        if self._state is not LinkState.SERVING:
            return
        try:
            self._send(command)
        except PensieveError as error:
            log.warning("the engine was not told %s: %s", what, error.reason)

    async def _call(self, make: Callable[[int], Command], kind: type[T]) -> T:
        self._check_serving()
        call, answer = self._generations.open_call()
        try:
            self._send(make(call))
            got = await answer
        finally:
            answer.cancel()  # removes an abandoned call; no effect on an answered one
        if not isinstance(got, kind):
            raise Internal(f"the engine answered {type(got).__name__} where {kind.__name__} was due")
        return got

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(self._watchdog.tick_s)
            now = loop.time()
            if self._state is LinkState.SERVING:
                work_waits = len(self._generations) > 0 or self._generations.has_calls
                frozen = self._watchdog.quiet_s >= QUIET_S and self._is_frozen()
                self._watchdog.tick(now - before, work_waits=work_waits, frozen=frozen)
                if self._watchdog.hung:
                    self._on_hang()
            before = now
