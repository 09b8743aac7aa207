"""HTTP below the application: bounds the cost of a connection before and while its requests are answered.

Connections take turns on the event loop. In each turn one piece is parsed, and only when it is needed: a body
when the application reads it, the next request when the previous one is answered. So no caller can occupy the
event loop, however it cuts its data into chunks, lines or packets. Invalid HTTP gets an error in the usual
form. A caller that stalls is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import uuid
from collections.abc import Callable
from typing import Any, Final, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pensieve.http.common.entrance import ON_ADMITTED, OPEN_PATHS
from pensieve.http.common.failures import HttpFailure
from pensieve.http.connections import Connection, Connections

HEAD_S: Final = 30.0
"""Timeout of a request's head, from the connection, or from the previous answer on an open one."""
STALLED_S: Final = 120.0
"""A caller that reads nothing of a waiting answer for this long is disconnected."""
LINGER_S: Final = 2.0
"""How long data of a refused caller is read and dropped. Closing earlier would lose the refusal."""
LINGER_BYTES: Final = 1 << 20
HEAD_PIECE_BYTES: Final = 1024
"""Bytes of heads that are parsed at a time. A piece this small holds few requests."""
BODY_PIECE_BYTES: Final = 4096
WAITING_BYTES: Final = 16 * 1024
"""Bytes of a connection that are read before the application asks for them."""
STRANGER_READ_BYTES: Final = 16 * 1024
KNOWN_READ_BYTES: Final = 64 * 1024
"""Bytes per read from the socket, for unknown and for known callers."""
BODY_PART_BYTES: Final = 16 * 1024
"""The application gets a body in parts of this size, however small the packets are."""
FLUSH_S: Final = 0.02
"""How long a smaller part waits for more."""
READ_AHEAD_BYTES: Final = 64 * 1024
"""Bytes of a body that may wait for the application before parsing pauses."""
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADER_LINES: Final = 128
MAX_FRAMING_BYTES: Final = 8 * 1024
"""Bytes of chunk headers that a body may have, plus an eighth of its size. Chunks of 64 bytes or more stay
below it."""


class _RequestRefused(Exception):
    """Ends the parsing with a failure for the caller."""

    def __init__(self, failure: HttpFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Flow(FlowControl):
    """Applies uvicorn's flow control to parsing; the protocol itself decides when the socket is read."""

    def __init__(self, transport: asyncio.Transport, wake: Callable[[], None]) -> None:
        super().__init__(transport)
        self._wake = wake

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._wake()

    def drop_callback(self) -> None:
        self._wake = lambda: None


class _Outlet:
    """The transport as a request's answer sees it. Its ``close`` lingers while the caller still sends."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Headers:
    """Headers of every answer, as uvicorn adds them; a connection's last answer also has ``connection: close``."""

    def __init__(self, default: list[tuple[bytes, bytes]], ends: Callable[[], bool]) -> None:
        self._default = default
        self._ends = ends

    def __add__(self, more: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [*self._default, *([(b"connection", b"close")] if self._ends() else []), *more]


class GuardedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        connections: Connections,
        knows: Callable[[Any], bool],
        *,
        arrival: Connection | None = None,
        **options: Any,
    ) -> None:
        """``knows``: whether the caller of a request with this scope was admitted before. ``arrival``: counts
        for the connection until this object does."""
        super().__init__(**options)
        self._arrival = arrival
        self._connections = connections
        self._knows = knows
        self._waiting = bytearray()
        self._scheduled = False
        self._reading = True
        self._in_message = self._in_body = False
        self._head_bytes = self._lines = 0
        self._body_bytes = self._framing = 0
        self._drop_budget = READ_AHEAD_BYTES
        """Bytes of a body that are read and dropped after its answer; then the connection is closed instead."""
        self._length_headers = b""
        """The request's header lines that give the length of its body."""
        self._is_replaying = False
        """The parser is replaying a head that was parsed before."""
        self._dropped: int | None = None
        """Bytes dropped since the connection's last answer; None before it."""
        self._lingering: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = None
        """Runs while no request is being answered."""
        self._stall: asyncio.TimerHandle | None = None
        """Runs while an answer cannot be written."""

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        super().connection_made(transport)
        self.flow = _Flow(transport, self._wake)
        self._read_at_once(STRANGER_READ_BYTES)
        counted = self._arrival is not None and self._connections.replace(self._arrival, self)
        if not counted and not self._connections.on_connect(self, self.address):
            self._refuse(_overloaded())
        self._arrival = None
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall, self._lingering, self._flushing):
            _cancel(timer)
        self._connections.on_close(self)
        self._waiting.clear()
        idle = self.idle
        super().connection_lost(exc)
        assert isinstance(self.flow, _Flow)
        self.flow.drop_callback()
        if idle:
            self._forget_request()

    def _forget_request(self) -> None:
        """Drop references to this object, so that a closed connection is freed at once. A garbage collection of
        many would block the event loop."""
        if self.cycle is not None:
            self.cycle.default_headers = []  # they refer to this object
            self.cycle.scope["state"].pop(ON_ADMITTED, None)
        self.cycle = self.scope = None  # type: ignore[assignment]

    @property
    def address(self) -> str:
        """The peer's address; behind a proxy, the proxy's."""
        return self.client[0] if self.client is not None else ""

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_admitted(self) -> None:
        if not self.transport.is_closing():
            self._read_at_once(KNOWN_READ_BYTES)
            self._connections.on_admitted(self)

    def evict(self) -> None:
        if not self.idle and not self.cycle.response_started:
            self.transport.write(FULL)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall)

    # ---- bytes

    def data_received(self, data: bytes) -> None:
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._waiting += data
        if not self._scheduled:
            self._parse_next()

    def _parse_next(self) -> None:
        """Parse one piece of the received data if it is wanted, and schedule the next."""
        self._scheduled = False
        if self.transport.is_closing() or self._dropped is not None:
            self._waiting.clear()
            return
        if self._waiting and self._wanted:
            size = BODY_PIECE_BYTES if self._in_body else HEAD_PIECE_BYTES
            piece = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._parse(piece)
        if self._waiting and self._wanted:
            self._wake()
        self._read_on(len(self._waiting) < WAITING_BYTES)
        self._update_head_timer()

    @property
    def _wanted(self) -> bool:
        """Whether the application is ready for the next bytes."""
        return not self.flow.read_paused if self._in_body else self.idle

    def _read_at_once(self, size: int) -> None:
        with contextlib.suppress(AttributeError):  # uvloop has its own buffer
            self.transport.max_size = size  # type: ignore[attr-defined]

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._parse_next)

    def _read_on(self, wanted: bool) -> None:
        if wanted is self._reading or self.transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _parse(self, piece: bytes) -> None:
        was_in_body, body_bytes = self._in_body, self._body_bytes
        try:
            if not was_in_body:
                self._head_bytes += len(piece)
                if self._head_bytes > MAX_HEAD_BYTES:
                    raise _RequestRefused(
                        _invalid_http(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
                    )
            self.parser.feed_data(piece)
            if was_in_body and self._in_body:
                self._framing += len(piece) - (self._body_bytes - body_bytes)
                if self._framing > MAX_FRAMING_BYTES + self._body_bytes // 8:
                    raise _RequestRefused(
                        _invalid_http("the chunks of the body are too small: send larger ones")
                    )
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except _RequestRefused as refused:
            self._refuse(refused.failure)
        except httptools.HttpParserError as error:
            cause = error.__context__
            failure = (
                cause.failure
                if isinstance(cause, _RequestRefused)
                else _invalid_http("the request is not valid HTTP")
            )
            self._refuse(failure)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Answer an upgrade request as a plain one. The parser has skipped its body, so a new parser that knows
        its length reads it."""
        self._waiting[:0] = rest
        if self._in_body:
            self.parser = httptools.HttpRequestParser(self)
            self._is_replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._length_headers + b"\r\n")
            self._is_replaying = False

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        super().on_message_begin()
        self.scope["state"][ON_ADMITTED] = self.on_admitted
        self._in_message = True
        self._lines = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # trailers after the body are ignored
        self._lines += 1
        if self._lines > MAX_HEADER_LINES:
            raise _RequestRefused(
                HttpFailure(
                    431, f"the request has more than {MAX_HEADER_LINES} header lines", code="invalid_http"
                )
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        self._head_bytes = 0
        self._in_body = True
        self._body_bytes = self._framing = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise _RequestRefused(_invalid_http("the request must have one Host header"))
        if codings not in ([], [b"chunked"]):
            raise _RequestRefused(_invalid_http("a body with this transfer-encoding is not read"))
        lines = [line for line in self.headers if line[0] in (b"content-length", b"transfer-encoding")]
        self._length_headers = b"".join(b"%b: %b\r\n" % line for line in lines if line[1] != b"0")
        super().on_headers_complete()
        self.cycle.transport = _Outlet(self.transport, self._end_gently)  # type: ignore[assignment]
        self.cycle.default_headers = _Headers(  # type: ignore[assignment]
            self.cycle.default_headers, functools.partial(self._has_much_unread, self.cycle)
        )
        self.flow.pause_reading()

    def _has_much_unread(self, cycle: Any) -> bool:
        """Whether too much of the request's body is unread to read it for the sake of the next request."""
        if cycle is not self.cycle or not self._in_body:
            return False
        announced = next((value for name, value in self.headers if name == b"content-length"), None)
        return announced is None or int(announced) - self._body_bytes > READ_AHEAD_BYTES

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._drop_budget -= len(body)
            if self._drop_budget < 0:
                self._end_gently()
            return
        self.cycle.body += body
        if len(self.cycle.body) >= BODY_PART_BYTES:
            if len(self.cycle.body) >= READ_AHEAD_BYTES:
                self.flow.pause_reading()
            self.cycle.message_event.set()
        elif self._flushing is None:
            self._flushing = self.loop.call_later(FLUSH_S, self._flush, self.cycle)

    def _flush(self, cycle: Any) -> None:
        self._flushing = None
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._length_headers and self.parser.should_upgrade():
            return  # the body is still to come: see ``_ignore_upgrade``
        self._in_message = self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._connections.queue.leave(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self._forget_request()
            return
        if self._dropped is not None:
            return
        self._drop_budget = READ_AHEAD_BYTES
        self._wake()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a known caller's request at once; queue a stranger's."""
        start = functools.partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in OPEN_PATHS:
            start()
        elif self._knows(cycle.scope):
            self.on_admitted()
            start()
        else:
            self._connections.queue.enter(self, start)

    # ---- ends

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when its parser refuses the request."""
        self._refuse(_invalid_http(msg))

    def _update_head_timer(self) -> None:
        if self.transport.is_closing() or not self.idle or self._dropped is not None:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        message = f"the request's head did not come within {HEAD_S:g} s"
        self._refuse(HttpFailure(408, message, code="request_timeout"))

    def _refuse(self, failure: HttpFailure) -> None:
        if self.transport.is_closing() or self._dropped is not None:
            return
        begun = self.cycle is not None and self.cycle.response_started
        if not begun or self.cycle.response_complete:  # otherwise it would be taken for a part of that answer
            self.transport.write(_answer(failure))
        self._end_gently()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _end_gently(self) -> None:
        """Close the connection when the caller has stopped sending, or after ``LINGER_S``. Closing a socket
        with unread bytes would reset the connection, and the caller might never see the answer."""
        if self._dropped is not None or self.transport.is_closing():
            return
        if not (self._in_message or self._waiting):
            self.transport.close()
            return
        self._dropped = 0
        self._waiting.clear()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._read_on(True)
        self._lingering = self.loop.call_later(LINGER_S, self.transport.close)
        self._connections.on_last_answer(self)


def make_protocol(connections: Connections, knows: Callable[[Any], bool]) -> type[GuardedProtocol]:
    """Return the protocol class of connections that count in ``connections``. ``knows``: see ``GuardedProtocol``."""

    class Counted(GuardedProtocol):
        def __init__(self, **options: Any) -> None:
            super().__init__(connections, knows, **options)

    return Counted


def _invalid_http(message: str) -> HttpFailure:
    return HttpFailure(400, message, code="invalid_http")


def _overloaded() -> HttpFailure:
    return HttpFailure(
        503,
        "the server has too many connections: try again",
        code="server_overloaded",
        retry_after_s=1.0,
    )


def _answer(failure: HttpFailure) -> bytes:
    body = msgspec.json.encode(failure.body)
    more = "".join(f"{name}: {value}\r\n" for name, value in failure.headers.items())
    head = (
        f"HTTP/1.1 {failure.status} {http.HTTPStatus(failure.status).phrase}\r\n"
        f"x-request-id: req_{uuid.uuid4().hex}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"{more}connection: close\r\n\r\n"
    )
    return head.encode() + body


FULL: Final = _answer(_overloaded())
"""The answer to a request whose connection is evicted."""


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
