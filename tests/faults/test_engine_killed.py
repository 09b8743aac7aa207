"""kill -9 of the engine process: running turns end with ENGINE_RESTARTING, nothing of them stays, retries are exact."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pensieve.client import AsyncClient
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fault_client import NOT_SERVING, SERVING, Caller, Refused, Talk, audit, calling
from support.faults.fault_server import FaultServer, fault_server


async def _killed(caller: Caller, server: FaultServer) -> None:
    """The engine is gone; returns when that shows."""
    pid = server.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await caller.becomes(NOT_SERVING, 5)
    server.release()


async def _loses(caller: Caller, server: FaultServer, turns: list[tuple[Talk, pb.TurnSpec]]) -> None:
    """Kill the engine under these running turns, then try all of them again."""
    before = [(await caller.session(talk)).revision for talk, _ in turns]
    tries = [asyncio.create_task(caller.turn(talk, spec)) for talk, spec in turns]
    for talk, spec in turns:
        await _runs(caller, talk, spec)
    await _killed(caller, server)
    for ended in await asyncio.gather(*tries, return_exceptions=True):
        assert isinstance(ended, Refused) and ended.error.code == "UNAVAILABLE", ended
        assert ended.error.reason == "ENGINE_RESTARTING"
    assert [(await caller.session(talk)).revision for talk, _ in turns] == before
    done = await asyncio.gather(*(caller.until_done(talk, spec) for talk, spec in turns))
    assert [turn.revision for turn in done] == [revision + 1 for revision in before]
    assert await caller.health() == SERVING


async def _runs(caller: Caller, talk: Talk, spec: pb.TurnSpec) -> None:
    """Returns when this turn holds its session."""
    async with asyncio.timeout(20):
        while (await caller.session(talk)).active_turn.request_id != spec.request_id:
            await asyncio.sleep(0.005)


@pytest.mark.fault(27)
async def test_in_each_phase(store: str, tmp_path: Path) -> None:
    with fault_server(tmp_path / "server", store, pace_s=0.003, max_running=1) as server:
        await asyncio.to_thread(server.start, "engine_mid_step@30=crash")
        async with calling(server.grpc, server.admin) as caller:
            talks = [await caller.talk() for _ in range(3)]
            first = talks[0]
            await caller.say(first, "a short one", 5)
            long = first.spec("dies in a step", 60)
            with pytest.raises(Refused, match="ENGINE_RESTARTING"):
                await caller.turn(first, long)
            assert (await caller.until_done(first, long)).revision == 3

            server.hold()  # the first step computes the prompt: prefill, and behind it what is queued
            await _loses(caller, server, [(talk, talk.spec("prefill or queue")) for talk in talks])

            deltas = asyncio.Event()
            spec = first.spec("decode", 60)
            turn = asyncio.create_task(caller.turn(first, spec, deltas))
            await deltas.wait()
            server.hold()
            await _killed(caller, server)
            with pytest.raises(Refused, match="ENGINE_RESTARTING"):
                await turn
            await caller.until_done(first, spec)

            await _killed(caller, server)  # between turns
            await caller.say(talks[1], "who are you?")
            assert await asyncio.to_thread(server.metric, "pensieve_engine_restarts_total") == 4
            await audit(caller, talks)


@pytest.mark.fault(27)
async def test_an_answer_that_was_drawn_without_a_seed_goes_on_as_it_began(
    store: str, tmp_path: Path
) -> None:
    """Nothing that a client was shown is taken back by the death of an engine, or of the whole server."""
    with fault_server(tmp_path / "server", store, pace_s=0.003) as server:
        await asyncio.to_thread(server.start)
        async with AsyncClient(server.grpc) as client:
            session = await client.create_session()
            plain = await session.send("one", max_output_tokens=12, ignore_eos=True)
            drawn = await session.send("two", max_output_tokens=12, ignore_eos=True, temperature=1.0)
            assert drawn.text != plain.text
            stream = session.stream("three", max_output_tokens=60, ignore_eos=True, temperature=1.0)
            shown, restarts = "", 0
            async for piece in stream:
                if piece.restarted:
                    before, shown, restarts = shown, "", restarts + 1
                    continue
                shown += piece.text
                if restarts:
                    assert shown.startswith(before) or before.startswith(shown)
                elif len(shown) > 5 and server.engine_pid is not None:
                    os.kill(server.engine_pid, signal.SIGKILL)
            turn = await stream.finish()
            assert restarts == 1 and shown == turn.text
