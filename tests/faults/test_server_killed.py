"""kill -9 of the server in each phase of a turn: history stands at r or r+1, a retry gives exactly one turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from pensieve.debug import CRASH_STATUS
from support.faults.fault_client import Caller, Refused, Talk, audit, calling, may_try_again
from support.faults.fault_server import fault_server

PHASES = {
    "mid_decode@26": 0,
    "before_begin@3": 0,
    "after_begin@3": 0,
    "before_commit@3": 0,
    "after_commit_before_ack@3": 1,
}
"""Failpoint in the third turn of a process, and by how much the revision has grown when it strikes."""


@pytest.mark.fault(13, 25)
async def test_in_each_phase(store: str, tmp_path: Path) -> None:
    with fault_server(tmp_path / "server", store, pace_s=0.003, device_cache="1024tokens") as server:
        talk, victim, revision = None, None, 1
        for failpoint, grown in PHASES.items():
            await asyncio.to_thread(server.start, f"{failpoint}=crash")
            async with calling(server.grpc, server.admin) as caller:
                talk = talk or await caller.talk()
                assert (await caller.session(talk)).revision == revision
                await caller.free(talk)  # or tries in vain would count as hits of the failpoint
                turn = await caller.until_done(talk, victim or talk.spec("one"))
                assert turn.revision == revision + 1
                await caller.say(talk, "two")
                victim = talk.spec("three", 40)
                with pytest.raises(Refused) as refused:
                    await caller.turn(talk, victim)
                assert may_try_again(refused.value.error)
            assert await asyncio.to_thread(server.wait) == CRASH_STATUS, server.log
            revision += 2 + grown
        await asyncio.to_thread(server.start)
        assert talk is not None and victim is not None
        async with calling(server.grpc, server.admin) as caller:
            assert (await caller.session(talk)).revision == revision
            assert (await caller.until_done(talk, victim)).revision == revision, "committed, but not acked"
            await audit(caller, [talk])


async def _talk_until_broken(caller: Caller, talk: Talk) -> None:
    while True:
        try:
            await caller.turn(talk, talk.spec("and", 15))
        except Refused as refused:
            assert may_try_again(refused.error), refused.error
            return


@pytest.mark.fault(25)
async def test_at_random_moments(store: str, tmp_path: Path) -> None:
    random = Random(7)
    talks: list[Talk] = []
    with fault_server(tmp_path / "server", store, pace_s=0.003, device_cache="1024tokens") as server:
        for _ in range(3):
            await asyncio.to_thread(server.start)
            async with calling(server.grpc, server.admin) as caller:
                for talk in talks:
                    for spec in list(talk.open.values()):
                        await caller.until_done(talk, spec)
                talks += [await caller.talk() for _ in range(2)]
                streams = [asyncio.create_task(_talk_until_broken(caller, talk)) for talk in talks]
                await asyncio.sleep(random.uniform(0.1, 0.8))
                await asyncio.to_thread(server.kill)
                await asyncio.gather(*streams)
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            assert all(talk.open for talk in talks)
            turns = [caller.until_done(talk, spec) for talk in talks for spec in talk.open.values()]
            await asyncio.gather(*turns)
            assert sum(len(talk.acked) for talk in talks) > 2 * len(talks), "killed before anything happened"
            await audit(caller, talks)
