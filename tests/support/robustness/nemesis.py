"""What goes wrong: faults drawn from a seeded stream, each counted only when it hit something that was at work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from support.faults.io_errors import IoErrors
from support.robustness.nursery import Replica
from support.robustness.talks import Floor
from support.store.redis_server import RedisServer

CALM_LIMIT_S = 30.0
ENGINE_DEATHS_OF_A_LIFE = 2
"""After so many the server is killed, too: it lets more and more time pass before it starts the next engine."""
FAILPOINTS = (
    "before_begin", "after_begin", "mid_decode", "before_commit", "after_commit_before_ack", "engine_mid_step",
)  # fmt: skip
FAULTS = {
    "server kill": 10.0, "engine kill": 7.0, "server pause": 3.0, "engine pause": 1.5, "failpoint": 2.0,
    "cut": 8.0, "cut in a message": 6.0, "delay": 1.0, "half-open": 1.0, "Redis kill": 6.0, "Redis pause": 1.5,
    "I/O error": 4.0,
}  # fmt: skip
"""Fault → how often against the others."""
OF_REDIS = frozenset({"Redis kill", "Redis pause"})
OF_SQLITE = frozenset({"I/O error"})


@dataclass
class Targets:
    """What can be harmed of one leg."""

    name: str
    replicas: list[Replica]
    floor: Floor
    redis: RedisServer | None = None
    disk: IoErrors | None = None
    slow: IoErrors | None = None
    """The disk of a Redis whose flushes take long."""
    lease_s: float = 1.0

    def faults(self) -> dict[str, float]:
        left_out = (OF_REDIS if self.redis is None else frozenset()) | (
            OF_SQLITE if self.disk is None else frozenset()
        )
        return {name: weight for name, weight in FAULTS.items() if name not in left_out}


@dataclass
class Nemesis:
    """Harms one leg, one fault after another; several may do so at once."""

    targets: Targets
    random: Random
    tally: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    """How often nothing was acknowledged for ``CALM_LIMIT_S`` after a fault."""
    longest_calm_s: float = 0.0

    def __post_init__(self) -> None:
        self._acts: dict[str, Callable[[], Awaitable[int]]] = {
            "server kill": self._server_kill,
            "engine kill": self._engine_kill,
            "server pause": self._server_pause,
            "engine pause": self._engine_pause,
            "failpoint": self._failpoint,
            "cut": self._cut,
            "cut in a message": self._cut_in_a_message,
            "delay": self._delay,
            "half-open": self._half_open,
            "Redis kill": self._redis_kill,
            "Redis pause": self._redis_pause,
            "I/O error": self._io_error,
        }

    async def rage(self, going: Callable[[], bool], only: frozenset[str]) -> None:
        """Faults of these kinds until it is enough."""
        weights = {name: weight for name, weight in self.targets.faults().items() if name in only}
        while going():
            (name,) = self.random.choices(list(weights), list(weights.values()))
            await self.strike(name)
            await self.calm(self.random.randint(1, 4), going)

    async def strike(self, name: str) -> int:
        """One fault; how often it hit."""
        hits = await self._acts[name]()
        self.tally[name] += hits
        return hits

    async def follow(self, script: Sequence[str], between: int, tries: int = 400) -> None:
        """These faults, each again until it has hit, with some turns between."""
        for name in script:
            for _ in range(tries):
                if await self.strike(name):
                    break
                await asyncio.sleep(0.05)
            await self.calm(between, lambda: True)

    async def calm(self, turns: int, going: Callable[[], bool]) -> None:
        """Until so many turns more are acknowledged."""
        began, wanted = time.monotonic(), self.targets.floor.acknowledged + turns
        while self.targets.floor.acknowledged < wanted and going():
            if time.monotonic() - began > CALM_LIMIT_S:
                self.stalls += 1
                break
            await asyncio.sleep(0.01)
        self.longest_calm_s = max(self.longest_calm_s, time.monotonic() - began)

    # ---- faults

    def _replica(self) -> Replica:
        return self.random.choice(self.targets.replicas)

    async def _server_kill(self) -> int:
        replica = self._replica()
        if not replica.up.is_set():
            await asyncio.sleep(0.02)
            return 0
        if self.random.random() < 0.2:
            replica.failpoints.append(self._drawn_failpoint())
        return int(replica.kill())

    async def _engine_kill(self) -> int:
        replica = self._replica()
        if replica.engine_deaths >= ENGINE_DEATHS_OF_A_LIFE:
            self.tally["server kill"] += int(replica.kill())
            return 0
        return int(replica.kill_engine())

    def _pause_s(self) -> float:
        """Mostly short; now and then longer than a lease."""
        if self.random.random() < 0.8:
            return self.random.uniform(0.02, 0.3)
        return self.targets.lease_s * self.random.uniform(1.1, 1.6)

    async def _server_pause(self) -> int:
        return int(await self._replica().pause(self._pause_s()))

    async def _engine_pause(self) -> int:
        return int(await self._replica().pause(self._pause_s(), engine=True))

    def _drawn_failpoint(self) -> str:
        name = self.random.choice(FAILPOINTS)
        hit = (
            self.random.randint(5, 60)
            if name in ("mid_decode", "engine_mid_step")
            else self.random.randint(1, 6)
        )
        return f"{name}@{hit}=crash"

    async def _failpoint(self) -> int:
        """Arm the next life and begin it; how it ends is for the log to tell."""
        replica = self._replica()
        if not replica.up.is_set():
            return 0
        replica.failpoints.append(self._drawn_failpoint())
        before = replica.lives
        self.tally["server kill"] += int(replica.kill())
        await self._until(lambda: replica.lives > before, 5.0)
        at_work = replica.engine()
        await self._until(lambda: replica.lives > before + 1 or replica.engine() != at_work, 3.0)
        return int(replica.lives > before + 1 or replica.engine() != at_work)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not condition() and time.monotonic() < limit:
            await asyncio.sleep(0.01)

    async def _cut(self) -> int:
        replica = self._replica()
        busy = replica.working > 0
        return replica.wires.cut() if busy else 0

    async def _cut_in_a_message(self) -> int:
        replica = self._replica()
        wires = list(replica.wires.open)
        if not wires or not replica.working:
            return 0
        before = replica.wires.cuts
        for wire in self.random.sample(wires, min(3, len(wires))):
            wire.left = self.random.randint(0, 400)
        await self._until(lambda: replica.wires.cuts > before, 0.5)
        return replica.wires.cuts - before

    async def _delay(self) -> int:
        replica = self._replica()
        wires = list(replica.wires.open) if replica.working else []
        for wire in wires:
            wire.free.clear()
        await asyncio.sleep(self.random.uniform(0.05, 0.5))
        for wire in wires:
            wire.free.set()
        return int(bool(wires))

    async def _half_open(self) -> int:
        replica = self._replica()
        wires = list(replica.wires.open) if replica.working else []
        for wire in wires:
            wire.deaf = True
        await asyncio.sleep(self.random.uniform(0.05, 0.7))
        for wire in wires:
            wire.cut()  # harmless where it has ended by itself
        return len(wires)

    def _busy(self) -> bool:
        return any(replica.working for replica in self.targets.replicas)

    async def _redis_kill(self) -> int:
        redis = self.targets.redis
        assert redis is not None
        busy = self._busy()
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1, 0.5)))
        await asyncio.to_thread(redis.start)
        return int(busy)

    async def _redis_pause(self) -> int:
        redis = self.targets.redis
        assert redis is not None and redis._process is not None
        pid, busy = redis._process.pid, self._busy()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._pause_s())
        finally:
            os.kill(pid, signal.SIGCONT)
        return int(busy)

    async def _io_error(self) -> int:
        disk = self.targets.disk
        assert disk is not None
        before = disk.met().total()
        kind = self.random.choice(("sync", "sync", "write"))
        disk.fail(kind, skip=self.random.randint(0, 4), times=self.random.randint(1, 3))
        await self._until(lambda: disk.met().total() > before, 1.5)
        await asyncio.sleep(self.random.uniform(0.0, 0.1))
        disk.heal()
        return disk.met().total() - before
