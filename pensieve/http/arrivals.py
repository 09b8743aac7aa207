"""Accepts connections from the listening socket and decides which one is served next.

A connection counts towards the limits from its accept on, so also during its TLS handshake. Many are accepted
in one turn of the event loop, for a few system calls each. A connection whose first bytes hold a known caller's
key is served at once. The others are served one at a time, newest first. While many wait and none is admitted,
a pause follows each. Connections over the limit are refused before anything is created for them. So a known
caller never waits for unknown ones that came before it, and unknown ones take a small part of the event loop's
time.

The kernel delivers a connection once its first bytes have arrived, so one look at them is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final

from pensieve.http.connections import Connections
from pensieve.http.wire import FULL

BACKLOG: Final = 2048
ACCEPTS_PER_TURN: Final = 256
CROWD_SIZE: Final = 16
"""More waiting connections than this, and each refusal is followed by a pause."""
PAUSE_S: Final = 0.01
DEFER_ACCEPT_S: Final = 1
"""About how long the kernel waits for a connection's first bytes before it delivers it."""
PEEK_BYTES: Final = 4096
HANDSHAKE_S: Final = 10.0
RETRY_S: Final = 1.0
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class PendingConnection:
    idle = True

    def __init__(
        self, accepted: socket.socket, address: str, evict: Callable[[PendingConnection], None]
    ) -> None:
        self.socket = accepted
        self.address = address
        self.starting: asyncio.Task[None] | None = None
        self.has_begun = False
        """The task has started. From then on it closes the socket when it is cancelled."""
        self._evict = evict

    def evict(self) -> None:
        self._evict(self)


class Acceptor:
    """The connections of one listening socket until they are served. Runs on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[PendingConnection], asyncio.Protocol],
        knows: Callable[[bytes], bool],
        context: ssl.SSLContext | None,
    ) -> None:
        """``protocol`` creates the protocol of a connection. ``knows``: whether bytes begin a known caller's
        request."""
        self._listener = listener
        self._connections = connections
        self._protocol = protocol
        self._knows = knows
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PendingConnection, None] = {}
        """Oldest first."""
        self._starting: set[PendingConnection] = set()
        self._next_turn: asyncio.Handle | None = None
        self._admissions = 0
        """``connections.admissions`` when the last unknown connection was served."""
        self._closed = False

    def start(self) -> None:
        self._listener.setblocking(False)
        if self._context is None:  # a handshake's first bytes do not identify the caller
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_ACCEPT_S)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting, and refuse the waiting connections."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        for one in (*self._waiting, *self._starting):
            self._connections.on_close(one)
            self._end(one)

    async def wait_closed(self) -> None:
        """uvicorn awaits this on its servers. It waits for the served connections itself."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._pause_accepting(error)
                break
            accepted.setblocking(False)
            one = PendingConnection(accepted, address[0], self._end)
            if not self._connections.on_connect(one, one.address):
                self._connections.on_close(one)
                self._end(one)
            elif self._is_known(one):
                self._connections.on_admitted(one)
                self._serve(one)
            else:
                self._waiting[one] = None
        self._schedule_next()

    def _pause_accepting(self, error: OSError) -> None:
        self._loop.call_exception_handler(
            {"message": "socket.accept() out of system resource", "exception": error}
        )
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(RETRY_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _is_known(self, one: PendingConnection) -> bool:
        if self._context is not None:
            return False
        try:
            return self._knows(one.socket.recv(PEEK_BYTES, socket.MSG_PEEK))
        except OSError:
            return False

    def _schedule_next(self) -> None:
        if not self._waiting or self._next_turn is not None:
            return
        is_refusing = self._connections.admissions == self._admissions
        if is_refusing and len(self._waiting) > CROWD_SIZE and self._context is None:
            self._next_turn = self._loop.call_later(PAUSE_S, self._serve_next)
        else:
            self._next_turn = self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        self._next_turn = None
        self._admissions = self._connections.admissions
        self._serve_newest()
        self._schedule_next()

    def _serve_newest(self) -> None:
        if self._waiting:
            self._serve(next(reversed(self._waiting)))

    def _serve(self, one: PendingConnection) -> None:
        self._waiting.pop(one, None)
        self._starting.add(one)
        one.starting = self._loop.create_task(self._start(one))
        one.starting.add_done_callback(lambda _: self._on_started(one))

    async def _start(self, one: PendingConnection) -> None:
        one.has_begun = True
        deadline = None if self._context is None else HANDSHAKE_S
        # The caller aborted the handshake: there is nothing to report.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(one), one.socket, ssl=self._context, ssl_handshake_timeout=deadline
            )

    def _on_started(self, one: PendingConnection) -> None:
        self._starting.discard(one)
        one.starting = None
        self._connections.on_close(one)

    def _end(self, one: PendingConnection) -> None:
        self._waiting.pop(one, None)
        if one.starting is not None:
            one.starting.cancel()
            if one.has_begun:
                return
        if self._context is None:
            with contextlib.suppress(OSError):
                one.socket.recv(
                    PEEK_BYTES
                )  # closing with unread bytes would reset the connection and lose the answer
                one.socket.send(FULL)
        one.socket.close()
