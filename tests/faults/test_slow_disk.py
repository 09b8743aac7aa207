"""A Redis whose disk is slow: what it holds in its memory alone is neither acknowledged nor shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pensieve.errors import TurnFenced, Unavailable
from pensieve.store._redis.rows import session_keys
from support.faults.io_errors import IoErrors
from support.store.redis_groups import until
from support.store.redis_server import RedisServer, server_folder
from support.store.store_bench import first_record, key, opened_redis, row, whole_turn

pytestmark = pytest.mark.redis

KEY = key()
META, _, _ = session_keys(KEY)
LIMIT_S = 20.0


@dataclass
class SlowRedis:
    """A server whose disk can be made slow, perhaps with a replica whose disk is not."""

    server: RedisServer
    disk: IoErrors
    replica: RedisServer | None

    @property
    def url(self) -> str:
        return self.server.url if self.replica is None else f"{self.server.url}?replicas=1"

    def start_again(self) -> None:
        """After a kill, before anything could take its place: the replica follows it again."""
        self.server.kill()
        self.disk.heal()
        self.server.start()
        self.wait_for_replica()

    def wait_for_replica(self) -> None:
        if self.replica is not None:
            with contextlib.closing(self.server.client()) as plain:
                until(
                    lambda: plain.info("replication").get("slave0", {}).get("state") == "online",
                    "it is followed",
                )


@pytest.fixture(params=["alone", "followed"])
def slow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlowRedis]:
    tools = tmp_path / "tools"
    tools.mkdir()
    with server_folder() as folder, server_folder() as other:
        disk = IoErrors(tools, folder)
        at_once = ("--repl-diskless-sync-delay", "0")
        one = SlowRedis(RedisServer(folder, options=at_once, environment=disk.environment), disk, None)
        one.server.start()
        if request.param == "followed":
            one.replica = RedisServer(other, options=("--replicaof", f"127.0.0.1 {one.server.port}"))
            one.replica.start()
        try:
            one.wait_for_replica()
            yield one
        finally:
            one.server.kill()
            if one.replica is not None:
                one.replica.kill()


async def hold_flush(slow: SlowRedis) -> None:
    """Returns when a flush of the append-only file is under way, which ends with the server only."""
    slow.disk.fail("sync", error=0, delay_ms=600_000, name="appendonly.aof.1.incr.aof")
    with contextlib.closing(slow.server.client()) as plain:
        async with asyncio.timeout(LIMIT_S):
            while not plain.info("persistence")["aof_pending_bio_fsync"]:
                plain.incr("pv1:beat")
                await asyncio.sleep(0.02)


@pytest.mark.fault(41)
async def test_a_slow_flush_does_not_acknowledge_what_is_in_memory_alone(slow: SlowRedis) -> None:
    """Append-only file, fsync every second: while one runs, Redis answers and writes nothing to its file for 2 s."""
    async with opened_redis(slow.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        await hold_flush(slow)
        await whole_turn(store, KEY, 1)
        slow.start_again()
        assert len(await store.read(KEY)) == 2


@pytest.mark.fault(41)
async def test_what_redis_forgets_before_it_is_in_its_file_is_not_acknowledged(slow: SlowRedis) -> None:
    """It dies and is back before anybody notices, without the change that it answered."""
    async with opened_redis(slow.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        await hold_flush(slow)
        turn = asyncio.create_task(whole_turn(store, KEY, 1))
        with contextlib.closing(slow.server.client()) as plain:
            async with asyncio.timeout(LIMIT_S):
                while plain.hget(META, "revision") != b"2":
                    await asyncio.sleep(0.005)
        slow.start_again()
        acknowledged = 1
        try:
            await turn
        except (Unavailable, TurnFenced) as error:
            # On a busy machine the change is tried again only when Redis is back, which has forgotten its lease, too.
            assert error.reason in ("STORE_UNAVAILABLE", "TURN_FENCED")
        else:
            acknowledged = 2
        assert len(await store.read(KEY)) >= acknowledged
        await store.abort(KEY, "t1")
        await whole_turn(store, KEY, 1)
        assert len(await store.read(KEY)) == 2, "the same turn, sent again, is there once"


@pytest.mark.fault(41)
async def test_what_was_read_is_there_afterwards(slow: SlowRedis) -> None:
    """Another server reads a turn while the one that made it still waits for Redis to write it."""
    async with opened_redis(slow.url) as maker, opened_redis(slow.url) as reader:
        await maker.create(row(KEY), first_record(), "fp")
        await hold_flush(slow)
        turn = asyncio.create_task(whole_turn(maker, KEY, 1))
        with contextlib.closing(slow.server.client()) as plain:
            async with asyncio.timeout(LIMIT_S):
                while plain.hget(META, "revision") != b"2":
                    await asyncio.sleep(0.005)
        reads = [asyncio.create_task(reader.read(KEY)), asyncio.create_task(reader.load(KEY))]
        # Long enough for any answer that does not wait for the disk; one that does is told that its outcome is open.
        await asyncio.wait(reads, timeout=0.5)
        slow.start_again()
        log, session = await asyncio.gather(*reads, return_exceptions=True)
        left = len(await maker.read(KEY))
        await asyncio.gather(turn, return_exceptions=True)
        assert isinstance(log, Unavailable) or len(log) <= left, "a turn was shown and is gone"
        assert isinstance(session, Unavailable) or session.revision <= left, (
            "a revision was shown and is gone"
        )


@pytest.mark.fault(47)
async def test_a_store_is_open_when_its_marker_outlives_redis(slow: SlowRedis) -> None:
    """Opened while a flush is under way, and ended: what is there again is our store."""
    await hold_flush(slow)
    async with opened_redis(slow.url) as store:
        slow.start_again()
        await store.ping()
