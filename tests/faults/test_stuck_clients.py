"""Clients that stand still, or do not read what they asked for: what they hold is let go, and others are served."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from grpc import aio

from pensieve.core import FinishReason
from pensieve.debug import child_environment
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc import grpc_server
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.faults.proxies import CuttingProxy, running
from support.service.service_rig import Rig, Streamed, encode, says, serving, spec

LIMIT_S = 40.0
"""Far beyond the times that are promised, and below the minute after which gRPC gives a silent peer up by itself."""
KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
QUICKER = 30
"""By so much, in the test: a silent client is noticed after 2.7 s instead of 80."""
FOX = "the quick brown fox jumps over the lazy dog, "
WORDS = encode(FOX)
TIMES = 3000
"""Then it is more than the client's side takes in unread, 64 KiB, and more than the sockets hold."""
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0),)
"""Of a client: else its side takes in megabytes that nobody has asked for, and no write is ever blocked."""
CLIENT = """
import sys
from pensieve.client import Client

with Client(sys.argv[1]) as client:
    for _ in client.create_session().stream("hi"):
        print("reads", flush=True)
"""


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():
            await asyncio.sleep(0.01)


@pytest.mark.fault(4)
async def test_a_client_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine still confirms what arrives: only the pings tell."""
    options = [
        (name, value // QUICKER if name in KEEPALIVE else value) for name, value in grpc_server.SERVER_OPTIONS
    ]
    monkeypatch.setattr(grpc_server, "SERVER_OPTIONS", tuple(options))
    async with serving(answer=None, door=AccessControl(None, Metrics()), disconnect_grace_s=0.2) as rig:
        command = [sys.executable, "-P", "-c", CLIENT, rig.target]
        process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE)
        try:
            generation = await rig.link.next_generation()
            generation.admit()
            generation.emit(*WORDS)
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"reads\n"
            process.send_signal(signal.SIGSTOP)
            await until(lambda: rig.conversations.turns.running == 0)
            assert generation.cancelled
        finally:
            process.kill()
            process.communicate()


async def stuck(rig: Rig, channel: aio.Channel, **fields: Any) -> tuple[Any, Any, str]:
    """A stream of which nothing but the first event is read, its generation, and its session."""
    name = await rig.create()
    stub = pensieve_pb2_grpc.ConversationServiceStub(channel)
    call = stub.StreamTurn(pb.StreamTurnRequest(session=name, turn=spec("hi")), **fields)
    generation = await rig.link.next_generation()
    generation.admit()
    assert (await call.read()).HasField("accepted")
    return call, generation, name


async def rest(call: Any) -> AsyncIterator[pb.StreamTurnResponse]:
    """What has not been read yet."""
    while (event := await call.read()) is not aio.EOF:
        yield event


async def pour(generation: Any) -> None:
    for _ in range(10):
        generation.emit(*(WORDS * (TIMES // 10)))
        await asyncio.sleep(0)


@pytest.mark.fault(7)
@pytest.mark.parametrize("how", ["cancel", "deadline", "death"])
async def test_a_blocked_write_ends_with_its_client(how: str) -> None:
    async with serving(answer=None) as rig:
        before = len(asyncio.all_tasks())
        proxy = CuttingProxy(int(rig.target.rpartition(":")[2]))
        timeout = 5.0 if how == "deadline" else None
        async with (
            running(proxy),
            aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=SMALL_WINDOW) as channel,
        ):
            call, generation, name = await stuck(rig, channel, timeout=timeout)
            await pour(generation)
            if how == "cancel":
                call.cancel()
            elif how == "death":
                await proxy.stop()
            await until(lambda: rig.conversations.turns.running == 0)
            assert generation.cancelled
            call.cancel()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        session = await rig.session(name)
        assert session.revision == 1 and not session.HasField("active_turn")
        rig.link.answer = lambda _: says("fine")
        assert (await rig.run(name, "and now?")).output.text == "fine"


@pytest.mark.fault(6)
async def test_many_that_do_not_read_hold_up_nobody() -> None:
    async with (
        serving(answer=None) as rig,
        aio.insecure_channel(rig.target, options=SMALL_WINDOW) as channel,
    ):
        slow = [await stuck(rig, channel) for _ in range(5)]
        for _, generation, _ in slow:
            await pour(generation)
            generation.finish(FinishReason.LENGTH, TIMES * len(WORDS))
        # Their turns end although nobody reads, and another is served meanwhile.
        await until(lambda: rig.conversations.turns.running == 0)
        rig.link.answer = lambda _: says("fine")
        assert (await rig.run(await rig.create(), "hi")).output.text == "fine"
        for call, _, name in slow:
            got = Streamed([event async for event in rest(call)])
            assert got.text == FOX * TIMES == got.completed.output.text
            assert len(got.deltas) < 12, "what is not read is kept once, and sent in few pieces"
            assert (await rig.session(name)).revision == 2
