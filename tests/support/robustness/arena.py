"""A run: legs of servers, clients and faults; then quiet, a last look at everything, and the checker."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from pensieve.options.serve import ServeOptions
from support.faults.io_errors import IoErrors
from support.robustness.checker import Verdict, check
from support.robustness.history import Recorder
from support.robustness.nemesis import FAULTS, Nemesis, Targets
from support.robustness.nursery import Nursery, Replica, nursery
from support.robustness.talker import Talker
from support.robustness.talks import Floor
from support.robustness.wires import wired
from support.service.server_process import model_folder
from support.store.redis_server import RedisServer, redis_server

NETWORK = frozenset({"cut", "cut in a message", "delay", "half-open"})
PROCESSES = frozenset(FAULTS) - NETWORK
LEASE_S = 1.0
Fsync = Literal["always", "everysec"]
SLOW_MS: dict[Fsync, tuple[int, int]] = {"everysec": (200, 3000), "always": (20, 400)}
"""What one flush takes on a slow disk. Where each write waits for one, it may not be the 3 s that a call waits for
Redis: no session could be made."""


@dataclass
class Leg:
    """One store with its servers and clients."""

    targets: Targets
    talkers: list[Talker]
    keepers: list[asyncio.Task[None]]
    recorder: Recorder

    @property
    def floor(self) -> Floor:
        return self.targets.floor

    async def converse(self, going: Callable[[], bool]) -> None:
        await asyncio.gather(*(talker.talk(going) for talker in self.talkers))

    async def settle(self) -> None:
        """No more faults: wait until every server is up, and no session is held by a turn."""
        for disk in (self.targets.disk, self.targets.slow):
            if disk is not None:
                disk.heal()
        for replica in self.targets.replicas:
            replica.failpoints.clear()
            replica.wires.cut()
            await replica.wait_up()

    async def last_look(self, at_once: int = 6) -> None:
        """Ask for every turn and every history. Settles what clients do not know."""
        todo = list(self.floor.all)

        async def worker(talker: Talker) -> None:
            while todo:
                await talker.settle(todo.pop())

        workers = [self.talkers[index % len(self.talkers)] for index in range(at_once)]
        await asyncio.gather(*(worker(talker) for talker in workers))


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    seconds: float
    faults: dict[str, Counter[str]]
    """By leg."""
    verdicts: dict[str, Verdict]
    operations: dict[str, int]
    errors: dict[str, Counter[str]]
    """Reasons that clients were given in the end, after all retries."""
    stalls: int
    longest_calm_s: float
    crashes: Counter[str] = field(default_factory=Counter)
    """Servers and engines that ended at a failpoint."""
    cpu_s: float = 0.0


def _options(folder: Path, store: str) -> ServeOptions:
    model = model_folder(folder / "model")
    (model / "pace").write_text("0.001")
    return ServeOptions(
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        store=store,
        model=str(model),
        device_cache="640tokens",
        host_cache="256tokens",
        chunk_tokens=8,
        lease_s=LEASE_S,
        heartbeat_s=0.4,
        disconnect_grace_s=0.3,
        log_level="warning",
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is to be."""

    seed: int
    seconds: float = 0.0
    """Faults drawn at random for so long; 0: those of ``script``, one after another."""
    legs: tuple[str, ...] = ("sqlite", "redis")
    clients: int = 6
    """Of each leg."""
    bug: str = ""
    script: tuple[str, ...] = tuple(FAULTS)
    """Faults; what a leg cannot have is left out."""
    between: int = 3
    """Turns between two faults of the script."""
    slow_disk: Fsync | None = None
    """Redis is on a disk whose flushes take ``SLOW_MS``, and syncs so often; None: the disk is what it is,
    and Redis syncs each write."""
    record: bool = False
    """Write each leg's operations down, as ``history.jsonl`` in its folder."""


Progress = Callable[[list[Nemesis], list[Leg]], None]


@contextlib.contextmanager
def ground(folder: Path) -> Iterator[tuple[Nursery, IoErrors]]:
    """What several runs may share: servers that start quickly, and a disk that can fail."""
    (folder / "disk").mkdir()
    (folder / "tools").mkdir()
    disk = IoErrors(folder / "tools", folder / "disk")
    with nursery(folder, disk.environment) as nest:
        yield nest, disk


@contextlib.contextmanager
def slow_redis(folder: Path, fsync: Fsync) -> Iterator[tuple[RedisServer, IoErrors]]:
    """A Redis on a slow disk, and the disk."""
    place, tools = folder / "redis", folder / "tools"
    place.mkdir()
    tools.mkdir()
    disk = IoErrors(tools, place)
    disk.fail("sync", error=0, delay_ms=SLOW_MS[fsync])
    # What a power cut would leave is not asked here; to keep it costs time with each write.
    environment = {name: value for name, value in disk.environment.items() if name != "IO_ERRORS_DISK"}
    server = RedisServer(place, appendfsync=fsync, environment=environment)
    try:
        server.start()
        yield server, disk
    finally:
        disk.heal()
        server.kill()


@contextlib.asynccontextmanager
async def leg(
    name: str, folder: Path, nest: Nursery, random: Random, plan: Plan, disk: IoErrors
) -> AsyncIterator[Leg]:
    """``sqlite``: one server. ``redis``: two servers on one Redis whose every write is synced, or see ``slow_disk``."""
    folder.mkdir()
    async with AsyncExitStack() as stack:
        redis, slow = None, None
        if name == "redis" and plan.slow_disk is not None:
            redis, slow = stack.enter_context(slow_redis(folder, plan.slow_disk))
            store = redis.url
        elif name == "redis":
            redis = stack.enter_context(redis_server(appendfsync="always"))
            store = redis.url
        else:
            store = f"sqlite:///{disk._under / f'{folder.parent.name}.sqlite3'}"
        replicas = []
        for number in range(2 if redis else 1):
            wires = await stack.enter_async_context(wired())
            home = folder / f"server{number}"
            home.mkdir()
            replicas.append(Replica(nest, _options(home, store), home / "stderr.txt", wires, plan.bug))
        floor = Floor()
        recorder = Recorder(folder / "history.jsonl" if plan.record else None)
        stack.callback(recorder.close)
        talkers = []
        for number in range(plan.clients):
            replica = replicas[number % len(replicas)]
            talker = Talker(number, replica, floor, recorder, Random(random.getrandbits(64)))
            stack.push_async_callback(talker.close)
            talkers.append(talker)
        keepers = [asyncio.create_task(replica.keep(), name="keeper") for replica in replicas]
        try:
            for replica in replicas:
                await replica.wait_up()
            io = disk if redis is None else None
            yield Leg(Targets(name, replicas, floor, redis, io, slow, LEASE_S), talkers, keepers, recorder)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


async def run(
    plan: Plan, folder: Path, nest: Nursery, disk: IoErrors, progress: Progress | None = None
) -> Outcome:
    """All of it, in a folder that does not exist yet."""
    folder.mkdir()
    random, began = Random(plan.seed), time.monotonic()
    running: list[Leg] = []
    async with AsyncExitStack() as stack:
        for name in plan.legs:
            made = leg(name, folder / name, nest, random, plan, disk)
            running.append(await stack.enter_async_context(made))
        nemeses = [Nemesis(one.targets, Random(random.getrandbits(64))) for one in running for _ in range(2)]
        await _storm(plan, running, nemeses, progress)
        for one in running:
            await one.settle()
        await asyncio.gather(*(one.last_look() for one in running))
        crashes = _crashes(running)
    return _outcome(plan.seed, began, running, nemeses, crashes)


async def _storm(plan: Plan, legs: list[Leg], nemeses: list[Nemesis], progress: Progress | None) -> None:
    """Clients and faults side by side."""
    over = asyncio.Event()
    until = time.monotonic() + plan.seconds

    async def harm() -> None:
        if plan.seconds:
            kinds = (PROCESSES, NETWORK)
            await asyncio.gather(
                *(one.rage(lambda: time.monotonic() < until, kinds[at % 2]) for at, one in enumerate(nemeses))
            )
        else:
            scripts = [[name for name in plan.script if name in one.targets.faults()] for one in nemeses[::2]]
            await asyncio.gather(
                *(one.follow(script, plan.between) for one, script in zip(nemeses[::2], scripts, strict=True))
            )
        over.set()

    async def report() -> None:
        while progress is not None:
            await asyncio.sleep(10)
            progress(nemeses, legs)

    reporting = asyncio.create_task(report())
    try:
        await asyncio.gather(harm(), *(one.converse(lambda: not over.is_set()) for one in legs))
    finally:
        reporting.cancel()


def _crashes(legs: list[Leg]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in legs:
        for replica in one.targets.replicas:
            for line in replica.log().splitlines():
                if line.startswith("failpoint ") and ": crash" in line:
                    found[line.split()[1].rstrip(":")] += 1
    return found


def _outcome(
    seed: int, began: float, legs: list[Leg], nemeses: list[Nemesis], crashes: Counter[str]
) -> Outcome:
    seconds = time.monotonic() - began
    faults: dict[str, Counter[str]] = {one.targets.name: Counter() for one in legs}
    for nemesis in nemeses:
        faults[nemesis.targets.name] += nemesis.tally
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Outcome(
        seed=seed,
        seconds=seconds,
        faults=faults,
        verdicts={one.targets.name: check(one.recorder.operations) for one in legs},
        operations={one.targets.name: len(one.recorder.operations) for one in legs},
        errors={
            one.targets.name: Counter(op.error for op in one.recorder.operations if op.error) for one in legs
        },
        stalls=sum(one.stalls for one in nemeses),
        longest_calm_s=max(one.longest_calm_s for one in nemeses),
        crashes=crashes,
        cpu_s=sum(use.ru_utime + use.ru_stime for use in (own, others)),
    )
