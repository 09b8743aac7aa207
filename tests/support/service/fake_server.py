"""Runs the fake ConversationService: in a test's own loop, or in a thread for the blocking client and programs."""

from __future__ import annotations

import asyncio
import threading

import grpc.aio

from pensieve.v1 import pensieve_pb2_grpc
from support.service.fake_conversations import FakeConversations


async def start_fake(fake: FakeConversations) -> tuple[grpc.aio.Server, str]:
    """A running server in this loop, and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class FakeServerThread:
    """The fake in a loop of its own, for the blocking client and for other programs."""

    def __init__(self) -> None:
        self.fake = FakeConversations()
        self.target = ""
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="fake-server")

    async def _main(self) -> None:
        server, self.target = await start_fake(self.fake)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._up.set()
        await self._stop.wait()
        await server.stop(grace=None)

    def __enter__(self) -> FakeServerThread:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
