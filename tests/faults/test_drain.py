"""SIGTERM under load: what runs finishes, what is new is refused, nothing is lost, the exit status is 0."""

from __future__ import annotations

import asyncio
from pathlib import Path
from signal import SIGTERM

import pytest

from support.faults.fault_client import NOT_SERVING, Refused, audit, calling
from support.faults.fault_server import fault_server


@pytest.mark.fault(32)
async def test_running_turns_finish(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with fault_server(tmp_path / "server", store, pace_s=0.01) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talks = [await caller.talk() for _ in range(6)]
            started = [asyncio.Event() for _ in talks]
            specs = [talk.spec("goodbye", 40) for talk in talks]
            turns = [
                asyncio.create_task(caller.turn(talk, spec, event))
                for talk, spec, event in zip(talks, specs, started, strict=True)
            ]
            idle = await caller.talk()
            await caller.say(idle, "first", 3)
            for event in started:
                await event.wait()
            server.hold()  # so that they do run while the drain begins
            server.send(SIGTERM)
            await caller.becomes(NOT_SERVING)
            late = idle.spec("too late")
            with pytest.raises(Refused, match="DRAINING") as refused:
                await caller.turn(idle, late)
            assert refused.value.error.code == "UNAVAILABLE"
            assert not any(turn.done() for turn in turns)
            server.release()
            done = await asyncio.gather(*turns)
            assert [turn.usage.output_tokens for turn in done] == [40] * 6
        assert await asyncio.to_thread(server.wait) == 0, server.log
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            for talk, spec in zip(talks, specs, strict=True):
                assert (await caller.turn(talk, spec)).revision == 2, "a replay of what was acked"
            await caller.until_done(idle, late)
            await audit(caller, [*talks, idle])
