"""The ``full`` engine: the real ``Engine``, ``Scheduler`` and ``CacheManager``, step by step on virtual time."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Hints, Sampling, SessionKey, TokenArray, Usage, pack_tokens
from pensieve.engine.cache.chunk import Restore
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady, Failed, Finished, Output, Submit
from pensieve.engine.plan import Copy, PendingStep, Plan, Sampled, SampleSpec, StepResult, StepWorker
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.load import SessionScript, hints_of
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Router, Settings
from pensieve.simulate.scenario.tally import CompletedTurn, RecomputeCosts, Tally

VOCABULARY = 1 << 30
"""Large enough that sessions share only the prefixes that the load defines."""
_SCOPE = "all sessions"


@dataclass
class Clock:
    """Seconds that pass only where ``now`` is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """``PendingStep`` of a device whose steps take a known time."""

    clock: Clock
    ends: float
    outcome: StepResult

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        """Do nothing: every token is 0 already."""

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.ends)
        return self.outcome


class CostWorker:
    """A worker that computes nothing: every token is 0, and steps take their modelled time one after another."""

    def __init__(self, machine: Machine, chunk_tokens: int, clock: Clock) -> None:
        self._machine = machine
        self._page_bytes = [group.page_bytes for group in machine.kv_groups(chunk_tokens)]
        self._clock = clock
        self._idle_at = 0.0

    def launch(self, plan: Plan) -> PendingStep:
        """See ``StepWorker.launch``."""
        self._idle_at = max(self._idle_at, self._clock.now) + self.seconds(plan)
        sampled = tuple(Sampled(span.request, 0) for span in plan.spans if span.sample is not None)
        return LaunchedStep(self._clock, self._idle_at, StepResult(sampled))

    def seconds(self, plan: Plan) -> float:
        copy_in = self._copy_seconds(plan.swap_in)
        if not plan.spans:
            return max(copy_in, self._copy_seconds(plan.swap_out))
        work = self._machine.work_of(plan)
        compute = self._machine.step_seconds(
            tokens=work.tokens, rows=work.rows, kv_read=work.kv_read, pairs=work.pairs
        )
        return self._machine.seconds_with_copy(compute, copy_in)

    def close(self) -> None:
        """Do nothing."""

    def _copy_seconds(self, copies: Iterable[Copy]) -> float:
        return self._machine.copy_seconds(sum(self._page_bytes[copy.group] for copy in copies))


MakeWorker = Callable[[Clock], StepWorker]


@dataclass(slots=True, eq=False)
class _LiveTurn:
    script: SessionScript
    turn: int = 0
    history: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    arrived: float = 0.0
    replica: int = 0
    context: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    output: list[int] = field(default_factory=list)
    first_token: float = 0.0
    last_token: float = 0.0
    cost: float = 0.0


class _Replica:
    def __init__(self, settings: Settings, policy: str, make_worker: MakeWorker | None) -> None:
        self.clock = Clock()
        size = settings.cache.chunk_tokens
        self.cache = StampedCache(settings.cache, settings.cost, policy)
        config = SchedulerConfig(
            context_limit=settings.context_limit,
            max_batch_tokens=settings.max_batch_tokens,
            max_running=settings.max_running,
            max_queued=1 << 40,
        )
        self.scheduler = Scheduler(config, self.cache)
        chunks = settings.cache
        ready = EngineReady(
            self.scheduler.context_limit, VOCABULARY, "simulated", "none", chunks.device_chunks * size,
            chunks.host_chunks * size, size,
        )  # fmt: skip
        worker = make_worker(self.clock) if make_worker else CostWorker(settings.machine, size, self.clock)
        self.engine = Engine(
            self.scheduler, worker, ready, self.clock, overlapped=settings.machine.overlapped
        )
        self.turns: dict[int, _LiveTurn] = {}
        self.stalled = 0


class FullSimulation:
    """One policy over one load. ``make_worker`` makes a worker that advances the clock itself."""

    def __init__(
        self,
        settings: Settings,
        policy: str,
        progress: Callable[[int], None] | None = None,
        make_worker: MakeWorker | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._make_worker = make_worker
        self._prices = RecomputeCosts(settings.cost)
        self._progress = progress
        self.tally = tally or Tally()
        self._replicas = [self._replica() for _ in range(settings.replicas)]
        self._router = Router(settings, lambda replica: len(self._replicas[replica].turns))
        self._arrivals: list[tuple[float, int, _LiveTurn]] = []
        self._last_ticket = 0
        self._lost = False

    def run(self, scripts: Iterable[SessionScript]) -> Tally:
        source = iter(scripts)
        upcoming = next(source, None)
        changes = self._settings.replica_changes(self._lose_replica, self._return_replica)
        while True:
            if upcoming is not None and (not self._arrivals or upcoming.start <= self._arrivals[0][0]):
                self._schedule(_LiveTurn(upcoming), upcoming.start)
                upcoming = next(source, None)
                continue
            next_arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            live = self._replicas[1:] if self._lost else self._replicas
            busy = [replica for replica in live if replica.engine.has_work]
            first = min(busy, key=lambda replica: replica.clock.now, default=None)
            now = min(next_arrival, first.clock.now if first else float("inf"))
            if changes and changes[0][0] <= now < float("inf"):
                at, change = changes.pop(0)
                change(at)
            elif first is not None and first.clock.now <= next_arrival:
                self._step(first)
            elif self._arrivals:
                self._submit(heapq.heappop(self._arrivals)[2], next_arrival)
            else:
                return self.tally

    def _replica(self) -> _Replica:
        return _Replica(self._settings, self._policy, self._make_worker)

    def _schedule(self, turn: _LiveTurn, at: float) -> None:
        turn.arrived = at
        self._push_arrival(turn, at + self._settings.machine.turn_s)

    def _push_arrival(self, turn: _LiveTurn, at: float) -> None:
        self._last_ticket += 1
        heapq.heappush(self._arrivals, (at, self._last_ticket, turn))

    def _submit(self, turn: _LiveTurn, now: float) -> None:
        turn.replica = self._router.route(turn.script.number, turn.turn, lost=self._lost)
        replica = self._replicas[turn.replica]
        if not replica.engine.has_work:
            replica.clock.now = max(replica.clock.now, now)
        new, output = turn.script.turns[turn.turn]
        ids = turn.script.input_ids(turn.turn, VOCABULARY, self._settings.seed)
        turn.context = np.concatenate([turn.history, ids])
        turn.output, turn.first_token = [], 0.0
        self._last_ticket += 1
        key = SessionKey(str(turn.script.number))
        replica.turns[self._last_ticket] = turn
        due = functools.partial(turn.script.due, turn.turn + 1)
        hints = functools.partial(hints_of, self._settings, turn.script, turn.turn)
        replica.cache.expect_turn(key, ExpectedTurn(turn.turn + 1, due, hints))
        sampling = Sampling(max_output_tokens=output, ignore_eos=True)
        scope = _SCOPE if turn.script.prefix else ""
        tokens = pack_tokens(turn.context)
        replica.engine.handle(Submit(self._last_ticket, key, tokens, new, sampling, scope))

    def _step(self, replica: _Replica) -> None:
        before = replica.clock.now
        events = replica.engine.step()
        now = replica.clock.now
        for request in replica.scheduler.admitted:
            self._on_admitted(replica, replica.turns[request.key], request.session)
        for event in events:
            match event:
                case Output(key, tokens, _):
                    turn = replica.turns[key]
                    self._on_tokens(turn, tokens, now)
                case Finished(key, _, usage):
                    self._on_finished(replica.turns.pop(key), usage, now)
                case Failed(key, reason, message):
                    raise RuntimeError(f"turn {key} failed: {reason}: {message}")
        replica.stalled = 0 if events or now > before else replica.stalled + 1
        if replica.stalled > 1 and replica.scheduler.has_requests:  # one such step only fills the pipeline
            raise RuntimeError(f"{len(replica.turns)} turns make no progress")

    def _on_tokens(self, turn: _LiveTurn, tokens: tuple[int, ...], now: float) -> None:
        """Record new tokens. A piece of n tokens counts as n equal gaps since the piece before."""
        if turn.output:
            self.tally.add_gaps((now - turn.last_token) / len(tokens), len(tokens), now)
        turn.first_token, turn.last_token = turn.first_token or now, now
        turn.output.extend(tokens)

    def _on_admitted(self, replica: _Replica, turn: _LiveTurn, session: SessionKey) -> None:
        history = len(turn.history)
        restore = replica.cache.restores.pop(session)
        turn.cost = self._prices.cost_of(restore.missing, history) if restore.recomputed else 0.0
        if isinstance(replica.cache.policy, policies.Arc):
            replica.cache.policy.on_history_lost(turn.turn, history, restore.recomputed)

    def _on_finished(self, turn: _LiveTurn, usage: Usage, now: float) -> None:
        ttft = turn.first_token - turn.arrived
        answering = now - turn.first_token
        shared = len(turn.context) - len(turn.history) - usage.new_tokens
        self.tally.add_turn(
            CompletedTurn(
                turn.turn, usage, len(turn.context), turn.cost, ttft, answering, now, shared, turn.replica
            )
        )
        if self._progress is not None:
            self._progress(self.tally.sessions)
        turn.history = np.concatenate([turn.context, np.array(turn.output, np.int32)])
        turn.turn += 1
        if turn.turn < len(turn.script.turns):
            self._schedule(turn, turn.script.due(turn.turn, now))
        else:
            self.tally.add_open_time(turn.script.start, now)

    def _lose_replica(self, now: float) -> None:
        self._lost = True
        replica = self._replicas[0]
        turns, replica.turns = list(replica.turns.values()), {}
        self.tally.repeated_turns = len(replica.scheduler.running)
        for turn in turns:
            self._push_arrival(turn, now + self._settings.lease_s)

    def _return_replica(self, now: float) -> None:
        self._replicas[0], self._lost = self._replica(), False


@dataclass(frozen=True, slots=True)
class ExpectedTurn:
    """A turn as the simulation knows it. Both functions take the time at which the turn ends."""

    number: int
    """Number in the session, from 1."""
    due: Callable[[float], float]
    hints: Callable[[float], Hints | None]


class StampedCache(CacheManager):
    """``CacheManager`` whose policy may know more than the time of a release; see ``policies``."""

    def __init__(self, config: CacheConfig, cost: CostModel, policy: str) -> None:
        self.policy, self._stamp = policies.make_policy(policy)
        super().__init__(config, cost, self.policy)
        self._expected: dict[SessionKey, ExpectedTurn] = {}
        self._turns: dict[SessionKey, ExpectedTurn] = {}
        self.restores: dict[SessionKey, Restore] = {}
        """Result of the first admission of each session's turn, until the simulation takes it."""

    def expect_turn(self, key: SessionKey, turn: ExpectedTurn) -> None:
        self._expected[key] = turn

    def admit(self, key: SessionKey, *arguments: Any, **others: Any) -> Restore:
        restore = super().admit(key, *arguments, **others)
        if key in self._expected:  # else a return from suspension
            self._turns[key] = self._expected.pop(key)
            self.restores[key] = restore
        return restore

    def release(
        self,
        key: SessionKey,
        now: float,
        tokens: TokenArray | None = None,
        *,
        free_kv: bool = False,
        hints: Hints | None = None,
    ) -> None:
        turn = self._turns[key]
        stamp = self._stamp(now, turn.due(now), turn.number)
        super().release(key, stamp, tokens, free_kv=free_kv, hints=turn.hints(now))
