"""Whom the service sees: how many connections a credential has, and that callers without one are told apart.

Where a caller without a key calls from, only a server's own door may tell.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import AsyncStream

from pensieve.config import DoorSettings
from pensieve.http.app import make_app
from pensieve.http.common import callers
from pensieve.http.run import ManagedServer, running
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import FORWARDED_ADDRESS_KEY
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.server.rpc.service import ConversationService
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.http import http_rig
from support.http.http_rig import HttpRig, door
from support.service.service_rig import Rig, serving

BEARER = http_rig.BearerTenant
QUESTIONS = 1
"""Connection on which the door asks about keys."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Connections from which the service was called."""
    seen: set[str] = set()

    class Noting(BEARER):
        def check(self, method: str, metadata: Any, peer: Any = "") -> Any:
            seen.add(peer._context.peer())  # with the port, which it tells nobody
            return super().check(method, metadata, peer)

    monkeypatch.setattr(http_rig, "BearerTenant", Noting)
    monkeypatch.setattr(callers, "REQUESTS_PER_CLIENT", 2)
    return seen


async def hold(rig: HttpRig, count: int) -> list[AsyncStream[Any]]:
    """So many answers under way, of which the engine says nothing yet."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    create: Any = rig.client.chat.completions.create
    return list(await asyncio.wait_for(asyncio.gather(*(create(**asked) for _ in range(count))), 20))


async def test_a_caller_with_many_requests_gets_more_connections(peers: set[str]) -> None:
    """A server takes so many calls on one connection; what is beyond would wait for the end of another's answer."""
    async with door(answer=None) as rig:
        streams = await hold(rig, 5)
        assert len(peers) == 3 + QUESTIONS, peers
        for stream in streams:
            await stream.close()
        while rig.service.conversations.turns.running:
            await asyncio.sleep(0.01)
        for stream in await hold(rig, 5):
            await stream.close()
        assert len(peers) == 3 + QUESTIONS, "connections that are free are used again"


async def test_connections_beyond_the_limit_are_closed_when_nobody_uses_them(peers: set[str]) -> None:
    async with door(answer=None, max_callers=1) as rig:
        for _ in range(2):
            for stream in await hold(rig, 5):
                await stream.close()
            while rig.service.conversations.turns.running:
                await asyncio.sleep(0.01)
            gc.collect()  # a call of grpc.aio that was cancelled is in a cycle with its error, and holds its channel
        assert len(peers) > 3 + QUESTIONS


async def test_requests_on_one_connection_leave_room_for_their_other_calls() -> None:
    """Of the calls that a server takes on one connection (256) a request may make two at a time."""
    assert 2 * callers.REQUESTS_PER_CLIENT <= 256


MOST = 10
OF_ONE = 8
"""Of so many calls at once one caller gets four fifths."""
OTHER = {"X-Forwarded-For": "203.0.113.9"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@dataclass
class Flooded:
    """A service that a caller at 127.0.0.1 takes all that one caller gets of, through the door."""

    service: Rig
    server: ManagedServer
    url: str

    async def status(self, address: str = "127.0.0.1", **headers: str) -> int:
        """What a call from that address is answered."""
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(transport=transport, timeout=20) as client:
            return (await client.post(f"{self.url}/v1/conversations", json={}, headers=headers)).status_code


@asynccontextmanager
async def flooded(folder: Path, *proxies: str) -> AsyncIterator[Flooded]:
    """``proxies``: who may tell the door for whom they call."""
    entry = AccessControl(None, Metrics())
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(serving(answer=None, door=entry, max_in_flight=MOST))
        private, target = entry.make_private_server(), f"unix:{folder / 'http'}"
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationService(rig.conversations), private
        )
        private.add_insecure_port(target)
        await private.start()
        stack.push_async_callback(private.stop, None)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        settings = DoorSettings(target, vouches=True, patience_s=0.1, proxies=proxies)
        server = await stack.enter_async_context(running(make_app(settings), listener, None, proxies))
        stack.callback(setattr, server, "force_exit", True)
        stack.callback(setattr, server, "should_exit", True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        for number in range(OF_ONE):
            await stack.enter_async_context(client.stream("POST", f"{url}/v1/chat/completions", json=CHAT))
            while rig.conversations.turns.running <= number:
                await asyncio.sleep(0.005)
        yield Flooded(rig, server, url)


@pytest.mark.fault(60)
async def test_one_that_floods_leaves_places_to_others(tmp_path: Path) -> None:
    async with flooded(tmp_path) as rig:
        assert await rig.status() == 429
        assert await rig.status("127.0.0.2") == 200
        assert await rig.status(**OTHER) == 429, "who is no proxy says nothing of others"


@pytest.mark.fault(60)
async def test_a_proxy_that_is_named_says_for_whom_it_calls(tmp_path: Path) -> None:
    async with flooded(tmp_path, "127.0.0.1") as rig:
        assert await rig.status(**OTHER) == 200
        assert await rig.status() == 429
        assert await rig.status("127.0.0.2", **{"X-Forwarded-For": "127.0.0.1"}) == 200, "it is no proxy"
        assert await rig.status(**{"X-Forwarded-For": "nonsense"}) == 200, "it has the limits of nobody"


async def test_who_calls_over_grpc_has_the_address_of_its_connection(tmp_path: Path) -> None:
    entry = AccessControl(None, Metrics())
    async with serving(answer=None, door=entry, max_in_flight=1) as rig:
        api = pensieve_pb2_grpc.ConversationServiceStub(rig.channel)
        seen: set[str] = set()
        entered = entry._interceptors[0]._calls.admit

        def noted(call: Any) -> Any:
            seen.add(call.caller)
            return entered(call)

        entry._interceptors[0]._calls.admit = noted  # type: ignore[method-assign]
        await api.GetServerInfo(pb.GetServerInfoRequest(), metadata=[(FORWARDED_ADDRESS_KEY, "203.0.113.9")])
        assert seen == {"@127.0.0.1"}


async def test_events_leave_at_once(tmp_path: Path) -> None:
    """A connection without the option keeps a small event back until the one before it is acknowledged: 40 ms."""
    async with flooded(tmp_path) as rig:
        connections = [one.transport.get_extra_info("socket") for one in rig.server.server_state.connections]
        assert connections and all(
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in connections
        )
