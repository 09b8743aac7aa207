"""A service whose Redis fails over while clients talk: servers, proxy, Redis with replicas and Sentinels, all real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.client import AsyncClient
from pensieve.errors import PensieveError
from support.faults.fault_client import check_idle
from support.replicas.service import Service, Talker, service
from support.store.redis_groups import SentinelGroup, sentinel_group, until
from support.store.redis_server import RedisServer

PACE_S = 0.01
TURNS_A_SESSION = 12
SETTLED_TURNS = 4
"""Of each client, before and after a fault: what is there again is in use again."""
LIMIT_S = 120.0


@dataclass
class Measured:
    """What clients saw while one thing was done, so many times."""

    what: str
    times: int = 0
    turns: int = 0
    failed: int = 0
    resumes: int = 0
    pauses: list[float] = field(default_factory=list)
    """Longest silence of each turn, in seconds."""
    unavailable: list[float] = field(default_factory=list)
    """Each time: seconds from the fault until the Sentinels named another primary."""

    def pause(self, part: float) -> float:
        """A quantile of the pauses; the largest for 1."""
        ordered = sorted(self.pauses)
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


@dataclass
class Crowd:
    """Clients of one service that talk without a pause, each in one session after another."""

    client: AsyncClient
    talkers: list[Talker] = field(default_factory=list)
    seen: Measured = field(default_factory=lambda: Measured("at the beginning"))
    errors: list[str] = field(default_factory=list)
    """What failed turns ended with."""
    over: bool = False

    async def talk(self) -> None:
        """One client, until it is over, and one more turn."""
        talker: Talker | None = None
        ending = False
        while not ending:
            ending = self.over
            try:
                if talker is None or len(talker.told) >= TURNS_A_SESSION:
                    self.talkers.append(talker := await Talker.begin(self.client))
                before = talker.resumes
                await talker.say("go on")
            except PensieveError as error:
                self.seen.failed += 1
                self.errors.append(f"{self.seen.what}: {error!r} {getattr(error, 'metadata', '')}")
                talker = None
                continue
            self.seen.turns += 1
            self.seen.resumes += talker.resumes - before
            self.seen.pauses.append(talker.pauses[-1])

    async def more(self, turns: int) -> None:
        """Returns when so many more turns are done."""
        wanted = self.seen.turns + turns
        async with asyncio.timeout(LIMIT_S):
            while self.seen.turns < wanted:
                await asyncio.sleep(0.02)


@dataclass
class Stage:
    """A service, its Redis, and clients that talk to it."""

    group: SentinelGroup
    whole: Service
    crowd: Crowd
    clients: int

    @asynccontextmanager
    async def measuring(self, what: str) -> AsyncIterator[Measured]:
        """What the clients see meanwhile; all of them have turns before and behind."""
        self.crowd.seen = measured = Measured(what)
        await self.settle()
        yield measured
        await self.settle()

    async def settle(self) -> None:
        await self.crowd.more(SETTLED_TURNS * self.clients)

    async def roll(self, measured: Measured) -> None:
        """SIGTERM to one server after the other, each started again."""
        for number in range(len(self.whole.servers)):
            await self.whole.restart(number, gently=True)
            measured.times += 1

    async def fail_over(self, measured: Measured, *, hung: bool) -> None:
        """The primary is killed, or stands still and cannot be told from one that the network has cut off. It comes
        back, and is a replica then."""
        old = await asyncio.to_thread(self.group.primary)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if hung:
            old.pause()
        else:
            old.kill()
        await asyncio.to_thread(until, lambda: self.group.primary() is not old, "another primary is named")
        measured.unavailable.append(loop.time() - begun)
        measured.times += 1
        await self.settle()
        if hung:
            old.resume()
        else:
            await asyncio.to_thread(old.start)
        await asyncio.to_thread(until, lambda: self._follows(old), "the old primary is a replica")
        await self.settle()

    def _follows(self, old: RedisServer) -> bool:
        with old.client() as plain:
            found = plain.info("replication")
        return bool(found["role"] == "slave" and found["master_link_status"] == "up")


@asynccontextmanager
async def stage(folder: Path, *, clients: int, replicas: int = 1) -> AsyncIterator[Stage]:
    """Everything runs and the clients talk. At the end they have stopped, and what they were told is compared with what
    is in history. ``replicas``: how many must have a change before it is acknowledged; there are two."""
    async with AsyncExitStack() as stack:
        group = stack.enter_context(sentinel_group())
        store = group.url(replicas=replicas)
        whole = await stack.enter_async_context(service(folder, store, pace_s=PACE_S))
        crowd = Crowd(await stack.enter_async_context(whole.client()))
        talks = [asyncio.create_task(crowd.talk()) for _ in range(clients)]
        try:
            yield Stage(group, whole, crowd, clients)
        finally:
            crowd.over = True
            await asyncio.gather(*talks)
        async with whole.direct(1) as caller:
            for talker in crowd.talkers:
                await talker.check(caller)
            await check_idle(caller)
