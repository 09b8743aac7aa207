"""Takes new connections from the listening socket, and decides which one is served next.

A connection counts from the moment it is taken, so also while its TLS handshake runs. Many are taken in one turn of the
event loop, at the price of a few system calls each. One with a known caller's key in its first bytes is served at once.
The others are served one after the other, the newest first, and where many wait and none is let in, with a pause after
each. Those that are too many are refused before anything is made for them. So a caller that is known never waits for
strangers who came before it, and strangers take a small part of the event loop's time.

The system hands over a connection when its first bytes are there, so that one look at them is enough.
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
"""Connections that wait in the system until they are taken."""
AT_A_TIME: Final = 256
"""Connections that are taken before those that are there have their turn."""
CROWD: Final = 16
"""Waiting connections from which on each refusal is followed by a pause."""
PAUSE_S: Final = 0.01
"""How long no stranger of a crowd is served after one that was not let in."""
SILENT_S: Final = 1
"""How long the system waits for the first bytes of a connection before it hands it over, about."""
PEEKED: Final = 4096
"""Bytes of a request in which a known key is looked for."""
HANDSHAKE_S: Final = 10.0
"""How long a TLS handshake may take."""
RETRY_S: Final = 1.0
"""How long no connection is taken after the process could open no more files."""
_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class PendingConnection:
    """A connection that waits for its turn or for its TLS handshake."""

    idle = True

    def __init__(
        self, taken: socket.socket, address: str, evict: Callable[[PendingConnection], None]
    ) -> None:
        self.socket = taken
        self.address = address
        self.starting: asyncio.Task[None] | None = None
        self.begun = False
        """The task has begun: it closes the socket if it fails."""
        self._evict = evict

    def evict(self) -> None:
        """End at once, to make room."""
        self._evict(self)


class Acceptor:
    """The connections of one listening socket until they are served. Used on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[PendingConnection], asyncio.Protocol],
        knows: Callable[[bytes], bool],
        context: ssl.SSLContext | None,
    ) -> None:
        """``protocol``: makes what serves a connection. ``knows``: whether bytes begin a known caller's request."""
        self._listener = listener
        self._connections = connections
        self._protocol = protocol
        self._knows = knows
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PendingConnection, None] = {}
        """Oldest first."""
        self._starting: set[PendingConnection] = set()
        self._turn: asyncio.Handle | None = None
        self._admissions = 0
        """The count of ``connections.admissions`` when the last stranger was served."""
        self._closed = False

    def start(self) -> None:
        """Take connections from now on."""
        self._listener.setblocking(False)
        if self._context is None:  # the first bytes of a handshake say nothing about the caller
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._take)

    def close(self) -> None:
        """Take no more, and refuse those that wait."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        for one in (*self._waiting, *self._starting):
            self._connections.on_close(one)
            self._end(one)

    async def wait_closed(self) -> None:
        """uvicorn waits for its servers; the connections that are served it waits for itself."""

    def _take(self) -> None:
        for _ in range(AT_A_TIME):
            try:
                taken, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _LACKS:
                    raise
                self._wait_for_files(error)
                break
            taken.setblocking(False)
            one = PendingConnection(taken, address[0], self._end)
            if not self._connections.on_connect(one, one.address):
                self._connections.on_close(one)
                self._end(one)
            elif self._is_known(one):
                self._connections.on_admitted(one)
                self._serve(one)
            else:
                self._waiting[one] = None
        self._go_on()

    def _wait_for_files(self, error: OSError) -> None:
        self._loop.call_exception_handler(
            {"message": "socket.accept() out of system resource", "exception": error}
        )
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(RETRY_S, self._take_again)

    def _take_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._take)

    def _is_known(self, one: PendingConnection) -> bool:
        if self._context is not None:
            return False
        try:
            return self._knows(one.socket.recv(PEEKED, socket.MSG_PEEK))
        except OSError:
            return False

    def _go_on(self) -> None:
        if not self._waiting or self._turn is not None:
            return
        refused = self._connections.admissions == self._admissions
        if refused and len(self._waiting) > CROWD and self._context is None:
            self._turn = self._loop.call_later(PAUSE_S, self._serve_next)
        else:
            self._turn = self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        self._turn = None
        self._admissions = self._connections.admissions
        self._serve_newest()
        self._go_on()

    def _serve_newest(self) -> None:
        if self._waiting:
            self._serve(next(reversed(self._waiting)))

    def _serve(self, one: PendingConnection) -> None:
        self._waiting.pop(one, None)
        self._starting.add(one)
        one.starting = self._loop.create_task(self._start(one))
        one.starting.add_done_callback(lambda _: self._started(one))

    async def _start(self, one: PendingConnection) -> None:
        one.begun = True
        deadline = None if self._context is None else HANDSHAKE_S
        # An end in the handshake is the caller's: there is none to tell of it.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(one), one.socket, ssl=self._context, ssl_handshake_timeout=deadline
            )

    def _started(self, one: PendingConnection) -> None:
        self._starting.discard(one)
        one.starting = None
        self._connections.on_close(one)

    def _end(self, one: PendingConnection) -> None:
        self._waiting.pop(one, None)
        if one.starting is not None:
            one.starting.cancel()
            if one.begun:
                return
        if self._context is None:
            with contextlib.suppress(OSError):
                one.socket.recv(PEEKED)  # a socket that is closed with bytes unread takes the answer back
                one.socket.send(FULL)
        one.socket.close()
