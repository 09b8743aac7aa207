"""The engine: one step at a time over all conversations. Life of a request inside it:

1. ``handle(Submit)``: the context (token ids, whole) enters the scheduler's queue; one that can never fit is refused.
2. ``scheduler.plan``: when pages and budget allow, the cache pins what it has of the context and finds pages for the
   rest; hits cost nothing, host chunks are planned to be copied in, dropped and new ranges become spans.
3. ``worker.launch``: copies, runs the model over all spans, samples.
4. ``scheduler.launched`` and, with the step's result, ``scheduler.commit``: tokens are appended; requests go on, or
   finish and leave their chunks behind.

``handle(Warm)`` makes a request, too, one that computes no answer: see ``engine.warm_ups``.
What comes of it leaves as events: ``Started`` with the receipt, ``RequestProgress``, ``Output``, ``Finished``.

Overlapped, a step is planned and launched while the one before it runs, and only then is that one's result awaited:
the device never waits for Python. Not overlapped, a step's result is awaited before the next is planned.

Who writes what:

==============================  =================  ===========================================
state                           only writer        readers
==============================  =================  ===========================================
queue, running set, progress    ``Scheduler``      engine
chunk places, pins, pages       ``CacheManager``   scheduler (ids), worker (pages, in the plan)
KV tensors                      worker             kernels
conversation history            the front end      nobody here: it comes with each ``Submit``
==============================  =================  ===========================================

One thread owns an engine. It knows token ids only: no text, no clients, no durable state; it may die at any time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from pensieve.core import FinishReason, Phase, RequestKey, SessionKey, unpack_tokens
from pensieve.debug import debug_enabled, failpoint
from pensieve.engine.candidates import Candidates
from pensieve.engine.looks.looker import Looker
from pensieve.engine.messages import (
    Cancel,
    CandidateFinished,
    Choose,
    Command,
    EngineReady,
    Event,
    Evict,
    Evicted,
    Failed,
    Finished,
    GetResidency,
    GetStrips,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
    Submit,
    Warm,
    Warmed,
)
from pensieve.engine.plan import PendingStep, Plan, StepResult, StepWorker
from pensieve.engine.process.announcing import Announcer
from pensieve.engine.request import Request
from pensieve.engine.scheduler import Scheduler, Token


@dataclass(slots=True)
class _Totals:
    """Counters since start, for ``Stats``: steps, tokens of started requests by their source, copies, time."""

    steps: int = 0
    gpu_cached: int = 0
    swapped_in: int = 0
    recomputed: int = 0
    new: int = 0
    output: int = 0
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_batch_tokens: int = 0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step that the worker has begun."""

    plan: Plan
    step: PendingStep
    time: float
    """When its planning began."""


class Engine:
    """Scheduler, cache and worker in one loop body. ``clock``: monotonic seconds; tests inject a virtual one."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        ready: EngineReady,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlapped: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._worker = worker
        self._ready = ready
        self._clock = clock
        self._requests: dict[RequestKey, Request] = {}
        self._candidates = Candidates(scheduler, scheduler.cache)
        self._looker = Looker(scheduler)
        self.announcer = Announcer(lambda key: self._candidates.of(key)[0])
        self._phases: dict[RequestKey, Phase] = {}
        """What was last reported of each request's progress."""
        self._totals = _Totals()
        self._overlapped = overlapped
        self._in_flight: _Launch | None = None
        """Overlapped: the step that runs while the next is planned."""
        self._background = False
        """The latest plan was not empty, so the next may have something to copy out even if no request is left."""
        self._last_commit = -math.inf
        self._checks = debug_enabled()

    def ready(self) -> EngineReady:
        """What this engine can do."""
        return self._ready

    @property
    def has_work(self) -> bool:
        """Whether ``step`` may have something to do without a further command."""
        return self._scheduler.has_requests or self._background or self._in_flight is not None

    def handle(self, command: Command) -> list[Event]:
        """Take in one command, between steps; returns what can be answered at once."""
        match command:
            case Submit():
                return self._submit(command)
            case Cancel(request, None):
                self._candidates.cancel(RequestKey(request), self._clock())
                self._forget(RequestKey(request))
            case Cancel(request, int(candidate)):
                reason = self._candidates.stop(RequestKey(request), candidate, self._clock())
                return [] if reason is None else [self._finished(RequestKey(request), reason, self._clock())]
            case Choose(session, candidate):
                self._candidates.choose(SessionKey(session), candidate, self._clock())
            case Evict(call, session):
                return [Evicted(call, self._evict(SessionKey(session) if session else None))]
            case GetResidency(call, session):
                held = self._cache.residency(SessionKey(session))
                return [ResidentTokens(call, held.device, held.host)]
            case GetStrips(call, at):
                return [self._looker.look(call, at, self._clock())]
            case Warm():
                return [self._warm(command)]
        return []

    def step(self) -> list[Event]:
        """Launch one step and commit one, the same or the one before; [] when there was nothing to do.

        Raises whatever the worker raises.
        """
        events: list[Event] = []
        launch = self._launch(events)
        self._background = launch is not None
        if self._overlapped:
            # What was just launched runs on; what is committed is the step before it.
            launch, self._in_flight = self._in_flight, launch
        if launch is not None:
            self._commit(launch, events)
        if self._checks:
            self._cache.check()
        return events

    def _launch(self, events: list[Event]) -> _Launch | None:
        started = self._clock()
        with self.announcer.blaming(self._requests):
            plan = self._scheduler.plan(started)
        planned = self._clock()
        self._looker.plan = plan
        self._totals.parts["plan"] += planned - started
        if plan.is_empty:
            return None
        for request in self._scheduler.admitted:
            events.append(self._started(request))
            self._candidates.started(request.key)
        self.announcer.launching(plan, self._in_flight.plan if self._in_flight is not None else None)
        launch = _Launch(plan, self._worker.launch(plan), started)
        self._scheduler.launched(plan)
        self._totals.parts["launch"] += self._clock() - planned
        failpoint("engine_mid_step")
        return launch

    def _commit(self, launch: _Launch, events: list[Event]) -> None:
        waits = self._clock()
        result = launch.step.result()
        now = self._clock()
        self._totals.parts["wait"] += now - waits
        tokens = self._scheduler.commit(launch.plan, result, now)
        # Overlapped steps follow each other: each lasts from the end of the one before, not from its own launch.
        self._count(launch.plan, result, now - max(launch.time, self._last_commit))
        self._last_commit = now
        for token in tokens:
            events.extend(self._output(token, now))
        events.extend(self._progress())
        self._totals.parts["commit"] += self._clock() - now

    def stats(self) -> Stats:
        """Counters and gauges as of now."""
        occupancy = self._cache.occupancy()
        totals = self._totals
        return Stats(
            steps_total=totals.steps,
            running=len(self._scheduler.batch.running),
            queued=len(self._scheduler.batch.waiting),
            device_free=occupancy.device_free,
            device_reclaimable=occupancy.device_reclaimable,
            device_used=occupancy.device_used,
            host_free=occupancy.host_free,
            host_used=occupancy.host_used,
            cached_sessions=len(self._cache.sessions),
            gpu_cached_total=totals.gpu_cached,
            swapped_in_total=totals.swapped_in,
            recomputed_total=totals.recomputed,
            new_total=totals.new,
            output_total=totals.output,
            dropped_total=occupancy.dropped,
            warmed_total=self._scheduler.warming.tokens,
            suspensions_total=self._scheduler.batch.suspensions,
            swap_in_bytes_total=totals.swap_in_bytes,
            swap_out_bytes_total=totals.swap_out_bytes,
            swap_in_seconds_total=totals.swap_in_seconds,
            swap_out_seconds_total=totals.swap_out_seconds,
            step_seconds_total=totals.step_seconds,
            last_step_seconds=totals.last_step_seconds,
            last_batch_tokens=totals.last_batch_tokens,
            part_seconds_total=dict(totals.parts),
            held=self._cache.shares.news(self._clock()),
        )

    def check(self) -> None:
        """Raise AssertionError unless the cache's books balance."""
        self._cache.check()

    def close(self) -> None:
        """Release what the worker holds: memory, streams, threads."""
        self._in_flight = None
        self._worker.close()

    def _submit(self, submit: Submit) -> list[Event]:
        key = RequestKey(submit.request)
        tokens = unpack_tokens(submit.tokens)
        if not 0 <= submit.num_new <= len(tokens) or not len(tokens):
            message = f"{submit.num_new} new of {len(tokens)} tokens: there must be something to continue"
            return [Failed(submit.request, "ENGINE_FAILED", message)]
        # One that has finished may still be in the batch: its last token is cached by the step under way.
        if key in self._requests or self._scheduler.batch.get(key) is not None:
            return [Failed(submit.request, "ENGINE_FAILED", "the request key is in use")]
        misfit = self._scheduler.branching.misfit(len(tokens), submit.sampling)
        if misfit is not None:
            return [Failed(submit.request, "CONTEXT_LIMIT_EXCEEDED", misfit)]
        waiting = self._scheduler.batch.waiting
        if waiting.is_full(submit.standing.tenant, self._scheduler.config.max_queued):
            return [Failed(submit.request, "SERVER_OVERLOADED", "the queue is full")]
        session, now = SessionKey(submit.session), self._clock()
        self._candidates.drop(session, now)  # of the turn before
        about = submit.scope, submit.hints, submit.standing
        self._requests[key] = self._scheduler.submit(
            key, session, tokens, submit.num_new, submit.sampling, now, *about
        )
        self._candidates.submitted(key)
        position = waiting.position(self._requests[key])
        return [RequestProgress(submit.request, Phase.QUEUED, position, 0, len(tokens))]

    def _warm(self, warm: Warm) -> Warmed:
        session, tokens = SessionKey(warm.session), unpack_tokens(warm.tokens)
        refused = self._scheduler.warm(session, tokens, warm.scope, self._clock(), warm.standing)
        held = self._cache.residency(session)
        return Warmed(warm.call, refused, held.device, held.host)

    def _started(self, request: Request) -> Started:
        usage = request.usage(self._clock())
        self._totals.gpu_cached += usage.gpu_cached_tokens
        self._totals.swapped_in += usage.swapped_in_tokens
        self._totals.recomputed += usage.recomputed_tokens
        self._totals.new += usage.new_tokens
        return Started(request.key, usage)

    def _output(self, token: Token, now: float) -> list[Event]:
        self._totals.output += 1
        logprobs = () if token.logprob is None else (token.logprob,)
        key, candidate = self._candidates.of(token.request)
        events: list[Event] = [Output(key, (token.token_id,), logprobs, candidate)]
        if token.finished is not None:
            if self._candidates.several(key):
                events.append(CandidateFinished(key, candidate, token.finished))
            reason = self._candidates.ended(key, candidate, token.finished)
            if reason is not None:
                events.append(self._finished(key, reason, now))
        return events

    def _evict(self, session: SessionKey | None) -> int:
        now = self._clock()
        self._scheduler.batch.hurry(session, now)
        further = self._candidates.drop(session, now) if session is not None else 0
        return further + self._cache.evict(session)

    def _finished(self, key: RequestKey, reason: FinishReason, now: float) -> Finished:
        usage = self._requests[key].usage(now)
        self._forget(key)
        return Finished(key, reason, usage)

    def _forget(self, key: RequestKey) -> None:
        self._requests.pop(key, None)
        self._candidates.forget(key)
        self._phases.pop(key, None)

    def _progress(self) -> list[Event]:
        """A report for every running request that does not decode yet, and for each that has just begun to."""
        events: list[Event] = []
        for request in self._scheduler.batch.running:
            if request.key not in self._requests:
                continue
            phase = request.phase
            if phase is Phase.DECODE and self._phases.get(request.key) is Phase.DECODE:
                continue
            self._phases[request.key] = phase
            total = request.length
            events.append(RequestProgress(request.key, phase, 0, total - request.num_missing, total))
        return events

    def _count(self, plan: Plan, result: StepResult, seconds: float) -> None:
        totals = self._totals
        totals.steps += 1
        totals.swap_in_bytes += result.swap_in_bytes
        totals.swap_out_bytes += result.swap_out_bytes
        totals.swap_in_seconds += result.swap_in_seconds
        totals.swap_out_seconds += result.swap_out_seconds
        totals.step_seconds += seconds
        totals.last_step_seconds = seconds
        totals.last_batch_tokens = plan.num_tokens
        for part, spent in result.timings.items():
            totals.parts[part] += spent
