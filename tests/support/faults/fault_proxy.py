"""A TCP proxy on loopback that cuts a connection in the middle of what the server sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE = 1 << 16


class CuttingProxy:
    """Passes everything on until ``cut_next_after``: then once, after so many bytes, both sides are closed."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._left: int | None = None
        self.port = 0
        self.cut = False
        """Whether the cut that was asked for last has happened."""

    def cut_next_after(self, size: int) -> None:
        """The connection that brings the ``size``-th byte from now on is cut right behind it."""
        self._left, self.cut = size, False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer)),
            asyncio.create_task(self._pump_counted(server_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE):
                sink.write(data)
                await sink.drain()

    async def _pump_counted(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE):
                if self._left is not None and len(data) >= self._left:
                    sink.write(data[: self._left])
                    self._left, self.cut = None, True
                    await sink.drain()
                    return
                if self._left is not None:
                    self._left -= len(data)
                sink.write(data)
                await sink.drain()


@contextlib.asynccontextmanager
async def cutting_proxy(target_port: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
