"""The ``turns`` engine: the life of millions of turns over replicas that take runs of like steps as one event.

A turn arrives, waits, is restored and prefilled in steps of their own, generates and ends, by the rules of the real
scheduler (``turns.batch``) over a twin of the real cache (``turns.cache``). Three things are simpler than in the real
engine: copies from the host delay their own step only, copies to the host delay nothing, and a turn that is suspended
while it recomputes a chunk loses that chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from pensieve.core import Usage
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.bound import Bound
from pensieve.simulate.scenario.load import Life
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.scenario.tally import ChunkPrices, Span, Tally
from pensieve.simulate.turns.batch import Batch
from pensieve.simulate.turns.cache import TurnCache
from pensieve.simulate.turns.live import LiveTurn

_NEVER: Final = float("inf")
_begins: Final = attrgetter("begins")


class TurnSimulation:
    """One policy over one load. ``run`` returns its tally."""

    def __init__(
        self,
        settings: Settings,
        policy: str,
        progress: Callable[[int], None] | None = None,
        window: Span | None = None,
        zero_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._prices = ChunkPrices(settings.cost)
        self._progress = progress
        self.tally = Tally(window, zero_s)
        self.bound = Bound(settings.cost) if policy == "clairvoyant" else None
        self._affine = settings.routing == "affine"
        self.replicas: list[Batch] = []
        for _ in range(settings.replicas):
            rule, stamp = policies.make(policy)
            cache = TurnCache(settings.cache, settings.cost, rule, settings.slack)
            self.replicas.append(Batch(settings, cache, stamp, self.tally.gap))
        self._due: list[tuple[float, int, LiveTurn]] = []
        """Turns that are to come: (time, ticket, turn)."""
        self._tickets = 0
        self._live = self.replicas
        self._loss = _NEVER if settings.lose_replica_at is None else settings.lose_replica_at
        """When replica 0 will be lost."""
        self.most_alive = 0
        """Sessions held at once: what memory grows with."""

    def run(self, lives: Iterable[Life]) -> Tally:
        """Simulate until the last answer has ended.

        Each pass takes what comes first: a session starts, a turn arrives at its replica, a replica takes its next run
        of steps, or a replica is lost. ``lives`` is read only as far as that, so a long load is never held.
        """
        source = iter(lives)
        upcoming = next(source, None)
        while True:
            at = self._due[0][0] if self._due else _NEVER
            if upcoming is not None and upcoming.start <= at:
                self._later(LiveTurn(upcoming), upcoming.start)
                upcoming = next(source, None)
                continue
            first = self._live[0] if len(self._live) == 1 else min(self._live, key=_begins)
            if self._loss <= min(at, first.begins) < _NEVER:
                self._lose(self._loss)
            elif first.begins <= at and first.begins < _NEVER:
                horizon = _NEVER if self._affine else self._horizon(first)
                if ended := first.run(min(at, self._loss, horizon)):
                    self._ended(first, ended)
            elif self._due:
                self._submit(heapq.heappop(self._due)[2], at)
            else:
                return self.tally

    def _horizon(self, first: Batch) -> float:
        """Until when nothing that another replica does can matter to ``first``: until another one's next step begins.

        A turn that ends elsewhere may send its session's next one here. Where sessions keep to one replica (``affine``)
        they never meet the others, and nobody asks.
        """
        return min((other.begins for other in self._live if other is not first), default=_NEVER)

    def _later(self, turn: LiveTurn, at: float) -> None:
        self._tickets += 1
        turn.arrived = at
        heapq.heappush(self._due, (at + self._settings.machine.turn_s, self._tickets, turn))
        self.most_alive = max(self.most_alive, len(self._due))

    def _submit(self, turn: LiveTurn, now: float) -> None:
        turn.replica = self._settings.route(
            turn.life.number, turn.index, lost=self._live is not self.replicas
        )
        self._tickets += 1
        self.replicas[turn.replica].submit(turn, self._tickets, now)

    def _ended(self, replica: Batch, ended: list[tuple[LiveTurn, float]]) -> None:
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
            cost = self._prices.of(restore.missing, turn.history) if restore.recomputed else 0.0
            first = turn.first_token
            shared = present - turn.history
            self.tally.add(turn.index, usage, turn.prompt, cost, first - turn.arrived, at - first, at, shared)
            if arc is not None:
                arc.returned(turn.index, turn.history, restore.recomputed)
            if self._progress is not None:
                self._progress(self.tally.sessions)
            if turn.index + 1 < len(turn.life.turns):
                due = turn.life.due(turn.index + 1, at)
                if self.bound is not None:
                    self.bound.idle(turn.prompt + turn.output, due - at)
                following = LiveTurn(turn.life, turn.index + 1, turn.prompt + turn.output)
                self._later(following, due)
            else:
                self.tally.open(turn.life.start, at)

    def _lose(self, now: float) -> None:
        """Replica 0 is gone: its turns begin again on the others."""
        self._live, self._loss = self.replicas[1:], _NEVER
        turns, self.tally.repeated_turns = self.replicas[0].clear()
        for turn in turns:
            self._submit(turn, now)
