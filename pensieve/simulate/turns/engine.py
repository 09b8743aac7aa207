"""The ``turns`` engine: simulates millions of turns by taking runs of similar steps as one event.

A turn arrives, waits, is restored and prefilled in its own steps, generates and ends, by the rules of the
real scheduler (``turns.batch``) over a twin of the real cache (``turns.cache``). Three things are simpler
than in the real engine: copies from the host delay only their own step, copies to the host delay nothing, and
a turn that is suspended while it recomputes a chunk loses that chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Final

from pensieve.core import Usage
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.load import SessionScript
from pensieve.simulate.scenario.policies import RecomputeBound
from pensieve.simulate.scenario.settings import Router, Settings
from pensieve.simulate.scenario.tally import CompletedTurn, RecomputeCosts, Tally
from pensieve.simulate.turns.batch import Batch, LiveTurn
from pensieve.simulate.turns.cache import TurnCache

_NEVER: Final = float("inf")
_READ_AHEAD: Final = 32
"""Sessions per replica that are read before it runs: a trade of memory against the number of resumptions."""
_next_step: Final = attrgetter("next_step_s")
Due = tuple[float, int, LiveTurn]


class TurnSimulation:
    """One policy over one load. ``run`` returns its tally."""

    def __init__(
        self,
        settings: Settings,
        policy: str,
        progress: Callable[[int], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._prices = RecomputeCosts(settings.cost)
        self._progress = progress
        self.tally = tally or Tally()
        self.bound = RecomputeBound(settings.cost) if policy == "clairvoyant" else None
        self.replicas = [self._replica() for _ in range(settings.replicas)]
        self._live = self.replicas
        self._router = Router(settings, lambda replica: self.replicas[replica].active_turns)
        self._independent = settings.replicas > 1 and self._router.independent
        self._due: list[list[Due]] = [[] for _ in range(settings.replicas if self._independent else 1)]
        """Heaps of coming turns: one for each replica if these are independent, else one for all."""
        self._last_ticket = 0
        self._source: Iterator[SessionScript] = iter(())
        self._upcoming: SessionScript | None = None
        self.peak_sessions = 0

    def run(self, scripts: Iterable[SessionScript]) -> Tally:
        """Simulate until the last answer has ended. ``scripts`` is read step by step, so a long load is never held."""
        self._source = iter(scripts)
        self._upcoming = next(self._source, None)
        play = self._play_independent if self._independent else self._play_together
        for at, change in self._settings.replica_changes(self._lose_replica, self._return_replica):
            play(at)
            change(at)
        play(_NEVER)
        return self.tally

    def _play_together(self, until: float) -> None:
        """Simulate all events before ``until`` in one global order.

        Each pass takes the earliest event: a session starts, a turn arrives at its replica, or a replica runs
        steps. A replica runs no further than the next step of another one, because a turn that ends there may
        send its session's next turn here.
        """
        (coming,) = self._due
        while True:
            at = coming[0][0] if coming else _NEVER
            if self._upcoming is not None and self._upcoming.start <= at:
                self._read_session()
                continue
            first = self._live[0] if len(self._live) == 1 else min(self._live, key=_next_step)
            if until <= min(at, first.next_step_s):
                return
            if first.next_step_s <= at:
                others = min(
                    (other.next_step_s for other in self._live if other is not first), default=_NEVER
                )
                if ended := first.run(min(at, until, others)):
                    self._on_completed(first, ended)
            else:
                self._submit(heapq.heappop(coming)[2], at)

    def _play_independent(self, until: float) -> None:
        """Simulate independent replicas, each alone up to the time for which all session starts are known.

        Replica 0 comes last: after its return it gets the next turns of sessions on other replicas.
        """
        ahead = 0.0
        while ahead < until:
            for _ in range(_READ_AHEAD * len(self.replicas)):
                if self._upcoming is None:
                    break
                self._read_session()
            coming = self._upcoming
            ahead = until if coming is None else min(until, coming.start + self._settings.machine.turn_s)
            for number in reversed(range(len(self.replicas))):
                self._play_alone(self.replicas[number], self._due[number], ahead)

    def _play_alone(self, replica: Batch, coming: list[Due], until: float) -> None:
        while True:
            at = coming[0][0] if coming else _NEVER
            if until <= min(at, replica.next_step_s):
                return
            if replica.next_step_s <= at:
                if ended := replica.run(min(at, until)):
                    self._on_completed(replica, ended)
            else:
                self._submit(heapq.heappop(coming)[2], at)

    def _replica(self) -> Batch:
        policy, stamp = policies.make_policy(self._policy)
        settings = self._settings
        cache = TurnCache(settings.cache, settings.cost, policy, settings.slack)
        return Batch(settings, cache, stamp, self.tally.add_gaps)

    def _read_session(self) -> None:
        assert self._upcoming is not None
        self._schedule(LiveTurn(self._upcoming), self._upcoming.start)
        self._upcoming = next(self._source, None)

    def _schedule(self, turn: LiveTurn, at: float) -> None:
        turn.arrived = at
        self._push_arrival(turn, at + self._settings.machine.turn_s)

    def _push_arrival(self, turn: LiveTurn, at: float) -> None:
        self._last_ticket += 1
        due = self._due[self._route(turn) if self._independent else 0]
        heapq.heappush(due, (at, self._last_ticket, turn))
        self.peak_sessions = max(self.peak_sessions, sum(map(len, self._due)))

    def _route(self, turn: LiveTurn) -> int:
        return self._router.route(turn.script.number, turn.index, lost=self._live is not self.replicas)

    def _submit(self, turn: LiveTurn, now: float) -> None:
        turn.replica = self._route(turn)
        self._last_ticket += 1
        self.replicas[turn.replica].submit(turn, self._last_ticket, now)

    def _on_completed(self, replica: Batch, ended: list[tuple[LiveTurn, float]]) -> None:
        policy = replica.cache.index.policy
        arc = policy if isinstance(policy, policies.Arc) else None
        for turn, at in ended:
            restore = turn.restore
            assert restore is not None
            present = restore.gpu_cached + restore.swapped_in + restore.recomputed
            usage = Usage(
                context_tokens=turn.prompt,
                new_tokens=turn.prompt - present,
                gpu_cached_tokens=restore.gpu_cached,
                swapped_in_tokens=restore.swapped_in,
                recomputed_tokens=restore.recomputed,
                output_tokens=turn.output,
            )
            cost = self._prices.cost_of(restore.missing, turn.history) if restore.recomputed else 0.0
            first = turn.first_token
            shared = present - turn.history
            ttft, answering = first - turn.arrived, at - first
            self.tally.add_turn(
                CompletedTurn(turn.index, usage, turn.prompt, cost, ttft, answering, at, shared, turn.replica)
            )
            if arc is not None:
                arc.on_history_lost(turn.index, turn.history, restore.recomputed)
            if self._progress is not None:
                self._progress(self.tally.sessions)
            if turn.index + 1 < len(turn.script.turns):
                due = turn.script.due(turn.index + 1, at)
                if self.bound is not None:
                    self.bound.add_idle_period(turn.prompt + turn.output, due - at)
                following = LiveTurn(turn.script, turn.index + 1, turn.prompt + turn.output)
                self._schedule(following, due)
            else:
                self.tally.add_open_time(turn.script.start, at)

    def _lose_replica(self, now: float) -> None:
        """Lose replica 0: its turns restart on the others when their leases have lapsed."""
        turns, self.tally.repeated_turns = self.replicas[0].clear()
        self._live = self.replicas[1:]
        self._reroute()
        for turn in turns:
            self._push_arrival(turn, now + self._settings.lease_s)

    def _return_replica(self, now: float) -> None:
        self.replicas[0] = self._replica()
        self._live = self.replicas
        self._reroute()

    def _reroute(self) -> None:
        coming = [due for heap in self._due for due in heap]
        for heap in self._due:
            heap.clear()
        for due in coming:
            heapq.heappush(self._due[self._route(due[2]) if self._independent else 0], due)
