"""TCP proxies on loopback that fail on purpose: one loses replies, one cuts a connection at an exact byte."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import TypeVar

PIECE = 1 << 16


class Proxy(abc.ABC):
    """Forwards connections to ``target_port``. A subclass says what becomes of the server's data in ``_pass_back``."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
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

    @abc.abstractmethod
    async def _pass_back(self, data: bytes, sink: asyncio.StreamWriter) -> bool:
        """Hand one piece of the server's data to the client; False cuts the connection."""

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
            asyncio.create_task(self._forth(reader, server_writer)),
            asyncio.create_task(self._back(server_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.close()
            writer.close()

    async def _forth(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE):
                sink.write(data)
                await sink.drain()

    async def _back(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while (data := await source.read(PIECE)) and await self._pass_back(data, sink):
                await sink.drain()


class FaultyProxy(Proxy):
    """Loses replies: the server has done the work, the client never hears of it."""

    def __init__(self, target_port: int, *, seed: int = 0) -> None:
        super().__init__(target_port)
        self._random = random.Random(seed)
        self.loss = 0.0
        """Chance that the next piece of reply is lost and its connection cut."""
        self.lost = 0

    async def _pass_back(self, data: bytes, sink: asyncio.StreamWriter) -> bool:
        if self._random.random() < self.loss:
            self.lost += 1
            return False
        sink.write(data)
        return True


class CuttingProxy(Proxy):
    """Passes everything on until ``cut_next_after``: then once, after so many bytes, both sides are closed."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._left: int | None = None
        self.cut = False
        """Whether the cut that was asked for last has happened."""

    def cut_next_after(self, size: int) -> None:
        """The connection that brings the ``size``-th byte from now on is cut right behind it."""
        self._left, self.cut = size, False

    async def _pass_back(self, data: bytes, sink: asyncio.StreamWriter) -> bool:
        if self._left is not None and len(data) >= self._left:
            sink.write(data[: self._left])
            self._left, self.cut = None, True
            await sink.drain()
            return False
        if self._left is not None:
            self._left -= len(data)
        sink.write(data)
        return True


AnyProxy = TypeVar("AnyProxy", bound=Proxy)


@contextlib.asynccontextmanager
async def running(proxy: AnyProxy) -> AsyncIterator[AnyProxy]:
    """The proxy, started; stopped at the end."""
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
