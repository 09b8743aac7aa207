"""A client that dies with many streams, and a server that runs out of file descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.debug import child_environment
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fault_client import PATIENCE_S, Caller, audit, calling, check_idle
from support.faults.fault_engine import HOLD_LIMIT_S
from support.faults.fault_server import FaultServer, fault_server

STREAMS = 100
HELD_S = HOLD_LIMIT_S - 5
_CLIENT = f"""
import asyncio, sys
from support.faults.fault_client import calling

async def main(grpc, admin):
    async with calling(grpc, admin) as caller:
        async def stream():
            talk = await caller.talk()
            async for event in caller.call(talk, talk.spec("for nobody", 400)):
                pass
        await asyncio.gather(*(stream() for _ in range({STREAMS})))

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def _running(caller: Caller, count: int) -> None:
    async with asyncio.timeout(HELD_S):
        while len(await _active(caller)) != count:
            await asyncio.sleep(0.05)


async def _active(caller: Caller) -> list[str]:
    listed = await caller.data.ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=20)
    return [one.name for one in listed.sessions if one.HasField("active_turn")]


@pytest.mark.fault(3)
async def test_a_client_with_many_streams_is_killed(tmp_path: Path) -> None:
    """Nothing of its turns is left after the grace time, and others are served."""
    # Without a longest wait: how soon all of them have called depends on the machine.
    options: dict[str, object] = {"disconnect_grace_s": 0.2, "device_cache": "2048tokens", "max_wait_s": 0.0}
    with fault_server(tmp_path, "memory:", **options) as server:
        await asyncio.to_thread(server.start)
        server.hold()
        client = subprocess.Popen(
            [sys.executable, "-P", "-c", _CLIENT, server.grpc, server.admin],
            env=child_environment(failpoints=False),
        )
        try:
            async with calling(server.grpc, server.admin) as caller:
                await _running(caller, STREAMS)
                client.send_signal(signal.SIGKILL)
                await _running(caller, 0)  # with the engine held: none has come to its own end
                server.release()
                talk = await caller.talk()
                await caller.say(talk, "anybody there?", 5)
                await audit(caller, [talk])
                await check_idle(caller)
        finally:
            client.kill()
            client.wait()


def _descriptors(server: FaultServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.fault(34)
async def test_file_descriptors_run_out(tmp_path: Path) -> None:
    """Who is connected is served meanwhile, and new ones are again when there are descriptors."""
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with fault_server(tmp_path / "server", store) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talk = await caller.talk()
            await caller.say(talk, "before", 3)
            pid, most = server.process.pid, _descriptors(server) + 8
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
            host, port = server.grpc.split(":")
            crowd = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
            async with asyncio.timeout(PATIENCE_S):
                while _descriptors(server) < most:
                    await asyncio.sleep(0.02)
            await caller.say(talk, "with none left", 3)
            for _, writer in crowd:
                writer.close()
            async with calling(server.grpc, server.admin) as late:
                await late.say(talk, "with some again", 3)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
                await audit(late, [talk])
