"""The admin port: one TCP port that speaks gRPC and HTTP/1.

The first bytes of a connection decide. HTTP/2 begins with ``PRI * HTTP/2.0``: such a connection is relayed, byte for
byte, to a gRPC server on a Unix socket that only this user can reach. uvicorn serves the others: ``/metrics``
(Prometheus text), ``/healthz`` (this process answers), ``/readyz`` (calls are served), with an HTTP door
``/readyz/http`` (the door takes calls), and the web page (``pensieve.server.page``). HTTP starts before the gRPC
server, so a supervisor sees a server that is loading its model as alive and not ready.

States of a connection (``_Connection``, then ``_Relay``; uvicorn calls the former, nothing else changes the state)::

    new ── the preface ──> connecting ── to the socket ──> relayed ── either side ends ──> closed
     └──── other bytes ──> head ── it is complete ──> answering ── answered ──> closed
    new, head: closed after ``HEAD_S``, and when the head is longer than ``MAX_HEAD``
    any:       closed when it is the most idle of its kind and a newer one needs its place

Connections are never refused for lack of room: anyone may open any number of them, and a supervisor must still get an
answer. Each answer ends its connection, so one head is read per connection, within one time limit.
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

from pensieve.server.failures import report_bug
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
    """The port, and the ASGI application behind it. Listens from ``start`` to ``close``."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: HealthMonitor,
        grpc_socket: Path,
        door: Gateway | None = None,
        page: WebPage | None = None,
    ) -> None:
        self._registry = registry
        self._health = health
        self._door = door
        self._page = page
        self._server: asyncio.Server | None = None
        self.grpc_socket = grpc_socket
        self.http, self.grpc = _ConnectionLimit(MAX_HTTP), _ConnectionLimit(MAX_GRPC)
        self.config = uvicorn.Config(
            self,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # malformed HTTP is the caller's mistake
            access_log=False,
            proxy_headers=False,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; port 0 lets the system choose. Raises OSError."""
        # Else the first connection loads it. Should that fail for want of descriptors, uvloop never accepts again.
        self.config.load()
        make_connection = functools.partial(_Connection, self)
        self._server = await asyncio.get_running_loop().create_server(
            make_connection, host, port, backlog=_BACKLOG
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.http.close()
        self.grpc.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Cancelled when the caller disconnects."""
        try:
            response = await self._answer(Request(scope))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
        except asyncio.CancelledError:
            pass  # the caller has gone; uvicorn would log the cancellation as an error
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
        return PlainTextResponse("not found; there are /, /metrics, /healthz and /readyz\n", 404)


def _readiness(problem: str) -> Response:
    return PlainTextResponse(f"{problem or 'ok'}\n", 503 if problem else 200)


class _ConnectionLimit:
    """The connections of one protocol. Beyond the limit, the most idle one is aborted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[asyncio.Transport, None] = OrderedDict()
        """The most idle connection first."""

    def touch(self, connection: asyncio.Transport) -> None:
        """Record traffic on a connection. The first call adds it."""
        self._open[connection] = None
        self._open.move_to_end(connection)
        if len(self._open) > self._limit:
            dropped, _ = self._open.popitem(last=False)
            dropped.abort()

    def remove(self, connection: asyncio.Transport) -> None:
        self._open.pop(connection, None)

    def close(self) -> None:
        for connection in self._open:
            connection.abort()


class _Connection(HttpToolsProtocol):
    """HTTP/1 as uvicorn speaks it, unless the first bytes are the HTTP/2 preface."""

    def __init__(self, port: AdminPort) -> None:
        # Its own ServerState, so that ``tasks`` holds only this connection's tasks.
        super().__init__(port.config, ServerState(), {})
        self._port = port
        self._limit = port.http
        self._prefix: bytes | None = b""
        """The first bytes while they may still be the preface, then None."""
        self._head_bytes = 0
        self._head_complete = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._limit.touch(transport)
        self._head_timer = self.loop.call_later(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._limit.touch(self.transport)
        if self._prefix is not None:
            data = self._prefix + data
            if len(data) < len(PREFACE) and PREFACE.startswith(data):
                self._prefix = data
                return
            self._prefix = None
            if data.startswith(PREFACE):
                self._head_timer.cancel()
                self.transport.pause_reading()
                self._limit.remove(self.transport)
                self._limit = self._port.grpc
                self._limit.touch(self.transport)
                self.tasks.add(self.loop.create_task(self._start_relay(data)))
                return
        super().data_received(data)
        self._head_bytes += len(data)
        if not self._head_complete and self._head_bytes > MAX_HEAD:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._head_complete = True
        self._head_timer.cancel()
        super().on_headers_complete()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the answer
        """Keep a half-closed connection open while its caller waits for the answer."""
        return self._head_complete

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer.cancel()
        self._limit.remove(self.transport)
        for task in self.tasks:
            task.cancel()

    async def _start_relay(self, first: bytes) -> None:
        near, limit = self.transport, self._limit
        try:
            far, _ = await self.loop.create_unix_connection(
                lambda: _Relay(near, near, limit), str(self._port.grpc_socket)
            )
        except OSError:
            near.close()  # not up yet: the client sees a closed connection, which is UNAVAILABLE
            return
        far.write(first)
        near.set_protocol(_Relay(far, near, limit))
        near.resume_reading()


class _Relay(asyncio.Protocol):
    """One side of a relayed connection: data received here is written to the other side. When either side ends, both
    are closed: HTTP/2 does not use half-closed connections."""

    def __init__(self, other: asyncio.Transport, near: asyncio.Transport, limit: _ConnectionLimit) -> None:
        """``near``: the caller's side, which is counted in ``limit``."""
        self._other = other
        self._near = near
        self._limit = limit

    def data_received(self, data: bytes) -> None:
        self._limit.touch(self._near)
        self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self._near)
        if self._other is self._near:
            self._other.close()
        else:
            self._other.abort()  # ``close`` would wait while the far side does not read
