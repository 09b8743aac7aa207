"""Runs the door on a socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from pensieve.http.app import make_app
from pensieve.http.common.settings import DoorSettings
from pensieve.http.tls import TlsFiles, naming, renewing
from pensieve.http.wire import guarded
from pensieve.logs import QuietAccepts

__all__ = ["DoorSettings", "TlsFiles", "loop_factory", "running", "serve"]

DRAIN_S = 30
"""How long running answers may take to end when the door is closed."""


async def serve(settings: DoorSettings, listener: socket.socket, tls: TlsFiles | None = None) -> None:
    """Take calls until SIGTERM or SIGINT; then let running ones end. Raises OSError for files of no use."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn takes both over, and when it has ended it raises them again: to the program that was asked to end and
        # did, that is no failure.
        signal.signal(number, _ended)
    asyncio.get_running_loop().set_exception_handler(QuietAccepts())
    _without_delay(listener)
    await uvicorn.Server(_config(make_app(settings), tls, DRAIN_S, settings.proxies)).serve(
        sockets=[listener]
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where that package is installed, else asyncio's own."""
    # With its own ``log_config`` it would set up logging, in a form of its own.
    return uvicorn.Config("", log_config=None).get_loop_factory()


class ManagedServer(uvicorn.Server):
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
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        http="h11",
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        # Said in any case: uvicorn believes whoever calls from this machine, or whom the environment names.
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        h11_max_incomplete_event_size=64 * 1024,
        ssl_context_factory=None if tls is None else lambda _config, _default: renewing(tls),
    )
    config.load()
    assert not isinstance(config.http_protocol_class, str), "loaded"
    config.http_protocol_class = guarded(config.http_protocol_class)
    if tls is not None and tls.client_ca is not None:
        config.http_protocol_class = naming(config.http_protocol_class)
    return config


def _ended(_: int, __: FrameType | None) -> None:
    return
