"""The ``turns`` engine: a turn arrives, waits for room, is answered, ends; nothing in between. Millions of turns.

Time is an estimate. A replica computes one turn's missing tokens after the other, first come, first served, at the
prefill rate of the machine, with copies beside; its running generations take part in each of those steps. An answer
then takes as many decode steps as it has tokens, at the batch and context of the moment it begins, stretched by the
share of time that prefills took lately.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pensieve.core import Usage
from pensieve.engine.cache.restore import Restore
from pensieve.simulate import policies
from pensieve.simulate.bound import Bound
from pensieve.simulate.load import Life
from pensieve.simulate.settings import Settings
from pensieve.simulate.tally import ChunkPrices, Tally
from pensieve.simulate.turn_cache import TurnCache

_MEMORY_S = 60.0
"""Over how long the share of prefills is averaged."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A session with a turn that waits or runs."""

    life: Life
    turn: int = 0
    history: int = 0
    arrived: float = 0.0
    left: float = 0.0
    """When its turn before ended."""
    replica: int = 0
    attempt: int = 0
    restore: Restore | None = None
    first_token: float = 0.0

    @property
    def total(self) -> int:
        """Context after the answer."""
        new, output = self.life.turns[self.turn]
        return self.history + new + output


@dataclass(slots=True, eq=False)
class _Replica:
    cache: TurnCache
    policy: object
    queue: deque[_Turn] = field(default_factory=deque)
    running: dict[_Turn, None] = field(default_factory=dict)
    tokens: int = 0
    """Contexts of the running turns."""
    busy_until: float = 0.0
    prefill_share: float = 0.0
    share_at: float = 0.0


class TurnSimulation:
    """One policy over one load. ``run`` returns its tally."""

    def __init__(self, settings: Settings, policy: str, progress: Callable[[int], None] | None = None) -> None:
        self._settings = settings
        self._machine = settings.machine
        self._prices = ChunkPrices(settings.cost)
        self._progress = progress
        self.tally = Tally()
        self.bound = Bound(settings.cost) if policy == "clairvoyant" else None
        self._replicas = []
        for _ in range(settings.replicas):
            rule, self._stamp = policies.make(policy)
            cache = TurnCache(settings.cache, settings.cost, rule, settings.slack)
            self._replicas.append(_Replica(cache, rule))
        self._events: list[tuple[float, int, int, _Turn | None]] = []
        """(time, ticket, attempt that it ends or -1 for an arrival, turn); None: the loss of replica 0."""
        self._tickets = 0
        self._lost = False
        self.most_alive = 0
        """Sessions held at once: what memory grows with."""

    def run(self, lives: Iterable[Life]) -> Tally:
        """Simulate until the last answer has ended."""
        source = iter(lives)
        upcoming = next(source, None)
        if self._settings.lose_replica_at is not None:
            self._push(self._settings.lose_replica_at, -1, None)
        while upcoming is not None or self._events:
            if upcoming is not None and (not self._events or upcoming.start <= self._events[0][0]):
                self._arrive(_Turn(upcoming, arrived=upcoming.start), upcoming.start)
                upcoming = next(source, None)
                if self._progress is not None and self._tickets % 64 == 0:
                    self._progress(self.tally.sessions)
                continue
            now, _, attempt, turn = heapq.heappop(self._events)
            self.most_alive = max(self.most_alive, len(self._events) + 1)
            if turn is None:
                self._lose(now)
            elif attempt < 0:
                self._arrive(turn, now)
            elif attempt == turn.attempt:
                self._end(turn, now)
        return self.tally

    def _push(self, at: float, attempt: int, turn: _Turn | None) -> None:
        self._tickets += 1
        heapq.heappush(self._events, (at, self._tickets, attempt, turn))

    def _arrive(self, turn: _Turn, now: float) -> None:
        turn.replica = self._settings.route(turn.life.number, turn.turn, lost=self._lost)
        replica = self._replicas[turn.replica]
        replica.queue.append(turn)
        self._admit(replica, now)

    def _admit(self, replica: _Replica, now: float) -> None:
        """First come, first served; nobody overtakes the head of the queue."""
        while replica.queue and len(replica.running) < self._settings.max_running:
            turn = replica.queue[0]
            if not replica.cache.can_admit(turn.total, reserve=bool(replica.running)):
                return
            replica.queue.popleft()
            turn.restore = replica.cache.admit(turn.life.number, turn.history, turn.total, now)
            if self.bound is not None and turn.history:
                self.bound.idle(turn.history, now - turn.left)
            if isinstance(replica.policy, policies.Arc):
                replica.policy.returned(turn.turn, turn.history, turn.restore.recomputed)
            self._push(self._answered(replica, turn, turn.restore, now), turn.attempt, turn)
            replica.running[turn] = None
            replica.tokens += turn.total

    def _answered(self, replica: _Replica, turn: _Turn, restore: Restore, now: float) -> float:
        """When its answer will end; notes when its first token comes."""
        machine, rows = self._machine, len(replica.running)
        new, output = turn.life.turns[turn.turn]
        prompt = turn.history + new
        tokens, pairs = 0, 0.0
        for start, end in restore.missing:
            end = min(end, prompt)
            tokens += end - start
            pairs += (end - start) * (start + end) / 2
        steps = math.ceil(tokens / self._settings.max_batch_tokens)
        one = machine.step(
            tokens=math.ceil(tokens / steps) + rows, rows=rows + 1, kv_read=replica.tokens, pairs=pairs / steps
        )
        prefill = steps * one
        begin = max(now, replica.busy_until)
        turn.first_token = begin + machine.overlapped(prefill, machine.copy(restore.swapped_in))
        replica.busy_until = begin + prefill
        step = machine.step(tokens=rows + 1, rows=rows + 1, kv_read=replica.tokens + prompt, pairs=0)
        faded = replica.prefill_share * math.exp((replica.share_at - now) / _MEMORY_S)
        replica.prefill_share, replica.share_at = faded + prefill / _MEMORY_S, now
        return turn.first_token + (output - 1) * step / (1 - min(replica.prefill_share, 0.9))

    def _end(self, turn: _Turn, now: float) -> None:
        replica, life, restore = self._replicas[turn.replica], turn.life, turn.restore
        assert restore is not None
        new, output = life.turns[turn.turn]
        usage = Usage(
            context_tokens=turn.total - output,
            new_tokens=new,
            gpu_cached_tokens=restore.gpu_cached,
            swapped_in_tokens=restore.swapped_in,
            recomputed_tokens=restore.recomputed,
            output_tokens=output,
        )
        cost = self._prices.of(restore.missing, turn.history) if restore.recomputed else 0.0
        self.tally.add(turn.turn, usage, turn.history + new, cost, turn.first_token - turn.arrived, now)
        del replica.running[turn]
        replica.tokens -= turn.total
        due = life.due(turn.turn + 1, now)
        replica.cache.release(life.number, self._stamp(now, due, turn.turn + 1))
        if turn.turn + 1 < len(life.turns):
            turn.history, turn.turn, turn.arrived, turn.left = turn.total, turn.turn + 1, due, now
            self._push(due, -1, turn)
        self._admit(replica, now)

    def _lose(self, now: float) -> None:
        """Replica 0 is gone: its turns begin again on the others."""
        self._lost = True
        replica = self._replicas[0]
        turns = [*replica.running, *replica.queue]
        self.tally.repeated_turns = len(replica.running)
        replica.running.clear()
        replica.queue.clear()
        replica.cache.clear()
        replica.tokens = 0
        for turn in turns:
            turn.attempt += 1
            self._arrive(turn, now)
