"""TCP connections between clients and a server that can be cut, held up and made to swallow what passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE = 1 << 16


class Wire:
    """One connection: two pumps, and what is wrong with them."""

    def __init__(self, wires: Wires, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._wires = wires
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.left: int | None = None
        """Bytes of the server's that still pass before the cut."""
        self.deaf = False
        """Half-open: what comes from either side is lost."""
        self.free = asyncio.Event()
        """Cleared: what comes waits."""
        self.free.set()

    async def carry(self) -> None:
        """Until either side ends it, or ``cut``."""
        try:
            with contextlib.suppress(OSError):
                await self._carry()
        finally:
            self.cut()

    async def _carry(self) -> None:
        client_reader, client_writer = self._client
        self._server = await asyncio.open_connection("127.0.0.1", self._wires.target)
        server_reader, server_writer = self._server
        pumps = [
            asyncio.create_task(self._forth(client_reader, server_writer)),
            asyncio.create_task(self._back(server_reader, client_writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def cut(self) -> None:
        """At once, and with a reset on both sides."""
        for _, writer in filter(None, (self._client, self._server)):
            writer.transport.abort()

    async def _forth(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(PIECE):
            await self.free.wait()
            if not self.deaf:
                sink.write(data)
                await sink.drain()

    async def _back(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(PIECE):
            await self.free.wait()
            if self.left is not None:
                data, self.left = data[: self.left], self.left - len(data)
            if not self.deaf and data:
                sink.write(data)
                await sink.drain()
            if self.left is not None and self.left <= 0:
                self._wires.cuts += 1
                return


class Wires:
    """All connections to one server. ``target`` is its port; 0 while there is none."""

    def __init__(self) -> None:
        self.target = 0
        self.port = 0
        self.cuts = 0
        """Connections that were cut by ``Wire.left``."""
        self.open: dict[Wire, asyncio.Task[None]] = {}

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.target:
            writer.transport.abort()
            return
        wire = Wire(self, reader, writer)
        task = asyncio.create_task(wire.carry())
        self.open[wire] = task
        task.add_done_callback(lambda _: self.open.pop(wire, None))

    def cut(self) -> int:
        """Cut all; how many there were."""
        for wire in self.open:
            wire.cut()
        return len(self.open)


@contextlib.asynccontextmanager
async def wired() -> AsyncIterator[Wires]:
    """Wires that listen on a port of their own."""
    wires = Wires()
    server = await asyncio.start_server(wires.accepted, "127.0.0.1", 0)
    wires.port = int(server.sockets[0].getsockname()[1])
    try:
        yield wires
    finally:
        server.close()
        tasks = list(wires.open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        await asyncio.sleep(0)  # for the transports that were cut
