"""Sessions keep to their server, and only those of a server that leaves move: the real HAProxy, as it is deployed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import grpc.aio
import pytest

from pensieve.client import AsyncClient
from pensieve.core import FinishReason
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.replicas.haproxy import HaproxyProcess, haproxy
from support.service.service_rig import Rig, encode, serving

pytestmark = pytest.mark.haproxy
SESSIONS = 30


@dataclass
class Replica:
    """A server in this process, and what its ``/readyz`` says."""

    rig: Rig
    admin: str = ""
    status: HTTPStatus = HTTPStatus.OK

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"GET /readyz" in await reader.readuntil(b"\r\n\r\n")
        writer.write(
            f"HTTP/1.1 {self.status.value} x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def routed(folder: Path) -> AsyncIterator[tuple[HaproxyProcess, dict[str, Replica], AsyncClient]]:
    """Three servers on one store behind the proxy, and a client of it."""
    store, replicas = MemoryStore(), {}
    async with AsyncExitStack() as stack:
        for name in "abc":
            rig = await stack.enter_async_context(serving(answer=None, store=store, replica=name))
            replica = replicas[name] = Replica(rig)
            health = await stack.enter_async_context(
                await asyncio.start_server(replica.answer, "127.0.0.1", 0)
            )
            replica.admin = "127.0.0.1:{1}".format(*health.sockets[0].getsockname())
        addresses = [(replica.rig.target, replica.admin) for replica in replicas.values()]
        proxy = stack.enter_context(haproxy(folder, addresses))
        await asyncio.to_thread(proxy.wait_for, a="UP L7OK", b="UP L7OK", c="UP L7OK")
        client = await stack.enter_async_context(AsyncClient(proxy.address))
        yield proxy, replicas, client


async def _homes(client: AsyncClient, names: Iterable[str]) -> dict[str, str]:
    """Which server answers for each session."""
    found = await asyncio.gather(*(client.session(name).refresh(residency=True) for name in names))
    return {info.name: info.residency.replica for info in found if info.residency is not None}


async def _homes_by_message(address: str, names: Iterable[str]) -> dict[str, str]:
    """The same for a client that sends no header: the name in the message has to do."""
    homes = {}
    async with grpc.aio.insecure_channel(address) as channel:
        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        for name in names:
            request = pb.GetSessionRequest(name=name, view=pb.SESSION_VIEW_FULL)
            homes[name] = (await api.GetSession(request, timeout=20)).session.residency.replica
    return homes


async def test_only_the_sessions_of_a_server_that_leaves_move(tmp_path: Path) -> None:
    async with routed(tmp_path) as (proxy, replicas, client):
        names = [(await client.create_session()).name for _ in range(SESSIONS)]
        homes = await _homes(client, names)
        assert set(homes) == set(names) and set(homes.values()) == set(replicas), "a server has no sessions"
        async with AsyncClient(proxy.address) as another:
            assert await _homes(another, names) == homes
        assert await _homes_by_message(proxy.address, names) == homes
        replicas["b"].status = HTTPStatus.SERVICE_UNAVAILABLE
        await asyncio.to_thread(proxy.wait_for, b="DOWN")
        without = await _homes(client, names)
        assert {name for name in names if without[name] != homes[name]} == {
            name for name in names if homes[name] == "b"
        }
        assert "b" not in without.values()
        assert await _homes_by_message(proxy.address, names) == without
        replicas["b"].status = HTTPStatus.OK
        await asyncio.to_thread(proxy.wait_for, b="UP")
        assert await _homes(client, names) == homes


@pytest.mark.fault(32)
async def test_a_stream_goes_on_when_its_server_begins_to_drain(tmp_path: Path) -> None:
    """The check fails in the midst of it; the stream is not cut, and the next call goes elsewhere."""
    async with routed(tmp_path) as (proxy, replicas, client):
        chat = await client.create_session()
        (home,) = (await _homes(client, [chat.name])).values()
        stream = chat.stream("hi")
        first = asyncio.create_task(anext(stream))
        generation = await replicas[home].rig.link.next_generation()
        generation.admit()
        generation.emit(*encode("the fox"))
        assert (await first).text
        replicas[home].status = HTTPStatus.SERVICE_UNAVAILABLE
        await asyncio.to_thread(proxy.wait_for, **{home: "DOWN"})
        (elsewhere,) = (await _homes(client, [chat.name])).values()
        assert elsewhere != home
        generation.emit(*encode(" jumps"))
        generation.finish(FinishReason.EOS, len(encode("the fox jumps")))
        turn = await stream.finish()
        assert (turn.text, stream.resumes) == ("the fox jumps", 0)
