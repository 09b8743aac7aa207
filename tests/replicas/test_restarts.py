"""Servers that are restarted and killed under load, seen through the proxy and the SDK: no turn fails, none is lost.

``PENSIEVE_RESTART_ROUNDS=20`` plays the rolling restart so many times, ``PENSIEVE_RESTART_STORE=URL`` uses a store
that is there already, such as a Redis with Sentinel; ``-s`` shows the pauses.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pensieve.client import AsyncClient
from support.faults.fault_client import check_idle
from support.replicas.service import Service, Talker, service

pytestmark = [pytest.mark.redis, pytest.mark.haproxy, pytest.mark.timeout(600)]
ROUNDS = int(os.environ.get("PENSIEVE_RESTART_ROUNDS", "1"))
STORE = os.environ.get("PENSIEVE_RESTART_STORE")
TALKERS = 4
PACE_S = 0.01


async def _talk(client: AsyncClient, talkers: list[Talker], over: asyncio.Event) -> None:
    """Turns without a pause until it is over, and one more; a new session whenever one is full."""
    while not over.is_set():
        talkers.append(talker := await Talker.begin(client))
        while not over.is_set() and len(talker.told) < 12:
            await talker.say("go on")
    await talker.say("the last one")


def _report(what: str, talkers: list[Talker]) -> None:
    pauses = sorted(pause for talker in talkers for pause in talker.pauses)
    for talker in talkers:
        talker.pauses.clear()
        talker.resumes = 0
    print(
        f"\n{what}: {len(pauses)} turns, 0 failed, longest silence of a turn: p50 {pauses[len(pauses) // 2]:.2f} s, "
        f"p99 {pauses[len(pauses) * 99 // 100]:.2f} s, worst {pauses[-1]:.2f} s"
    )


async def _rolling_restart(whole: Service, client: AsyncClient) -> list[Talker]:
    """SIGTERM to one server after the other while everybody talks. Nobody notices anything but a pause."""
    talkers: list[Talker] = []
    over = asyncio.Event()
    talks = [asyncio.create_task(_talk(client, talkers, over)) for _ in range(TALKERS)]
    try:
        for number in range(2 * ROUNDS):
            await whole.restart(number % 2, gently=True)
    finally:
        over.set()
        await asyncio.gather(*talks)
    _report("rolling restart", talkers)
    return talkers


async def _at_both(client: AsyncClient) -> list[Talker]:
    """Sessions of which each server has some."""
    talkers: list[Talker] = []
    homes: set[str] = set()
    while len(talkers) < TALKERS or len(homes) < 2:
        talkers.append(talker := await Talker.begin(client))
        info = await talker.session.refresh(residency=True)
        assert info.residency is not None
        homes.add(info.residency.replica)
    return talkers


async def _kills(whole: Service, client: AsyncClient) -> list[Talker]:
    """kill -9 of one server in the middle of streams, then of the one that is left, which comes back."""
    talkers = await _at_both(client)
    for victim, name in enumerate("ab"):
        for server in whole.servers:
            server.hold()
        turns = [asyncio.create_task(talker.say("hold on", 40)) for talker in talkers]
        await _all_run(talkers)
        whole.servers[victim].send(signal.SIGKILL)
        await asyncio.to_thread(whole.servers[victim].wait)
        for server in whole.servers:
            server.release()
        if name == "b":
            await asyncio.to_thread(whole.proxy.wait_for, a="DOWN", b="DOWN")
            await asyncio.to_thread(whole.servers[victim].start)
        await asyncio.gather(*turns)
        assert any(talker.resumes for talker in talkers), "nobody's stream was cut"
        _report(f"kill -9 of {name}, {'the last one' if name == 'b' else 'one of two'}", talkers)
    assert [turn.revision for talker in talkers for turn in talker.told] == [2, 3] * len(talkers)
    return talkers


@pytest.mark.fault(14, 15, 25, 32)
async def test_restarts_and_kills_fail_no_turn(tmp_path: Path) -> None:
    async with service(tmp_path, STORE, pace_s=PACE_S) as whole, whole.client() as client:
        talkers = await _rolling_restart(whole, client)
        talkers += await _kills(whole, client)
        async with whole.direct(1) as caller:
            await asyncio.gather(*(talker.check(caller) for talker in talkers))
            await check_idle(caller)


async def _all_run(talkers: list[Talker]) -> None:
    """Returns when every session's turn is held by a server."""
    async with asyncio.timeout(60):
        for talker in talkers:
            while not (await talker.session.refresh()).active_request_id:
                await asyncio.sleep(0.02)
