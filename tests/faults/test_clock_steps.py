"""The wall clock of a server and its engine jumps by an hour while turns run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from support.faults.clock_steps import ClockSteps
from support.faults.fault_client import audit, calling
from support.faults.fault_server import fault_server

HOUR_S = 3600


@pytest.mark.fault(51)
async def test_a_step_of_the_wall_clock_ends_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the turn's own time nor its lease, its caller's deadline or the session's age runs out by it."""
    clock = ClockSteps(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    with fault_server(
        tmp_path / "server", f"sqlite:///{tmp_path / 'history.sqlite3'}", stall_limit_s=5.0
    ) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talks = [await caller.talk() for _ in range(2)]
            engine = server.engine_pid
            for shift in (HOUR_S, -HOUR_S, 0):
                server.hold()
                specs = [talk.spec("go on") for talk in talks]
                turns = [asyncio.create_task(caller.turn(*one)) for one in zip(talks, specs, strict=True)]
                for talk in talks:
                    async with asyncio.timeout(30):
                        while not (await caller.session(talk)).HasField("active_turn"):
                            await asyncio.sleep(0.02)
                clock.set(shift)
                for talk in talks:
                    assert (await caller.session(talk)).HasField("active_turn"), "a lease is gone"
                server.release()
                await asyncio.gather(*turns)
                for talk in talks:
                    ahead = (await caller.session(talk)).update_time.seconds - time.time()
                    assert ahead > HOUR_S / 2, "the server saw no step, or a session's time went back"
            assert server.engine_pid == engine, "the engine was taken for a hung one"
            await audit(caller, talks)
