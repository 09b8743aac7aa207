"""Runs the door on a socket. With TLS, changed certificate files are reloaded at the next connection."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.config import DoorSettings
from pensieve.errors import PensieveError
from pensieve.grpc_thread import end_grpc_thread
from pensieve.http.app import make_app
from pensieve.http.arrivals import Acceptor, PendingConnection
from pensieve.http.common.admission import KEYLESS
from pensieve.http.common.callers import CERTIFICATE_NAMES
from pensieve.http.common.entrance import is_known_caller, starts_with_known_key
from pensieve.http.connections import Connections
from pensieve.http.wire import make_protocol
from pensieve.logs import AcceptErrorFilter
from pensieve.renewed_files import RenewedTls, TlsFiles


def renewed_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that uses changed files for new connections. Raises OSError when they are invalid now."""
    tls = RenewedTls(files, files.context)

    def renew(connection: ssl.SSLObject, _name: str | None, _outer: ssl.SSLContext) -> None:
        tls.renew()
        connection.context = tls.current

    # Called in every handshake, even without SNI; ssl's types know it with sockets only.
    outer = files.context()
    outer.sni_callback = cast(Any, renew)
    return outer


def with_certificate_names(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Extend uvicorn's ``protocol`` to pass the names in the client's certificate to the application."""

    class WithCertificateNames(protocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            shown = transport.get_extra_info("ssl_object")
            names = certificate_names(shown.getpeercert() or {}) if shown is not None else ()
            self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE_NAMES: names}

    return WithCertificateNames


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a certificate's alternative names, or else its common name. ``certificate``: from ``getpeercert``."""
    alternative = tuple(name for _, name in certificate.get("subjectAltName", ()))
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return alternative or tuple(value for kind, value in subject if kind == "commonName")


__all__ = ["DoorSettings", "TlsFiles", "needs_no_key", "run_to_end", "running", "serve"]

GC_THRESHOLDS: Final = (700, 4, 2)
PROBE_S: Final = 2.0
DRAIN_S: Final = 30


async def serve(settings: DoorSettings, listener: socket.socket, tls: TlsFiles | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let running calls end. Raises OSError for invalid TLS files."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles both, and raises them again when it has shut down. A requested shutdown is not a failure.
        signal.signal(number, lambda *_: None)
    asyncio.get_running_loop().set_exception_handler(AcceptErrorFilter())
    _set_nodelay(listener)
    connections = Connections(settings.proxies)
    config = _config(make_app(settings), tls, DRAIN_S, connections, settings.proxies)
    tune_gc()
    await DoorServer(config, connections).serve(sockets=[listener])


async def needs_no_key(settings: DoorSettings) -> bool:
    """Whether the service accepts callers without a key; False when it cannot be asked now."""
    retry = RetryPolicy(max_attempts=1)
    async with AsyncClient(
        settings.target, tls=settings.tls, credentials=settings.identity, timeout=PROBE_S, retry=retry
    ) as client:
        try:
            return KEYLESS in (await client.server_info()).features
        except PensieveError:
            return False


def run_to_end(serving: Coroutine[Any, Any, None]) -> None:
    """Run a door on an event loop of its own, uvloop's if that package is installed."""
    # its default ``log_config`` would configure logging
    factory = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serving)
    end_grpc_thread()


def tune_gc() -> None:
    """Keep garbage collections short, because each one blocks the event loop.

    Objects made by the start are frozen. Full collections come often, so that the remains of a burst of
    connections are collected in small parts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class DoorServer(uvicorn.Server):
    """A uvicorn server whose connections are accepted by ``Acceptor``."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting; uvicorn's own start has asyncio accept connections. Exits the process when the
        application cannot start."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(3)  # as uvicorn does
        app = self.config.app
        assert isinstance(app, Starlette)
        knows = partial(starts_with_known_key, app.state.door)
        arrivals = [
            Acceptor(listener, self._connections, self._protocol, knows, self.config.ssl)
            for listener in sockets or ()
        ]
        self.servers = cast(Any, arrivals)  # uvicorn closes them
        for one in arrivals:
            one.start()
        self.started = True

    def _protocol(self, arrival: PendingConnection) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            arrival=arrival,
        )


class ManagedServer(DoorServer):
    """A server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running(
    app: Starlette, listener: socket.socket, tls: TlsFiles | None, proxies: tuple[str, ...] = ()
) -> AsyncIterator[ManagedServer]:
    """Serve ``app`` on a socket during the block. At its end, wait for running calls; the block must set
    ``should_exit``."""
    asyncio.get_running_loop().set_exception_handler(AcceptErrorFilter())
    _set_nodelay(listener)
    connections = Connections(proxies)
    server = ManagedServer(_config(app, tls, None, connections, proxies), connections)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not (server.started or task.done()):
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        await task


def _set_nodelay(listener: socket.socket) -> None:
    """Set TCP_NODELAY on the listener; accepted connections inherit it.

    asyncio sets it only on sockets whose protocol is TCP, which these do not say. Without it an event waits up
    to 40 ms for the acknowledgement of the one before.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _config(
    app: Starlette,
    tls: TlsFiles | None,
    drain_s: int | None,
    connections: Connections,
    proxies: tuple[str, ...],
) -> uvicorn.Config:
    protocol: type[asyncio.Protocol] = make_protocol(connections, partial(is_known_caller, app.state.door))
    if tls is not None and tls.client_ca is not None:
        protocol = with_certificate_names(protocol)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",  # by default a failing lifespan counts as an application without one
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        # Always set: uvicorn's default trusts callers on this machine, and those that the environment names.
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        ssl_context_factory=None if tls is None else lambda _config, _default: renewed_context(tls),
    )
    config.load()  # now, so that invalid files end the start
    return config
