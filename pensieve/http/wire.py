"""HTTP below the application: what a connection may cost before, and while, its requests are answered.

Connections take turns. In each turn one piece is parsed, and only when it is needed: a body when the application asks
for it, the next request when the one before it is answered. So no caller can make the event loop
work on what it sends, however it is cut into chunks, lines or packets. What is no HTTP is refused in the form of all
errors, and a caller that stands still is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import uuid
from collections.abc import Callable
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pensieve.http.common.entrance import ADMITTED, OPEN
from pensieve.http.common.failures import HttpFailure
from pensieve.http.connections import Connection, Connections

HEAD_S: Final = 30.0
"""How long a request may take up to its body: from the connection, or from its first byte on one that is open."""
STALLED_S: Final = 120.0
"""How long a caller may take nothing of an answer that is waiting for it."""
LINGER_S: Final = 2.0
"""How long what a refused caller still sends is taken and dropped; if it were not, the refusal would get lost."""
LINGER_BYTES: Final = 1 << 20
HEAD_PIECE: Final = 1024
"""Bytes of heads that are parsed at a time. A piece this small holds few requests."""
BODY_PIECE: Final = 4096
WAITING_BYTES: Final = 16 * 1024
"""Bytes of a connection that are read before the application asks for them."""
STRANGERS_READ: Final = 16 * 1024
KNOWN_READ: Final = 64 * 1024
"""Bytes that are taken from the socket at once, by whether the caller is known."""
BATCH: Final = 16 * 1024
"""The application gets a body in parts of this size, however small the packets are that it comes in."""
FLUSH_S: Final = 0.02
"""How long a smaller part waits for more."""
AHEAD: Final = 64 * 1024
"""Bytes of a body that wait for the application before no more are parsed."""
MOST_HEAD: Final = 64 * 1024
MOST_LINES: Final = 128
FRAMING: Final = 8 * 1024
"""Bytes that chunks of a body may take beside the body, and an eighth of it: chunks of 64 bytes and more do not."""


class _Refused(Exception):
    """Ends the parsing; the failure is for the caller."""

    def __init__(self, failure: HttpFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Flow(FlowControl):
    """What uvicorn says of reading holds for parsing here; the protocol itself says when the socket is read."""

    def __init__(self, transport: asyncio.Transport, wake: Callable[[], None]) -> None:
        super().__init__(transport)
        self._wake = wake

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._wake()

    def forget(self) -> None:
        """Call nothing any more."""
        self._wake = _nothing


class _Outlet:
    """The transport as a request's answer sees it: to close it is to linger where the caller still sends."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Headers:
    """Headers of every answer, as uvicorn adds them: the last answer of a connection says that it is."""

    def __init__(self, default: list[tuple[bytes, bytes]], ends: Callable[[], bool]) -> None:
        self._default = default
        self._ends = ends

    def __add__(self, more: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [*self._default, *([(b"connection", b"close")] if self._ends() else []), *more]


class Guarded(HttpToolsProtocol):
    """One connection. See the module docstring."""

    def __init__(
        self,
        connections: Connections,
        knows: Callable[[Any], bool],
        *,
        arrival: Connection | None = None,
        **options: Any,
    ) -> None:
        """``knows``: whether the caller of a request, given its scope, was let in before. ``arrival``: what the
        connection counts as before it is made."""
        super().__init__(**options)
        self._arrival = arrival
        self._connections = connections
        self._knows = knows
        self._waiting = bytearray()
        """Read and not parsed."""
        self._scheduled = False
        self._reading = True
        self._in_message = self._in_body = False
        self._head_bytes = self._lines = 0
        self._body_bytes = self._framing = 0
        self._left_over = AHEAD
        """Bytes of a body that are read and dropped behind its answer, before the connection is closed instead."""
        self._framed = b""
        """The header lines of the request that say how long its body is."""
        self._repeats = False
        """The parser hears a head that was parsed before."""
        self._dropped: int | None = None
        """Bytes that were dropped since the answer that ends the connection; None before it."""
        self._lingering: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = None
        """Runs while no request is being answered."""
        self._stall: asyncio.TimerHandle | None = None
        """Runs while an answer cannot be written."""

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.flow = _Flow(transport, self._wake)
        self._read_at_once(STRANGERS_READ)
        counted = self._arrival is not None and self._connections.replace(self._arrival, self)
        if not counted and not self._connections.on_connect(self, self.address):
            self._refuse(_full())
        self._arrival = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall, self._lingering, self._flushing):
            _end(timer)
        self._connections.on_close(self)
        self._waiting.clear()
        idle = self.idle
        super().connection_lost(exc)
        assert isinstance(self.flow, _Flow)
        self.flow.forget()
        if idle:
            self._forget_request()

    def _forget_request(self) -> None:
        """Let go of what refers to this object: a closed connection is freed at once, not by a garbage collection,
        which would hold up the loop for those of many."""
        if self.cycle is not None:
            self.cycle.default_headers = []  # they refer to it
            self.cycle.scope["state"].pop(ADMITTED, None)
        self.cycle = self.scope = None  # type: ignore[assignment]

    @property
    def address(self) -> str:
        """Address of the peer. Behind a proxy it is the proxy's."""
        return self.client[0] if self.client is not None else ""

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def admitted(self) -> None:
        """The caller of the request under way is known."""
        if not self.transport.is_closing():
            self._read_at_once(KNOWN_READ)
            self._connections.on_admitted(self)

    def evict(self) -> None:
        """Make room for another connection, at once."""
        if not self.idle and not self.cycle.response_started:
            self.transport.write(FULL)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _end(self._stall)

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
            self._take()

    def _take(self) -> None:
        """Parse a piece of what has come, if it is wanted; the next one when others had their turn."""
        self._scheduled = False
        if self.transport.is_closing() or self._dropped is not None:
            self._waiting.clear()
            return
        if self._waiting and self._wanted:
            size = BODY_PIECE if self._in_body else HEAD_PIECE
            piece = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._parse(piece)
        if self._waiting and self._wanted:
            self._wake()
        self._read_on(len(self._waiting) < WAITING_BYTES)
        self._watch()

    @property
    def _wanted(self) -> bool:
        """Whether the application is ready for the next bytes."""
        return not self.flow.read_paused if self._in_body else self.idle

    def _read_at_once(self, size: int) -> None:
        with contextlib.suppress(AttributeError):  # uvloop has a buffer of its own
            self.transport.max_size = size  # type: ignore[attr-defined]

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._take)

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
                if self._head_bytes > MOST_HEAD:
                    raise _Refused(_no_http(f"the request's head is longer than {MOST_HEAD} bytes"))
            self.parser.feed_data(piece)
            if was_in_body and self._in_body:
                self._framing += len(piece) - (self._body_bytes - body_bytes)
                if self._framing > FRAMING + self._body_bytes // 8:
                    raise _Refused(_no_http("the chunks of the body are too small: send larger ones"))
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except _Refused as refused:
            self._refuse(refused.failure)
        except httptools.HttpParserError as error:
            cause = error.__context__
            failure = (
                cause.failure if isinstance(cause, _Refused) else _no_http("the request is not valid HTTP")
            )
            self._refuse(failure)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """The request is answered as it is. The parser has skipped its body: another one, told its length, finds it."""
        self._waiting[:0] = rest
        if self._in_body:
            self.parser = httptools.HttpRequestParser(self)
            self._repeats = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framed + b"\r\n")
            self._repeats = False

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._repeats:
            return
        super().on_message_begin()
        self.scope["state"][ADMITTED] = self.admitted
        self._in_message = True
        self._lines = 0

    def on_url(self, url: bytes) -> None:
        if not self._repeats:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # behind the body: nothing of it counts
        self._lines += 1
        if self._lines > MOST_LINES:
            raise _Refused(
                HttpFailure(431, f"the request has more than {MOST_LINES} header lines", code="invalid_http")
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats:
            return
        self._head_bytes = 0
        self._in_body = True
        self._body_bytes = self._framing = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise _Refused(_no_http("the request must have one Host header"))
        if codings not in ([], [b"chunked"]):
            raise _Refused(_no_http("a body with this transfer-encoding is not read"))
        lines = [line for line in self.headers if line[0] in (b"content-length", b"transfer-encoding")]
        self._framed = b"".join(b"%b: %b\r\n" % line for line in lines if line[1] != b"0")
        super().on_headers_complete()
        self.cycle.transport = _Outlet(self.transport, self._end_gently)  # type: ignore[assignment]
        self.cycle.default_headers = _Headers(  # type: ignore[assignment]
            self.cycle.default_headers, functools.partial(self._leaves_much, self.cycle)
        )
        self.flow.pause_reading()

    def _leaves_much(self, cycle: Any) -> bool:
        """Whether more of the request's body is unread than is worth reading for the next request."""
        if cycle is not self.cycle or not self._in_body:
            return False
        announced = next((value for name, value in self.headers if name == b"content-length"), None)
        return announced is None or int(announced) - self._body_bytes > AHEAD

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._left_over -= len(body)
            if self._left_over < 0:
                self._end_gently()
            return
        self.cycle.body += body
        if len(self.cycle.body) >= BATCH:
            if len(self.cycle.body) >= AHEAD:
                self.flow.pause_reading()
            self.cycle.message_event.set()
        elif self._flushing is None:
            self._flushing = self.loop.call_later(FLUSH_S, self._flush, self.cycle)

    def _flush(self, cycle: Any) -> None:
        self._flushing = None
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._framed and self.parser.should_upgrade():
            return  # its body is still to come: see ``_ignore_upgrade``
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
        self._left_over = AHEAD
        self._wake()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """A request begins at once where its caller is known, else when it is its turn among those of strangers."""
        start = functools.partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in OPEN:
            start()
        elif self._knows(cycle.scope):
            self.admitted()
            start()
        else:
            self._connections.queue.enter(self, start)

    # ---- ends

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what its parser refuses."""
        self._refuse(_no_http(msg))

    def _watch(self) -> None:
        if self.transport.is_closing() or not self.idle or self._dropped is not None:
            _end(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._too_late)

    def _too_late(self) -> None:
        message = f"the request's head did not come within {HEAD_S:g} s"
        self._refuse(HttpFailure(408, message, code="request_timeout"))

    def _refuse(self, failure: HttpFailure) -> None:
        if self.transport.is_closing() or self._dropped is not None:
            return
        begun = self.cycle is not None and self.cycle.response_started
        if not begun or self.cycle.response_complete:  # else it would be read as a part of that answer
            self.transport.write(_answer(failure))
        self._end_gently()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _end_gently(self) -> None:
        """Close the connection when the caller has stopped sending, or soon.

        A socket that is closed with bytes unread takes back what the caller has not read yet: the answer.
        """
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


def guarded(connections: Connections, knows: Callable[[Any], bool]) -> type[Guarded]:
    """The protocol of connections that all count in ``connections``. ``knows``: see ``Guarded``."""

    class Counted(Guarded):
        def __init__(self, **options: Any) -> None:
            super().__init__(connections, knows, **options)

    return Counted


def _no_http(message: str) -> HttpFailure:
    return HttpFailure(400, message, code="invalid_http")


def _full() -> HttpFailure:
    return HttpFailure(
        503,
        "the server has too many connections: try again",
        kind="server_error",
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


FULL: Final = _answer(_full())
"""What a connection is told that has to make room."""


def _nothing() -> None:
    """Stands for a callback that is over."""


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
