"""``TurnCache`` and ``CacheManager`` side by side, on one schedule drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.sharing import PrefixPath
from pensieve.replay.load.schedule import prefix_ids
from pensieve.replay.load.workload import Piece
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.turns.cache import TurnCache

SIZE = 8
CONTEXT = 4096
COST = Machine().cost_model(SIZE, 4096)
CHECK_EVERY = 16
"""Plans. The books of the real cache are another test's promise: here they would take most of the time."""


class Manager:
    """The real cache, driven in the words of its twin."""

    def __init__(self, config: CacheConfig, name: str) -> None:
        self.cache = CacheManager(config, COST, policies.make_policy(name)[0])
        self._completed = 0

    def tokens(self, key: int) -> TokenArray:
        """Of a whole context: what it begins with, then what no other session has."""
        own = np.full(CONTEXT, (1 << 30) + key, np.int32)
        return np.concatenate([prefix_ids(prefix_of(key), 1 << 30, [0]), own]) if prefix_of(key) else own

    def path(self, key: int, tokens: int) -> PrefixPath | None:
        scope = "all" if prefix_of(key) else ""
        return self.cache.prefix_path(SessionKey(str(key)), scope, self.tokens(key)[:tokens])

    def can_admit(self, key: int, history: int, tokens: int) -> bool:
        context, path = self.tokens(key)[:tokens], self.path(key, tokens)
        return self.cache.can_admit(
            SessionKey(str(key)), context, tokens - history, reserve_for="", path=path
        )

    def admit(self, key: int, history: int, tokens: int, now: float) -> Restore:
        context, path = self.tokens(key)[:tokens], self.path(key, tokens)
        return self.cache.admit(SessionKey(str(key)), context, tokens - history, now, path)

    def complete(self) -> None:
        self.cache.take_copies()
        self.cache.complete_copies()
        self._completed += 1
        if self._completed % CHECK_EVERY == 0:
            self.cache.check()

    def computed(self, key: int, start: int, end: int) -> None:
        self.cache.computed(SessionKey(str(key)), start, end)

    def grow(self, key: int, start: int, end: int, now: float) -> None:
        for length in range(start + 1, end + 1):
            assert self.cache.extend(SessionKey(str(key)), length, now)

    def release(self, key: int, tokens: int, stamp: float, hints: Hints | None = None) -> None:
        self.cache.release(SessionKey(str(key)), stamp, self.tokens(key)[:tokens], hints=hints)


SHARING = 1000
"""Sessions of these numbers and above have beginnings in common."""
PREFIXES: tuple[tuple[Piece, ...], ...] = (
    (("system", 45),),
    (("system", 45), ("document", 60)),
    (("system", 45), ("document", 33)),
    (("system", 24), ("letter", 48)),
    (("other", 100),),
    (("other", 7),),
    (),
)
"""Runs that end where others go on, that branch off within a chunk and at its end, and one of no chunk."""


def prefix_of(key: int) -> tuple[Piece, ...]:
    return PREFIXES[key % len(PREFIXES)] if key >= SHARING else ()


@dataclass
class RunningTurn:
    """A turn that runs, as a schedule drawn at random has it."""

    tokens: int
    missing: tuple[Range, ...]
    due: float


class Both:
    """The same random schedule on both; whatever can be asked of both is compared."""

    def __init__(self, name: str, host: int, seed: str, *, hinted: bool = False) -> None:
        self.rng = random.Random(seed)
        self.says = random.Random(f"{seed} says") if hinted else None
        config = CacheConfig(60, host, SIZE, swap_watermark=self.rng.choice((0, 0.25)))
        self.twin = TurnCache(config, COST, policies.make_policy(name)[0])
        self.manager = Manager(config, name)
        self.stamp = policies.make_policy(name)[1]
        self.context: dict[int, int] = {}
        self.running: dict[int, RunningTurn] = {}
        self.turns = dict.fromkeys(range(20), 0)
        self.now = 0.0
        self.lost = self.suspended = 0

    def step(self) -> None:
        self.now += self.rng.expovariate(0.2)
        key = self.rng.randrange(20)
        if key not in self.running:
            self.begin(key)
        elif self.running[key].missing:
            self.end(key, suspended=True)
        else:
            self.grow(key)
            self.end(key, suspended=False)
        self.plan_ends()

    def begin(self, key: int) -> None:
        history = self.context.get(key, 0)
        total = history + self.rng.randrange(1, 40)
        if total > 300 or len(self.running) >= 3:
            return
        admits = self.manager.can_admit(key, history, total)
        assert self.twin.can_admit(key, total, reserve=True) == admits
        if not admits:
            return
        ours, theirs = (
            self.twin.admit(key, history, total, self.now),
            self.manager.admit(key, history, total, self.now),
        )
        assert ours == theirs
        self.lost += ours.recomputed
        self.turns[key] += 1
        # Others are suspended before their first step. The twin cannot have half a chunk, nor its old host copy then.
        whole = self.rng.random() < 0.5 or any(start % SIZE for start, _ in ours.missing)
        for start, end in ours.missing if whole else ():
            self.manager.computed(key, start, end)
        self.plan_ends()
        self.running[key] = RunningTurn(total, () if whole else ours.missing, self.rng.expovariate(0.02))

    def compare(self) -> None:
        cache = self.manager.cache
        tiers = cache.occupancy()
        assert (self.twin.device_free * SIZE, self.twin.host_free * SIZE) == (
            tiers.device_free,
            tiers.host_free,
        )
        for reclaim in Reclaim:
            assert self.twin.index.total(reclaim) == cache.index.total_bytes(reclaim)
        assert len(self.twin._sessions) == len(cache.sessions)
        assert self.twin.unpinned == cache._tiers.unpinned_bytes()

    def plan_ends(self) -> None:
        tiers = self.manager.cache.occupancy()
        assert self.twin.device_free * SIZE == tiers.device_free
        assert self.twin._reclaimable * SIZE == tiers.device_reclaimable
        self.twin.save_ahead(self.now, 10**6)
        self.manager.cache.swap_out_ahead(self.now, 10**6)
        self.twin.complete()
        self.manager.complete()

    def grow(self, key: int) -> None:
        run = self.running[key]
        longer = run.tokens + self.rng.randrange(0, 30)
        chunks = self.twin.chunks_for(longer) - self.twin.chunks_for(run.tokens)
        if chunks > self.twin.unpinned:
            return
        self.grow_twin(chunks)
        self.manager.grow(key, run.tokens, longer, self.now)
        if longer > run.tokens:
            self.manager.computed(key, run.tokens, longer)
        self.plan_ends()
        run.tokens = longer

    def grow_twin(self, chunks: int) -> None:
        self.twin.grow(chunks, self.now)

    def end(self, key: int, *, suspended: bool) -> None:
        run = self.running.pop(key)
        stamp = self.stamp(self.now, self.now + run.due, self.turns[key])
        hints = self.hints()
        self.twin.release(key, run.tokens, stamp, run.missing, hints)
        self.manager.release(key, run.tokens, stamp, hints)
        self.context[key] = run.tokens
        self.suspended += suspended

    def hints(self) -> Hints | None:
        """What a client may say after a turn."""
        if self.says is None or self.says.random() < 0.3:
            return None
        pause, worth = self.says.choice((None, 1.0, 20.0, 300.0)), self.says.choice((0.5, 1.0, 8.0))
        return Hints(next_turn_s=pause, importance=worth, finished=self.says.random() < 0.2)
