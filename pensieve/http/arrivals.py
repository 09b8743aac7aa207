"""Takes new connections from the listening socket, and decides which one is served next.

A connection counts from the moment it is taken, so also while its TLS handshake runs. Many are taken in one turn of the
event loop, at the price of a few system calls each. One with a known caller's key in its first bytes is served at once.
Of the others one is served a turn, the newest first. Those that are too many are refused before anything is made for
them. So a caller that is known never waits for strangers who came before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import ssl
from collections.abc import Callable
from typing import Final

from pensieve.http.connections import Connections
from pensieve.http.wire import FULL

BACKLOG: Final = 2048
"""Connections that wait in the system until they are taken."""
AT_A_TIME: Final = 64
"""Connections that are taken before those that are there have their turn."""
KNOWN_AT_A_TIME: Final = 16
"""Connections of known callers that are served of these."""
PEEKED: Final = 4096
"""Bytes of a request in which a known key is looked for."""
HANDSHAKE_S: Final = 10.0
"""How long a TLS handshake may take."""
RETRY_S: Final = 1.0
"""How long no connection is taken after the process could open no more files."""
_LACKS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Arrival:
    """A connection that waits for its turn or for its TLS handshake."""

    idle = True

    def __init__(self, taken: socket.socket, address: str, evict: Callable[[Arrival], None]) -> None:
        self.socket = taken
        self.address = address
        self.starting: asyncio.Task[None] | None = None
        self._evict = evict

    def evict(self) -> None:
        """End at once, to make room."""
        self._evict(self)


class Intake:
    """The connections of one listening socket until they are served. Used on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[Arrival], asyncio.Protocol],
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
        self._waiting: dict[Arrival, None] = {}
        """Oldest first."""
        self._silent: dict[Arrival, None] = {}
        """Waiting connections that had sent nothing at the last look."""
        self._starting: set[Arrival] = set()
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def start(self) -> None:
        """Take connections from now on."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._take)

    def close(self) -> None:
        """Take no more, and refuse those that wait."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        for one in (*self._waiting, *self._starting):
            self._connections.left(one)
            self._end(one)

    async def wait_closed(self) -> None:
        """uvicorn waits for its servers; the connections that are served it waits for itself."""

    def _take(self) -> None:
        served = 0
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
            one = Arrival(taken, address[0], self._evicted)
            if not self._connections.came(one, one.address):
                self._connections.left(one)
                self._end(one)
            elif served < KNOWN_AT_A_TIME and self._is_known(one):
                served += 1
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

    def _is_known(self, one: Arrival) -> bool:
        if self._context is not None:
            return False
        self._silent.pop(one, None)
        try:
            return self._knows(one.socket.recv(PEEKED, socket.MSG_PEEK))
        except BlockingIOError:
            self._silent[one] = None
        except OSError:
            pass
        return False

    def _go_on(self) -> None:
        if self._waiting and self._turn is None:
            self._turn = self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        self._turn = None
        for one in list(itertools.islice(reversed(self._silent), KNOWN_AT_A_TIME)):
            if self._is_known(one):
                self._serve(one)
        self._serve_newest()
        self._go_on()

    def _serve_newest(self) -> None:
        if self._waiting:
            self._serve(next(reversed(self._waiting)))

    def _serve(self, one: Arrival) -> None:
        self._waiting.pop(one, None)
        self._silent.pop(one, None)
        self._starting.add(one)
        one.starting = self._loop.create_task(self._start(one))

    async def _start(self, one: Arrival) -> None:
        deadline = None if self._context is None else HANDSHAKE_S
        try:
            # An end in the handshake is the caller's: there is none to tell of it.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(one), one.socket, ssl=self._context, ssl_handshake_timeout=deadline
                )
        finally:
            self._starting.discard(one)
            one.starting = None
            self._connections.left(one)

    def _evicted(self, one: Arrival) -> None:
        if one in self._waiting and self._is_known(one):  # its first bytes have come since
            self._serve(one)
        else:
            self._end(one)

    def _end(self, one: Arrival) -> None:
        self._waiting.pop(one, None)
        self._silent.pop(one, None)
        if one.starting is not None:
            one.starting.cancel()
            return
        if self._context is None:
            with contextlib.suppress(OSError):
                one.socket.recv(PEEKED)  # a socket that is closed with bytes unread takes the answer back
                one.socket.send(FULL)
        one.socket.close()
