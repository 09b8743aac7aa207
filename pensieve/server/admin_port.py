"""The admin port: one TCP port that speaks gRPC and HTTP/1.

The first bytes of a connection tell which. HTTP/2 begins with ``PRI * HTTP/2.0``: such a connection is passed on, byte
for byte, to a gRPC server on a Unix socket that only this user can reach. uvicorn serves every other one: ``/metrics``
(Prometheus text), ``/healthz`` (this process answers), ``/readyz`` (calls are served) and, with an HTTP door,
``/readyz/http`` (it takes calls); and what the web page needs (``pensieve.server.page``). HTTP is up before the gRPC
server is, so a supervisor sees a server that is loading its model alive and not ready.

A connection (``_Connection``, then ``_Relay``; uvicorn calls the former, nothing else changes their state)::

    new ── the preface ──> connecting ── to the socket ──> relayed ── either side ends ──> closed
     └──── other bytes ──> head ── it is complete ──> answering ── answered ──> closed
    new, head: closed after ``HEAD_S``, and when the head is longer than ``MAX_HEAD``
    any:       closed when it is the most silent of its kind and a newer one needs its place

No caller is refused for want of room: a stranger may open any number of connections, and a supervisor must still get
an answer. Each answer ends its connection, so a head is read once, within one time limit.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from pathlib import Path
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pensieve.server.bugs import report_bug
from pensieve.server.gateway import Gateway
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.page.web import WebPage

PREFACE: Final = b"PRI * HTTP/2.0\r\n"
MAX_HEAD: Final = 16 * 1024
HEAD_S: Final = 5.0
MAX_HTTP: Final = 192
MAX_GRPC: Final = 64
_BACKLOG: Final = 512


class AdminPort:
    """The port, and its answers over HTTP as an ASGI application. It listens from ``start`` to ``close``."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: HealthMonitor,
        grpc_socket: Path,
        door: Gateway | None = None,
        page: WebPage | None = None,
    ) -> None:
        """``grpc_socket`` need not exist yet."""
        self._registry = registry
        self._health = health
        self._door = door
        self._page = page
        self._server: asyncio.Server | None = None
        self.grpc_socket = grpc_socket
        self.http, self.grpc = _Places(MAX_HTTP), _Places(MAX_GRPC)
        self.config = uvicorn.Config(
            self,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is no HTTP is the caller's mistake
            access_log=False,
            proxy_headers=False,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (found by the system when it was 0). Raises OSError when it cannot."""
        made = functools.partial(_Connection, self)
        self._server = await asyncio.get_running_loop().create_server(made, host, port, backlog=_BACKLOG)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is not None:
            self._server.close()
        self.http.close()
        self.grpc.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. It is cancelled when its caller has gone."""
        try:
            response = await self._answer(Request(scope))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
        except asyncio.CancelledError:
            pass  # The caller has gone. uvicorn would log the cancellation as an error.
        except Exception as error:
            await PlainTextResponse(f"{report_bug(error, 'the admin port').message}\n", 500)(
                scope, receive, send
            )

    async def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET\n", 405)
        path = request.scope["raw_path"].decode("latin-1")
        if path == "/metrics":
            if self._door is not None:
                await self._door.refresh()
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            return Response(encode(self._registry), headers={"Content-Type": content_type})
        if path == "/healthz":
            return PlainTextResponse("ok\n")
        if path == "/readyz":
            return _readiness(self._health.problem)
        if path == "/readyz/http" and self._door is not None:
            return _readiness(self._door.problem)
        if self._page is not None and (answer := await self._page.answer(path, request)) is not None:
            return answer
        return PlainTextResponse("there is / for a browser, /metrics, /healthz and /readyz\n", 404)


def _readiness(problem: str) -> Response:
    return PlainTextResponse(f"{problem or 'ok'}\n", 503 if problem else 200)


class _Places:
    """The connections of one protocol. When there is one too many, the most silent one is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: OrderedDict[asyncio.Transport, None] = OrderedDict()
        """The most silent one first."""

    def heard(self, connection: asyncio.Transport) -> None:
        """Something came or went. A new connection takes a place with this."""
        self._open[connection] = None
        self._open.move_to_end(connection)
        if len(self._open) > self._most:
            dropped, _ = self._open.popitem(last=False)
            dropped.abort()

    def left(self, connection: asyncio.Transport) -> None:
        self._open.pop(connection, None)

    def close(self) -> None:
        """Drop all."""
        for connection in self._open:
            connection.abort()


class _Connection(HttpToolsProtocol):
    """HTTP/1 as uvicorn speaks it, until the first bytes are those of HTTP/2."""

    def __init__(self, port: AdminPort) -> None:
        # A state of its own, so that ``tasks`` are those of this connection.
        super().__init__(port.config, ServerState(), {})
        self._port = port
        self._places = port.http
        self._first: bytes | None = b""
        """The first bytes as long as they can be those of either protocol, then None."""
        self._head_bytes = 0
        self._asked = False
        """The head is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._places.heard(transport)
        self._limit = self.loop.call_later(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._places.heard(self.transport)
        if self._first is not None:
            data = self._first + data
            if len(data) < len(PREFACE) and PREFACE.startswith(data):
                self._first = data
                return
            self._first = None
            if data.startswith(PREFACE):
                self._limit.cancel()
                self.transport.pause_reading()
                self._places.left(self.transport)
                self._places = self._port.grpc
                self._places.heard(self.transport)
                self.tasks.add(self.loop.create_task(self._pass_on(data)))
                return
        super().data_received(data)
        self._head_bytes += len(data)
        if not self._asked and self._head_bytes > MAX_HEAD:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._asked = True
        self._limit.cancel()
        super().on_headers_complete()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the answer
        """A caller that says no more may still wait for its answer."""
        return self._asked

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limit.cancel()
        self._places.left(self.transport)
        for task in self.tasks:
            task.cancel()

    async def _pass_on(self, first: bytes) -> None:
        near, places = self.transport, self._places
        try:
            far, _ = await self.loop.create_unix_connection(
                lambda: _Relay(near, near, places), str(self._port.grpc_socket)
            )
        except OSError:
            near.close()  # Not up yet: the client sees a closed connection, which is UNAVAILABLE.
            return
        far.write(first)
        near.set_protocol(_Relay(far, near, places))
        near.resume_reading()


class _Relay(asyncio.Protocol):
    """One side of a connection that is passed on: what comes in here goes out on the other side.

    When either side ends, the connection is over: HTTP/2 has no use for half of one.
    """

    def __init__(self, other: asyncio.Transport, near: asyncio.Transport, places: _Places) -> None:
        """``near``: the caller's side, which has one of the ``places``."""
        self._other = other
        self._near = near
        self._places = places

    def data_received(self, data: bytes) -> None:
        self._places.heard(self._near)
        self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.left(self._near)
        if self._other is self._near:
            self._other.close()
        else:
            self._other.abort()  # ``close`` would wait for as long as the far side does not read
