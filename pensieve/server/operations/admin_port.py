"""The admin port: one TCP port that speaks gRPC and HTTP/1.

The first line of a connection tells which: HTTP/2 begins with ``PRI * HTTP/2.0``. Such a connection is handed, byte for
byte, to a gRPC server on a Unix socket that only this user can reach. Every other one is HTTP/1: ``/metrics``
(Prometheus text), ``/healthz`` (this process answers), ``/readyz`` (calls are served) and, with an HTTP door,
``/readyz/http`` (it takes calls); and what the web page needs (``pensieve.server.page``). HTTP is up before the gRPC
server is, so a supervisor sees a server that is loading its model alive and not ready.

Nobody is refused for want of room: who reaches the port may open as many connections as they like, and a supervisor has
to get an answer all the same. Of one connection too many, the one that has been silent for longest is dropped. The two
protocols have places of their own; a head comes at once or within ``_HEAD_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

log = logging.getLogger(__name__)

_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
_MAX_HEAD: Final = 16 * 1024
_HEAD_TIMEOUT_S: Final = 5.0
_PIPE_CHUNK: Final = 1 << 16
_MAX_HTTP: Final = 192
_MAX_GRPC: Final = 64
_BACKLOG: Final = 512


class HttpState(Protocol):
    """What the port tells of the HTTP door."""

    @property
    def problem(self) -> str:
        """Why it takes no calls; "" when it does."""
        ...

    async def refresh(self) -> None:
        """Bring its share of the registry up to date."""
        ...


class AdminAnswer(NamedTuple):
    """One answer over HTTP."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class PageAnswers(Protocol):
    """The web page, as the port asks it."""

    async def answer(self, target: str, headers: Mapping[str, str], address: str) -> AdminAnswer | None:
        """The answer to a GET, by names of headers in lower case; None: it is not the page's to answer."""
        ...


class _Connection:
    """One connection and the task that serves it."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.heard()

    def heard(self) -> None:
        """Something came or went."""
        self.heard_at = asyncio.get_running_loop().time()


class _Places:
    """The connections of one protocol."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.connections: set[_Connection] = set()

    def add(self, connection: _Connection) -> None:
        """Take it in; the most silent one goes when it is one too many."""
        if len(self.connections) >= self._most:
            dropped = min(self.connections, key=lambda one: one.heard_at)
            self.connections.discard(dropped)
            dropped.task.cancel()
        self.connections.add(connection)

    def discard(self, connection: _Connection) -> None:
        self.connections.discard(connection)


class AdminPort:
    """The port. It listens from ``start`` to ``close``."""

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], str],
        grpc_socket: Path,
        http: HttpState | None = None,
        page: PageAnswers | None = None,
    ) -> None:
        """``ready`` says why calls are not served, "" when they are. ``grpc_socket`` need not exist yet."""
        self._page = page
        self._registry = registry
        self._ready = ready
        self._grpc_socket = grpc_socket
        self._door = http
        self._server: asyncio.Server | None = None
        self._http = _Places(_MAX_HTTP)
        self._grpc = _Places(_MAX_GRPC)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (found by the system when it was 0). Raises OSError when it cannot."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=_MAX_HEAD, backlog=_BACKLOG)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is not None:
            self._server.close()
        tasks = [one.task for places in (self._http, self._grpc) for one in places.connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        self._http.add(connection)
        try:
            await self._serve(connection, reader, writer)
        except (
            ConnectionError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ) as error:
            log.debug("admin connection ended: %s", error)
        except asyncio.CancelledError:
            # ``close`` or a newer connection. Asyncio's own callback would report the cancellation as an error.
            log.debug("admin connection closed")
        finally:
            self._http.discard(connection)
            self._grpc.discard(connection)
            writer.close()

    async def _serve(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection: forwarded, or one HTTP request answered."""
        # Two time limits, one each for the first line and the rest: a gRPC connection passes only the first and then
        # stays open, while a client that sends its head byte by byte must not hold its place.
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            first = await reader.readuntil(b"\r\n")
        if first == _HTTP2_PREFACE:
            self._http.discard(connection)
            self._grpc.add(connection)
            await self._forward(first, connection, reader, writer)
            return
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            headers = await _headers(reader)
        if self._door is not None and b" /metrics" in first:
            await self._door.refresh()
        method, _, rest = first.decode("latin-1").partition(" ")
        target = rest.partition(" ")[0]
        answer = None
        if self._page is not None and method in ("GET", "HEAD"):
            peer = writer.get_extra_info("peername")
            answer = await self._page.answer(target, headers, str(peer[0]) if peer else "")
        if answer is None:
            answer = AdminAnswer(*self._answer(method, target.partition("?")[0], headers.get("accept", "")))
        head = "".join(
            f"{name}: {value}\r\n"
            for name, value in (
                ("Content-Type", answer.content_type),
                ("Content-Length", str(len(answer.body))),
                ("Connection", "close"),
                *answer.headers,
            )
        )
        status_line = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        writer.write(f"{status_line}{head}\r\n".encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()

    def _answer(self, method: str, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        plain = "text/plain; charset=utf-8"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, plain, b"only GET\n"
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path == "/healthz":
            return HTTPStatus.OK, plain, b"ok\n"
        if path == "/readyz" or (path == "/readyz/http" and self._door is not None):
            problem = self._ready() if self._door is None or path == "/readyz" else self._door.problem
            if problem:
                return HTTPStatus.SERVICE_UNAVAILABLE, plain, f"{problem}\n".encode()
            return HTTPStatus.OK, plain, b"ok\n"
        return HTTPStatus.NOT_FOUND, plain, b"there is / for a browser, /metrics, /healthz and /readyz\n"

    async def _forward(
        self,
        first: bytes,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(str(self._grpc_socket))
        except OSError:
            return  # Not up yet: the client sees a closed connection, which is UNAVAILABLE.
        far_writer.write(first)  # The gRPC server has to see the preface too.
        pipes = {
            asyncio.create_task(_pipe(connection, reader, far_writer)),
            asyncio.create_task(_pipe(connection, far_reader, writer)),
        }
        try:
            # When either side ends, the connection is over: HTTP/2 has no use for half of one.
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.close()
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    """Read the rest of the head; its fields by name, lower case. Raises LimitOverrunError when it is too long."""
    headers: dict[str, str] = {}
    left = _MAX_HEAD
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        left -= len(line)
        if left < 0:
            raise asyncio.LimitOverrunError("head too long", _MAX_HEAD)
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


async def _pipe(connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_PIPE_CHUNK):
            connection.heard()
            writer.write(data)
            await writer.drain()
