"""The engine: one step at a time over all conversations. The life of a request inside it:

1. ``handle(Submit)``: the whole context (token ids) enters the scheduler's queue; one that can never fit is refused.
2. ``scheduler.plan``: when pages and budget allow, the cache pins the cached part of the context and finds
   pages for the rest. Hits cost nothing, host chunks are planned to be copied in, dropped and new ranges
   become spans.
3. ``worker.launch``: copies, runs the model over all spans, samples. A choice that depends on the step before it, or on
   a grammar, comes after that step's commit (``PendingStep.choose``).
4. ``scheduler.on_launched`` and, with the step's result, ``scheduler.commit``: tokens are appended. Requests
   continue, or finish and leave their chunks in the cache.

``handle(Warm)`` creates a request that computes no answer: see ``scheduling.warming``. A turn with several
candidates is a group of requests, and so is a beam search, which ``engine.beams`` drives. Results leave as
events: ``Started`` with the receipt, ``RequestProgress``, ``Output``, ``Finished``.

Overlapped, a step is planned and launched while the one before it runs, and only then is that one's result awaited:
the device waits for Python only where a request with drafts may have to leave the batch
(``Scheduler.should_wait``). Not overlapped, a step's result is awaited before the next is planned.

The writer of each piece of state:

==============================  =================  ===========================================
state                           only writer        readers
==============================  =================  ===========================================
queue, running set, progress    ``Scheduler``      engine
chunk places, pins, pages       ``CacheManager``   scheduler (ids), worker (pages, in the plan)
KV tensors                      worker             kernels
size of the device tier         ``ElasticTier``    cache (its pages), worker (its memory, in the plan)
matchers of grammars            ``Structured``     scheduler (whether a mask is expected)
conversation history            the front end      none here: it comes with each ``Submit``
==============================  =================  ===========================================

One thread owns an engine. It knows token ids only: no text, no clients, no durable state. It may die at any time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pensieve.core import MAX_CANDIDATES, FinishReason, Phase, RequestKey, SessionKey, packed_length
from pensieve.debug import debug_enabled, failpoint
from pensieve.engine.beams import BeamDriver
from pensieve.engine.elastic import ONE_SIZE
from pensieve.engine.grammar import Prototype, Structured
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
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    SetMemory,
    Started,
    Stats,
    Submit,
    Warm,
    Warmed,
)
from pensieve.engine.plan import PendingStep, Plan, StepResult, StepWorker
from pensieve.engine.process.loop import StepAnnouncer
from pensieve.engine.scheduling.drafts import SYNC_SHARE
from pensieve.engine.scheduling.request import Request, candidate_key
from pensieve.engine.scheduling.scheduler import OutputToken, Scheduler
from pensieve.engine.strips import StripReader

_NO_GRAMMAR: Final = "a grammar was given with beams, or to an engine that follows none"


@dataclass(slots=True)
class _Totals:
    """Counters since start, for ``Stats``: steps, tokens of started requests by source, copies, time."""

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


@dataclass(slots=True)
class _Turn:
    """A turn as the front end knows it: one key, with numbered candidates."""

    candidates: list[Request]
    """By number. A beam search has one answer: this is its first beam."""
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    phase: Phase | None = None

    @property
    def outcome(self) -> FinishReason | None:
        """Finish reason of the first candidate, once all have ended."""
        return self.finish_reasons[0] if len(self.finish_reasons) == len(self.candidates) else None


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step that the worker has begun."""

    plan: Plan
    step: PendingStep
    time: float
    """When its planning began."""
    waited: bool
    """The device had nothing to do until the launch, because its planning waited for the tokens of the step before."""


@dataclass(frozen=True, slots=True)
class _Committed:
    """A step that the scheduler has taken in, and the front end has not heard of."""

    launch: _Launch
    result: StepResult
    output: list[OutputToken]
    seconds: float
    now: float


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
        structured: Structured | None = None,
    ) -> None:
        """``structured``: follows grammars; None: requests with one are refused."""
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._worker = worker
        self._ready = ready
        self._clock = clock
        self._beams = BeamDriver(scheduler)
        self._turns: dict[RequestKey, _Turn] = {}
        self._candidates: dict[RequestKey, tuple[RequestKey, int]] = {}
        """Turn and number of each candidate but the first."""
        self._strips = StripReader(scheduler)
        self.announcer = StepAnnouncer(self._owner)
        self._totals = _Totals()
        self._structured = structured
        if structured is not None:
            scheduler.mask_expected = structured.matchers.is_expected
        self._overlapped = overlapped
        scheduler.drafting.sync_share = SYNC_SHARE if overlapped else 0.0
        self._in_flight: _Launch | None = None
        """Overlapped: the step that runs while the next is planned."""
        self._background = False
        """The latest plan was not empty, so the next may copy out more even if no request is left."""
        self._last_commit = -math.inf
        self._checks = debug_enabled()

    def ready(self) -> EngineReady:
        return self._ready

    @property
    def has_work(self) -> bool:
        """Whether ``step`` may have something to do without a further command."""
        if self._scheduler.has_requests or self._background or self._in_flight is not None:
            return True
        if self._structured is not None and self._structured.has_compiling:
            return True
        elastic = self._scheduler.elastic
        return elastic is not None and elastic.is_due(self._clock())

    def handle(self, command: Command) -> list[Event]:
        """Handle one command, between steps; return the immediate answers."""
        match command:
            case Submit():
                return self._submit(command)
            case Cancel(request, None):
                self._cancel(RequestKey(request))
            case Cancel(request, int(candidate)):
                return self._stop(RequestKey(request), candidate)
            case Choose(session, candidate):
                self._choose(SessionKey(session), candidate)
            case Evict(call, session):
                return [Evicted(call, self._evict(SessionKey(session) if session else None))]
            case GetResidency(call, session):
                held = self._cache.residency(SessionKey(session))
                return [ResidentTokens(call, held.device, held.host)]
            case GetStrips(call, at):
                return [self._strips.read(call, at, self._clock())]
            case Warm():
                return [self._warm(command)]
            case SetMemory(call, wanted):
                return [self._set_memory(call, wanted)]
        return []

    def step(self) -> list[Event]:
        """Launch one step and commit one, the same or the one before; [] when there was nothing to do.

        Raises whatever the worker raises.
        """
        events: list[Event] = []
        if self._structured is not None:
            self._follow_grammars(self._structured, events)
        before, self._in_flight = self._in_flight, None
        committed = None
        if before is not None and self._scheduler.should_wait():
            # The device waits now: what the next plan does not need comes after its launch.
            committed = self._commit(before)
        waited = committed is not None
        launch = self._launch(events, None if before is None or waited else before.plan, waited=waited)
        self._background = launch is not None
        if before is not None:
            self._report(committed or self._commit(before), events)
        if launch is not None and launch.plan.chooses_late:
            self._choose_late(launch)
        if self._overlapped:
            self._in_flight = launch  # it runs on
        elif launch is not None:
            self._report(self._commit(launch), events)
        if self._checks:
            self._cache.check()
        return events

    def _launch(self, events: list[Event], running: Plan | None, *, waited: bool) -> _Launch | None:
        """``running``: of the step that runs meanwhile. ``waited``: see ``_Launch``."""
        started = self._clock()
        with self.announcer.attribute_failures(self._turns):
            plan = self._scheduler.plan(started)
        planned = self._clock()
        self._strips.plan = plan
        self._totals.parts["plan"] += planned - started
        if plan.is_empty:
            return None
        for request in self._scheduler.admitted:
            events.append(self._started(request))
        self.announcer.announce_plan(plan, running)
        launch = _Launch(plan, self._worker.launch(plan), started, waited)
        self._scheduler.on_launched(plan)
        self._totals.parts["launch"] += self._clock() - planned
        failpoint("engine_mid_step")
        return launch

    def _follow_grammars(self, structured: Structured, events: list[Event]) -> None:
        """Queue the requests whose grammars are compiled, and fail those that cannot go on."""
        for submit, submitted, compiled in structured.take_compiled():
            if isinstance(compiled, str):
                events.append(Failed(submit.request, "GRAMMAR_TOO_COSTLY", compiled))
            else:
                events.extend(self._enqueue(submit, submitted, compiled))
        for key, problem in structured.matchers.problems():
            owner = self._owner(key)
            if owner in self._turns:  # else another candidate of the turn had failed
                self._cancel(owner)
                events.append(Failed(owner, "GRAMMAR_TOO_COSTLY", problem))

    def _choose_late(self, launch: _Launch) -> None:
        """Complete the choices of a launched step, now that the tokens of the one before it are known."""
        started, plan, masks = self._clock(), launch.plan, {}
        if self._structured is not None:
            keys = [
                span.request
                for span in plan.spans
                if span.sample is not None and span.sample.sampling.grammar is not None
            ]
            # Half a step, since the next one must be planned before this one ends.
            busy = self._totals.last_step_seconds / 2 if self._overlapped else 0.0
            others = len(keys) < len(plan.specs)
            masks = self._structured.matchers.collect(keys, others=others, busy_s=busy)
        launch.step.choose(self._scheduler.late_specs(plan, masks, started))
        self._totals.parts["choose"] += self._clock() - started

    def _commit(self, launch: _Launch) -> _Committed:
        """Wait for a step and take in its tokens, on which the next plan may build."""
        wait_started = self._clock()
        result = launch.step.result()
        now = self._clock()
        self._totals.parts["wait"] += now - wait_started
        tokens = self._scheduler.commit(launch.plan, result, now)
        if self._structured is not None:
            self._structured.on_tokens(tokens)
        output = list(self._beams.on_tokens(tokens, now))
        # Overlapped steps follow each other: each lasts from the end of the one before, not from its own launch.
        seconds, self._last_commit = now - max(launch.time, self._last_commit), now
        self._totals.parts["commit"] += self._clock() - now
        return _Committed(launch, result, output, seconds, now)

    def _report(self, committed: _Committed, events: list[Event]) -> None:
        """Count a committed step, and report its tokens."""
        started = self._clock()
        self._count(committed.launch, committed.result, committed.seconds)
        for token in committed.output:
            self._output(token, events, committed.now)
        events.extend(self._progress())
        self._totals.parts["commit"] += self._clock() - started

    def stats(self) -> Stats:
        occupancy = self._cache.occupancy()
        totals = self._totals
        memory = self._memory(0)
        held = self._cache.shares.tokens_if_due(self._clock())
        return Stats(
            steps_total=totals.steps,
            running=len(self._scheduler.running),
            queued=self._scheduler.queued,
            device_free=occupancy.device_free,
            device_reclaimable=occupancy.device_reclaimable,
            device_used=occupancy.device_used,
            host_free=occupancy.host_free,
            host_used=occupancy.host_used,
            device_held=memory.held,
            device_wanted=memory.wanted,
            device_floor=memory.floor,
            device_ceiling=memory.ceiling,
            cached_sessions=len(self._cache.sessions),
            gpu_cached_total=totals.gpu_cached,
            swapped_in_total=totals.swapped_in,
            recomputed_total=totals.recomputed,
            new_total=totals.new,
            output_total=totals.output,
            dropped_total=occupancy.dropped,
            warmed_total=self._scheduler.warmed_tokens,
            suspensions_total=self._scheduler.suspensions,
            drafted_total=self._scheduler.drafting.drafted,
            accepted_total=self._scheduler.drafting.accepted,
            late_masks_total=0 if self._structured is None else self._structured.matchers.late_masks,
            swap_in_bytes_total=totals.swap_in_bytes,
            swap_out_bytes_total=totals.swap_out_bytes,
            swap_in_seconds_total=totals.swap_in_seconds,
            swap_out_seconds_total=totals.swap_out_seconds,
            step_seconds_total=totals.step_seconds,
            last_step_seconds=totals.last_step_seconds,
            last_batch_tokens=totals.last_batch_tokens,
            part_seconds_total=dict(totals.parts),
            held=held,
            computed_ahead=None if held is None else dict(self._scheduler.computed_ahead),
        )

    def check(self) -> None:
        """Raise AssertionError unless the cache's invariants hold."""
        self._cache.check()

    def close(self) -> None:
        """Release the worker's memory, streams and threads."""
        self._in_flight = None
        if self._structured is not None:
            self._structured.close()
        self._worker.close()

    # -- turns -------------------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> list[Event]:
        key, beams, members = (
            RequestKey(submit.request),
            submit.sampling.beam_width,
            submit.sampling.candidates,
        )
        if key in self._turns:
            return [Failed(key, "ENGINE_FAILED", "the request key is in use")]
        searches, grammar = beams > 1, submit.sampling.grammar
        needs = self._beams.needs(submit) if searches else None
        refused = self._scheduler.refusal(submit, beams if searches else members, needs)
        if refused is not None:
            return [Failed(key, *refused)]
        now = self._clock()
        if grammar is None:
            return self._enqueue(submit, now, None)
        if self._structured is None or searches:
            return [Failed(key, "ENGINE_FAILED", _NO_GRAMMAR)]
        if self._structured.num_compiling >= self._scheduler.config.max_queued:
            return [Failed(key, "SERVER_OVERLOADED", "too many grammars wait to be compiled")]
        self._structured.compile(submit, grammar, now)
        return [RequestProgress(key, Phase.QUEUED, 0, 0, packed_length(submit.tokens))]

    def _enqueue(self, submit: Submit, now: float, prototype: Prototype | None) -> list[Event]:
        """Queue a turn that may run. ``now``: when it was submitted. ``prototype``: the start of each answer, if it
        follows a grammar."""
        key = RequestKey(submit.request)
        self._drop_candidates(SessionKey(submit.session), now)  # of the turn before
        if submit.sampling.beam_width > 1:
            request = self._beams.submit(submit, now)
            turn = _Turn([request])
        else:
            request = self._scheduler.submit(submit, now, members=submit.sampling.candidates)
            turn = _Turn([request] if request.group is None else list(request.group.members))
        self._turns[key] = turn
        for further in turn.candidates[1:]:
            self._candidates[further.key] = key, further.candidate
        if self._structured is not None and prototype is not None:
            for candidate in turn.candidates:
                self._structured.matchers.begin(candidate.key, prototype)
        return [RequestProgress(key, Phase.QUEUED, self._scheduler.position(request), 0, request.length)]

    def _cancel(self, key: RequestKey) -> None:
        turn, now = self._turns.get(key), self._clock()
        if self._structured is not None:
            self._structured.cancel(key)
        if turn is not None:
            self._beams.cancel(key, now)
            for candidate in reversed(turn.candidates):
                self._scheduler.retire(candidate, now)
            self._forget(key)

    def _stop(self, key: RequestKey, number: int) -> list[Event]:
        """Stop one candidate of several; the last one ends the turn."""
        turn, now = self._turns.get(key), self._clock()
        if turn is None or number in turn.finish_reasons or not 0 <= number < len(turn.candidates) > 1:
            return []
        candidate = turn.candidates[number]
        if number == 0 and candidate.receipt is None:
            return []  # the others branch off it
        self._scheduler.retire(candidate, now)
        if self._structured is not None:
            self._structured.matchers.drop(candidate.key)
        turn.finish_reasons[number] = FinishReason.CANCELLED
        return [] if turn.outcome is None else [self._finished(key, turn.outcome, now)]

    def _choose(self, session: SessionKey, candidate: int) -> None:
        """Make a candidate's KV the session's. If it is gone, the next turn finds cached chunks by address."""
        other, now = candidate_key(session, candidate), self._clock()
        self._scheduler.remove_finished(session, now)
        self._scheduler.remove_finished(other, now)
        self._cache.replace(session, other)

    def _drop_candidates(self, session: SessionKey, now: float) -> int:
        """Evict the KV of candidates that were not chosen; return the number of KV-tokens."""
        freed = 0
        for candidate in range(1, MAX_CANDIDATES):
            key = candidate_key(session, candidate)
            if self._cache.has_session(key):
                self._scheduler.remove_finished(key, now)
                freed += self._cache.evict(key)
        return freed

    def _warm(self, warm: Warm) -> Warmed:
        refused = self._scheduler.warm(warm, self._clock())
        held = self._cache.residency(SessionKey(warm.session))
        return Warmed(warm.call, refused, held.device, held.host)

    def _set_memory(self, call: int, wanted: int | None) -> Memory:
        refused, elastic = "", self._scheduler.elastic
        if wanted is not None:
            if elastic is None:
                refused = self._ready.elastic_refusal or ONE_SIZE
            else:
                refused = elastic.set_wanted(wanted, self._clock())
        return self._memory(call, refused)

    def _memory(self, call: int, refused: str = "") -> Memory:
        """Return the sizes of the device tier; if it has one size, that one four times."""
        elastic, size = self._scheduler.elastic, self._ready.device_ceiling
        if elastic is None:
            return Memory(call, size, size, size, size, refused)
        return Memory(call, elastic.held, elastic.wanted, elastic.floor, elastic.ceiling, refused)

    def _evict(self, session: SessionKey | None) -> int:
        now = self._clock()
        self._scheduler.remove_finished(session, now)
        further = self._drop_candidates(session, now) if session is not None else 0
        return further + self._cache.evict(session)

    def _owner(self, key: RequestKey) -> RequestKey:
        """Return the front end's request for one that may have been created for it."""
        return self._candidates.get(key, (self._beams.owner(key), 0))[0]

    def _forget(self, key: RequestKey) -> None:
        for candidate in self._turns.pop(key).candidates:
            self._candidates.pop(candidate.key, None)
            if self._structured is not None:
                self._structured.matchers.drop(candidate.key)

    # -- events ------------------------------------------------------------------------------------------------------

    def _started(self, request: Request) -> Started:
        usage = request.usage(self._clock())
        self._totals.gpu_cached += usage.gpu_cached_tokens
        self._totals.swapped_in += usage.swapped_in_tokens
        self._totals.recomputed += usage.recomputed_tokens
        self._totals.new += usage.new_tokens
        return Started(request.key, usage)

    def _output(self, token: OutputToken, events: list[Event], now: float) -> None:
        """Report an output token; those of one request and step together."""
        self._totals.output += 1
        logprobs = () if token.logprob is None else (token.logprob,)
        key, candidate = self._candidates.get(token.request, (token.request, 0))
        token_ids: tuple[int, ...] = (token.token_id,)
        turn = self._turns[key]
        request = turn.candidates[candidate]
        last = events[-1] if events else None
        if isinstance(last, Output) and (last.request, last.candidate) == (key, candidate):
            events.pop()
            token_ids, logprobs = (*last.token_ids, *token_ids), (*last.logprobs, *logprobs)
        events.append(Output(key, token_ids, logprobs, candidate, request.drafted, request.accepted))
        if token.finished is not None:
            turn.finish_reasons[candidate] = token.finished
            if len(turn.candidates) > 1:
                events.append(CandidateFinished(key, candidate, token.finished))
            if turn.outcome is not None:
                events.append(self._finished(key, turn.outcome, now))

    def _finished(self, key: RequestKey, reason: FinishReason, now: float) -> Finished:
        usage = self._turns[key].candidates[0].usage(now)
        self._forget(key)
        return Finished(key, reason, usage)

    def _progress(self) -> list[Event]:
        """Report every running request that does not decode yet, and each that has just begun to."""
        events: list[Event] = []
        for request in self._scheduler.running:
            turn = self._turns.get(request.key)
            if turn is None:
                continue
            phase = request.phase
            if phase is Phase.DECODE and turn.phase is Phase.DECODE:
                continue
            turn.phase = phase
            total = request.length
            events.append(RequestProgress(request.key, phase, 0, total - request.num_missing, total))
        return events

    def _count(self, launch: _Launch, result: StepResult, seconds: float) -> None:
        totals, plan = self._totals, launch.plan
        totals.steps += 1
        totals.swap_in_bytes += result.swap_in_bytes
        totals.swap_out_bytes += result.swap_out_bytes
        totals.swap_in_seconds += result.swap_in_seconds
        totals.swap_out_seconds += result.swap_out_seconds
        totals.step_seconds += seconds
        totals.last_step_seconds = seconds
        totals.last_batch_tokens = plan.num_tokens
        idle = result.timings.get("gap", 0.0) if launch.waited else None
        self._scheduler.drafting.on_timed(plan, result.timings.get("device", seconds), idle)
        for part, spent in result.timings.items():
            totals.parts[part] += spent
