"""The admin port: one TCP port that speaks gRPC and HTTP/1.

The first line of a connection tells which: HTTP/2 begins with ``PRI * HTTP/2.0``. Such a connection is handed, byte for
byte, to a gRPC server on a Unix socket that only this user can reach. Every other one is HTTP/1: ``/metrics``
(Prometheus text), ``/healthz`` (this process answers) and ``/readyz`` (calls are served). HTTP is up before the gRPC
server is, so a supervisor sees a server that is loading its model alive and not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

log = logging.getLogger(__name__)

_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
_MAX_HEAD: Final = 16 * 1024
_HEAD_TIMEOUT_S: Final = 10.0
_PIPE_CHUNK: Final = 1 << 16
_MAX_CONNECTIONS: Final = 256


class AdminPort:
    """The port. It listens from ``start`` to ``close``."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], str], grpc_socket: Path) -> None:
        """``ready`` says why calls are not served, "" when they are. ``grpc_socket`` need not exist yet."""
        self._registry = registry
        self._ready = ready
        self._grpc_socket = grpc_socket
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (found by the system when it was 0). Raises OSError when it cannot."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=_MAX_HEAD)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            # One too many is closed without an answer: anybody who reaches the port may connect.
            if len(self._connections) <= _MAX_CONNECTIONS:
                await self._serve(reader, writer)
        except (
            ConnectionError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ) as error:
            log.debug("admin connection ended: %s", error)
        except asyncio.CancelledError:
            # Only ``close`` cancels. Asyncio's own callback would report the cancellation as an error.
            log.debug("admin connection closed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: forwarded, or one HTTP request answered."""
        # Two time limits, one each for the first line and the rest: a gRPC connection passes only the first and then
        # stays open, while a client that sends its head byte by byte must not hold its place.
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            first = await reader.readuntil(b"\r\n")
        if first == _HTTP2_PREFACE:
            await self._forward(first, reader, writer)
            return
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            accept = await _accept_header(reader)
        status, content_type, body = self._answer(first, accept)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + (b"" if first.startswith(b"HEAD ") else body))
        await writer.drain()

    def _answer(self, request_line: bytes, accept: str) -> tuple[HTTPStatus, str, bytes]:
        method, _, rest = request_line.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        plain = "text/plain; charset=utf-8"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, plain, b"only GET\n"
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path == "/healthz":
            return HTTPStatus.OK, plain, b"ok\n"
        if path == "/readyz":
            problem = self._ready()
            if problem:
                return HTTPStatus.SERVICE_UNAVAILABLE, plain, f"{problem}\n".encode()
            return HTTPStatus.OK, plain, b"ok\n"
        return HTTPStatus.NOT_FOUND, plain, b"there is /metrics, /healthz and /readyz\n"

    async def _forward(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(str(self._grpc_socket))
        except OSError:
            return  # Not up yet: the client sees a closed connection, which is UNAVAILABLE.
        far_writer.write(first)  # The gRPC server has to see the preface too.
        pipes = {
            asyncio.create_task(_pipe(reader, far_writer)),
            asyncio.create_task(_pipe(far_reader, writer)),
        }
        try:
            # When either side ends, the connection is over: HTTP/2 has no use for half of one.
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.close()
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)


async def _accept_header(reader: asyncio.StreamReader) -> str:
    """Read the rest of the head; the value of ``Accept``. Raises LimitOverrunError when the head is too long."""
    accept = ""
    left = _MAX_HEAD
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        left -= len(line)
        if left < 0:
            raise asyncio.LimitOverrunError("head too long", _MAX_HEAD)
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "accept":
            accept = value.strip()
    return accept


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_PIPE_CHUNK):
            writer.write(data)
            await writer.drain()
