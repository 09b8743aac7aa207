"""Two servers, one Redis and HAProxy before them: real processes, as they are deployed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.client import AsyncClient, AsyncSession, RetryPolicy, Turn
from support.faults.fault_client import Caller, Talk, calling, check_history, get_turn
from support.faults.fault_server import FaultServer, fault_server
from support.replicas.haproxy import HaproxyProcess, haproxy
from support.store.redis_server import free_port, redis_server

OUTPUTS = 12
PATIENT = RetryPolicy(max_wait_s=90.0)
"""Machines that run tests are slow; nobody waits longer than a server takes to start."""


@dataclass
class Service:
    """The servers, and what is before them."""

    servers: list[FaultServer]
    proxy: HaproxyProcess

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """A client of the proxy, with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with AsyncClient(self.proxy.address, retry=PATIENT, options=options) as client:
            yield client

    @asynccontextmanager
    async def direct(self, number: int) -> AsyncIterator[Caller]:
        """Stubs on one server."""
        server = self.servers[number]
        async with calling(server.grpc, server.admin) as caller:
            yield caller

    async def restart(self, number: int, *, gently: bool) -> None:
        """End a server, by SIGTERM or SIGKILL, start it again and wait until the proxy uses it."""
        server, name = self.servers[number], "ab"[number]
        server.send(signal.SIGTERM if gently else signal.SIGKILL)
        status = await asyncio.to_thread(server.wait)
        assert status == (0 if gently else -signal.SIGKILL), server.log
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(self.proxy.wait_for, **{name: "UP L7OK"})


@asynccontextmanager
async def service(
    folder: Path, store: str | None = None, *, pace_s: float = 0.0, **options: object
) -> AsyncIterator[Service]:
    """Running, and seen as running by the proxy. ``store``: URL of one to use; else a Redis of its own is started."""
    async with AsyncExitStack() as stack:
        if store is None:
            store = stack.enter_context(redis_server()).url
        servers = [
            stack.enter_context(
                fault_server(
                    folder / name,
                    store,
                    pace_s=pace_s,
                    listen=f"127.0.0.1:{free_port()}",
                    admin=f"127.0.0.1:{free_port()}",
                    **options,
                )
            )
            for name in "ab"
        ]
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        proxy = stack.enter_context(haproxy(folder, [(server.grpc, server.admin) for server in servers]))
        await asyncio.to_thread(proxy.wait_for, a="UP L7OK", b="UP L7OK")
        yield Service(servers, proxy)


@dataclass
class Talker:
    """One conversation by the SDK, and what it was told."""

    session: AsyncSession
    told: list[Turn] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Longest silence of each turn, in seconds."""
    resumes: int = 0
    """How often a turn had to be sent again."""

    @classmethod
    async def begin(cls, client: AsyncClient) -> Talker:
        return cls(await client.create_session(system_prompt="be brief"))

    async def say(self, text: str, outputs: int = OUTPUTS) -> Turn:
        """One turn. What is on the screen at its end has to be what is in history."""
        loop = asyncio.get_running_loop()
        ids: list[int] = []
        heard, pause = loop.time(), 0.0
        stream = self.session.stream(text, max_output_tokens=outputs, ignore_eos=True, temperature=0.0)
        async for piece in stream:
            pause, heard = max(pause, loop.time() - heard), loop.time()
            if piece.restarted:
                ids.clear()
            else:
                assert piece.token_offset == len(ids), "a token was lost or doubled"
                ids += piece.token_ids
        turn = stream.turn
        self.resumes += stream.resumes
        assert len(ids) == turn.usage.output_tokens == outputs
        self.told.append(turn)
        self.pauses.append(max(pause, loop.time() - heard))
        return turn

    async def check(self, caller: Caller) -> None:
        """History holds every turn that was told, once, at its place, and is exact."""
        talk = Talk(self.session.name)
        for turn in self.told:
            stored = await get_turn(caller, talk, turn.request_id)
            assert (stored.revision, stored.output.text) == (turn.revision, turn.text)
            talk.acked[turn.request_id] = stored
        await check_history(caller, talk)
