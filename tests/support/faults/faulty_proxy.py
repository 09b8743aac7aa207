"""A TCP proxy on loopback that loses replies: the server has done the work, the client never hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

CHUNK = 1 << 16


class FaultyProxy:
    """Forwards connections to ``target_port``; ``lose`` decides per chunk of server data."""

    def __init__(self, target_port: int, *, seed: int = 0) -> None:
        self._target_port = target_port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.loss = 0.0
        """Chance that the next piece of reply is lost and its connection cut."""
        self.lost = 0
        self.down = False
        """Refuse new connections (they are accepted and closed at once)."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Cut every connection and wait until all is gone."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.close()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, lossy=False)),
            asyncio.create_task(self._pump(server_reader, writer, lossy=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, lossy: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(CHUNK):
                if lossy and self._random.random() < self.loss:
                    self.lost += 1
                    return
                sink.write(data)
                await sink.drain()


@contextlib.asynccontextmanager
async def faulty_proxy(target_port: int, *, seed: int = 0) -> AsyncIterator[FaultyProxy]:
    proxy = FaultyProxy(target_port, seed=seed)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
