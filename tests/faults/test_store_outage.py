"""redis-server killed under running turns: commits wait for it, or the retry tells; what was acked stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.faults.fault_client import NOT_SERVING, Caller, Refused, Talk, audit, calling
from support.faults.fault_server import FaultServer, fault_server
from support.store.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis


async def _outage(caller: Caller, server: FaultServer, redis: RedisServer, talks: list[Talk]) -> list[object]:
    """Kill Redis in the middle of a turn of each session; start it again when health has seen it and turns wait."""
    started = [asyncio.Event() for _ in talks]
    turns = [
        asyncio.create_task(caller.turn(talk, talk.spec("what now?", 30), event))
        for talk, event in zip(talks, started, strict=True)
    ]
    for event in started:
        await event.wait()
    server.hold()
    await asyncio.to_thread(redis.kill)
    server.release()
    idle = await _refused_new(caller, talks[0])
    await caller.becomes(NOT_SERVING)
    assert idle in ("STORE_UNAVAILABLE", "TURN_IN_PROGRESS")
    await asyncio.to_thread(redis.start)
    return list(await asyncio.gather(*turns, return_exceptions=True))


async def _talks(caller: Caller) -> list[Talk]:
    """Five sessions that have a turn each."""
    talks = [await caller.talk() for _ in range(5)]
    for talk in talks:
        await caller.say(talk, "before", 4)
    return talks


async def _refused_new(caller: Caller, talk: Talk) -> str:
    spec = talk.spec("during the outage", 3)
    with pytest.raises(Refused) as refused:
        await caller.turn(talk, spec)
    return refused.value.error.reason


async def _settle(caller: Caller, talks: list[Talk]) -> None:
    for talk in talks:
        for spec in list(talk.open.values()):
            await caller.until_done(talk, spec)


@pytest.mark.fault(47)
async def test_commits_wait_for_the_store(tmp_path: Path) -> None:
    """The lease outlasts the outage: every turn that ran is committed by its first call."""
    with redis_server() as redis, fault_server(tmp_path, redis.url, pace_s=0.005, lease_s=60.0) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talks = await _talks(caller)
            ended = await _outage(caller, server, redis, talks)
            assert not [error for error in ended if isinstance(error, BaseException)], ended
            await _settle(caller, talks)
            await audit(caller, talks)


async def test_a_lease_that_cannot_be_renewed(tmp_path: Path) -> None:
    """The turn ends while the store still holds its lease, and leaves nothing; a short turn needs no renewal."""
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with fault_server(tmp_path / "server", store, pace_s=0.01, lease_s=1.0) as server:
        await asyncio.to_thread(server.start, "in_renew=raise")
        async with calling(server.grpc, server.admin) as caller:
            talk = await caller.talk()
            server.hold()
            spec = talk.spec("too long for its lease", 8)
            with pytest.raises(Refused, match="TURN_FENCED"):
                await caller.turn(talk, spec)
            assert (await caller.session(talk)).revision == 1
            server.release()
            assert (await caller.until_done(talk, spec)).revision == 2
            await audit(caller, [talk])


@pytest.mark.fault(47)
async def test_an_outage_longer_than_the_lease(tmp_path: Path) -> None:
    """Turns end without their lease, or with an unknown outcome; the retry finds out which."""
    with redis_server() as redis, fault_server(tmp_path, redis.url, pace_s=0.005, lease_s=1.0) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talks = await _talks(caller)
            ended = await _outage(caller, server, redis, talks)
            for error in ended:
                assert not isinstance(error, Refused) or error.error.reason in (
                    "TURN_FENCED",
                    "STORE_UNAVAILABLE",
                ), error
            await _settle(caller, talks)
            await audit(caller, talks)
