"""Runs the door on a socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Final

import uvicorn
from starlette.applications import Starlette

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.errors import PensieveError
from pensieve.http.app import make_app
from pensieve.http.common.admission import KEYLESS
from pensieve.http.common.entrance import is_known
from pensieve.http.common.settings import DoorSettings
from pensieve.http.connections import Connections
from pensieve.http.tls import TlsFiles, naming, renewing
from pensieve.http.wire import guarded
from pensieve.logs import QuietAccepts

__all__ = ["DoorSettings", "TlsFiles", "loop_factory", "needs_no_key", "running", "serve"]

BACKLOG: Final = 2048
"""Connections that wait in the system until they are taken."""
AT_A_TIME: Final = 16
"""Connections that are taken before those that are there have their turn."""
PROBE_S: Final = 2.0
"""How long the start waits for what the service says of itself."""
DRAIN_S: Final = 30
"""How long running answers may take to end when the door is closed."""


async def serve(settings: DoorSettings, listener: socket.socket, tls: TlsFiles | None = None) -> None:
    """Take calls until SIGTERM or SIGINT; then let running ones end. Raises OSError for files of no use."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn takes both over, and when it has ended it raises them again: to the program that was asked to end and
        # did, that is no failure.
        signal.signal(number, _ended)
    asyncio.get_running_loop().set_exception_handler(QuietAccepts())
    _without_delay(listener)
    await DoorServer(_config(make_app(settings), tls, DRAIN_S, settings.proxies)).serve(sockets=[listener])


async def needs_no_key(settings: DoorSettings) -> bool:
    """Whether the service lets in callers without a key; False where that cannot be found out now."""
    retry = RetryPolicy(max_attempts=1)
    async with AsyncClient(settings.target, tls=settings.tls, timeout=PROBE_S, retry=retry) as client:
        try:
            return KEYLESS in (await client.server_info()).features
        except PensieveError:
            return False


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where that package is installed, else asyncio's own."""
    # With its own ``log_config`` it would set up logging, in a form of its own.
    return uvicorn.Config("", log_config=None).get_loop_factory()


class DoorServer(uvicorn.Server):
    """A server that takes few connections at a time, so that many that come at once hold up nobody."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has one number for this and for what it takes at a time


class ManagedServer(DoorServer):
    """A server that leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running(
    app: Starlette, listener: socket.socket, tls: TlsFiles | None, proxies: tuple[str, ...] = ()
) -> AsyncIterator[ManagedServer]:
    """``app`` on a socket, taking calls. Leaving the block waits for those that run, once ``should_exit`` is set."""
    asyncio.get_running_loop().set_exception_handler(QuietAccepts())
    _without_delay(listener)
    server = ManagedServer(_config(app, tls, None, proxies))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not (server.started or task.done()):
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        await task


def _without_delay(listener: socket.socket) -> None:
    """Events leave when they are written, on all connections of this socket: they inherit the option.

    asyncio would set it only where a socket says that it is TCP, which these do not; and without it an event waits up
    to 40 ms for the caller's acknowledgement of the one before.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _config(
    app: Starlette, tls: TlsFiles | None, drain_s: int | None, proxies: tuple[str, ...]
) -> uvicorn.Config:
    protocol: type[asyncio.Protocol] = guarded(Connections(proxies), partial(is_known, app.state.door))
    if tls is not None and tls.client_ca is not None:
        protocol = naming(protocol)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=AT_A_TIME,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        # Said in any case: uvicorn believes whoever calls from this machine, or whom the environment names.
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        ssl_context_factory=None if tls is None else lambda _config, _default: renewing(tls),
    )
    config.load()  # now, so that files of no use end the start
    return config


def _ended(_: int, __: FrameType | None) -> None:
    return
