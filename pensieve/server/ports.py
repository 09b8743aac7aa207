"""Where a server is reached: the gRPC port, the admin port, and the HTTP door with the private socket behind it.

Ports are bound at once, so that a taken one is told before a model is loaded. They take calls when ``start`` says so,
but for health on the admin port, which answers from the beginning. All calls pass one ``AccessControl``.

The admin service is on the admin port, and with keys on the gRPC port too; both times a key needs the scope ``admin``.
Without keys every caller of the gRPC port could drain the server, so it is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from grpc import aio

from pensieve.feed import HttpDoorState
from pensieve.options.serve import ServeOptions
from pensieve.options.values import is_loopback
from pensieve.server.admin_port import AdminPort
from pensieve.server.conversations import Conversations
from pensieve.server.gateway import Gateway, GatewayCommand, GatewayError
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.operations.metrics import Metrics
from pensieve.server.page.web import WebPage
from pensieve.server.rpc.access_control import AccessControl
from pensieve.server.rpc.admin_service import AdminService
from pensieve.server.rpc.grpc_server import (
    BindError,
    add_health_and_reflection,
    bind,
    check_free,
    connection_limit,
    split_address,
    tls_credentials,
)
from pensieve.server.rpc.interceptor import DEFAULT_IN_FLIGHT
from pensieve.server.rpc.service import ConversationService
from pensieve.server.tasks import cancel_and_wait
from pensieve.v1 import pensieve_pb2_grpc

log = logging.getLogger(__name__)

_STDOUT: Final = 1
DATA_SERVICE: Final = "pensieve.v1.ConversationService"
ADMIN_SERVICE: Final = "pensieve.v1.AdminService"
LAST_CALLS_S: Final = 2.0
"""Time after the drain for answers that are on their way."""
_LONGEST_PATH: Final = 90
"""Of a folder for Unix sockets: the system takes 107 bytes with the name."""
SOCKETS_S: Final = 1.0
"""How often the private sockets are looked at."""
_PREFIX: Final = "pensieve-"
_LOCK: Final = "lock"


class Ports:
    """The ports of one server. What it opens is closed by the stack that it was given."""

    def __init__(self, options: ServeOptions, door: AccessControl, stack: AsyncExitStack) -> None:
        self._options = options
        self._door = door
        self._stack = stack
        self._servers: list[aio.Server] = []
        self._gateway: Gateway | None = None
        self._private = PrivateFolder()
        stack.callback(self._private.close)
        self._sockets: dict[Path, Callable[[], aio.Server]] = {}
        """The private sockets, and what makes a server that is to listen there."""
        self.grpc_address = self.admin_address = self.http_address = ""

    def say_ready(self) -> None:
        """Print what a program that starts a server waits for; it may have gone since."""
        line = f"ready grpc={self.grpc_address} admin={self.admin_address}"
        line += f" http={self.http_address}" if self.http_address else ""
        try:
            os.write(_STDOUT, f"{line}\n".encode())
        except OSError as error:
            log.warning("stdout does not take the ready line: %s", error.strerror)

    def bind(self, link: ProcessLink, conversations: Conversations, monitor: HealthMonitor) -> None:
        """Bind the gRPC port and the HTTP door's. Raises BindError, GatewayError or OSError."""
        options = self._options
        for name, address in (("listen", options.listen), ("admin", options.admin)):
            try:
                check_free(
                    address
                )  # the admin port's too, although it opens later: nothing has been started yet
            except BindError as error:
                raise BindError(f"--{name}: {error}") from error
        credentials = None
        if options.tls_cert is not None and options.tls_key is not None:
            credentials = tls_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
        # Whatever the engine would take or queue has to get this far; a full queue is told as such.
        most = max(DEFAULT_IN_FLIGHT, 2 * options.max_queued)
        server = self._door.make_server(most, connection_limit(options.max_connections))
        service = ConversationService(conversations)
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(service, server)
        self._admin = AdminService(link, conversations)
        keyless = options.api_keys is None
        if not keyless:
            pensieve_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        # A caller without a key may not even learn what there is; operators ask on the admin port.
        add_health_and_reflection(server, monitor.servicer, [DATA_SERVICE], reflects=keyless)
        try:
            port = bind(server, options.listen, credentials)
        except BindError as error:
            raise BindError(f"--listen: {error}") from error
        self._opened(server)
        self.grpc_address = _with_port(options.listen, port)
        if options.http is not None:
            self._bind_http(options.http, service, monitor)

    async def open_admin(self, monitor: HealthMonitor, metrics: Metrics, page: WebPage) -> None:
        """Open the admin port, and have the HTTP door's process started meanwhile. Raises BindError. After ``bind``."""
        grpc_socket = self._private.path / "admin"

        def made() -> aio.Server:
            server = self._door.make_server()
            pensieve_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
            add_health_and_reflection(server, monitor.servicer, [ADMIN_SERVICE, DATA_SERVICE])
            return server

        server = self._on_private_socket(grpc_socket, made)
        self._stack.push_async_callback(server.stop, None)
        await server.start()
        port = AdminPort(metrics.registry, monitor, grpc_socket, self._gateway, page)
        self._stack.push_async_callback(port.close)
        host, number = split_address(self._options.admin)
        try:
            bound = await port.start(host, number)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise BindError(f"--admin: cannot listen on {self._options.admin}: {why}") from error
        self.admin_address = _with_port(self._options.admin, bound)
        if self._gateway is not None:
            self._gateway.watch_in(metrics.registry)
            self._stack.push_async_callback(self._gateway.close)
            self._gateway.start()

    def http_door_state(self) -> HttpDoorState | None:
        """How the HTTP door is; None without one."""
        door = self._gateway
        if door is None:
            return None
        return HttpDoorState(door.state, self.http_address, round(door.since_s, 3), door.restarts)

    async def start(self) -> None:
        """Take calls. Raises GatewayError."""
        for server in self._servers:
            await server.start()
        watching = asyncio.create_task(self._watch_sockets(), name="private sockets")
        self._stack.push_async_callback(cancel_and_wait, watching)
        if self._gateway is not None:
            await self._gateway.ready()

    async def drain(self) -> None:
        """The HTTP door takes no more calls; gRPC has its own answer to those."""
        if self._gateway is not None:
            await self._gateway.drain()

    async def end(self) -> None:
        """End all calls: the last answers have ``LAST_CALLS_S``, those through the HTTP door first."""
        if self._gateway is not None:
            await self._gateway.finish(LAST_CALLS_S)
        for server in self._servers:
            await server.stop(LAST_CALLS_S)

    def _bind_http(self, address: str, service: ConversationService, monitor: HealthMonitor) -> None:
        options = self._options

        def made() -> aio.Server:
            server = self._door.make_private_server()
            pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(service, server)
            add_health_and_reflection(server, monitor.servicer, [DATA_SERVICE], reflects=False)
            return server

        path = self._private.path / "http"
        self._opened(self._on_private_socket(path, made))
        self._gateway = Gateway(
            GatewayCommand(
                f"unix:{path}",
                options.tls_cert,
                options.tls_key,
                options.tls_client_ca,
                options.log_level,
                options.log_json,
                options.http_max_body << 20,
                options.http_patience_s,
                tuple((options.http_cors_origin or "").split()),
                tuple((options.http_trusted_proxy or "").split()),
                tuple((options.http_host or "").split()),
                on_loopback=is_loopback(address),
                heartbeat_s=options.heartbeat_s,
            )
        )
        try:
            port = self._gateway.open(*split_address(address))
        except GatewayError as error:
            raise GatewayError(f"--http: {error}") from error
        self.http_address = _with_port(address, port)

    def _on_private_socket(self, path: Path, made: Callable[[], aio.Server]) -> aio.Server:
        """A server that listens there once it is started; it is made again should the socket be removed."""
        self._sockets[path] = made
        server = made()
        server.add_insecure_port(f"unix:{path}")
        return server

    async def _watch_sockets(self) -> None:
        """Make private sockets again that something removed, as programs do that tidy up temporary folders.

        The server that listened there keeps its connections: it only gets no new ones.
        """
        told = False
        while True:
            await asyncio.sleep(SOCKETS_S)
            for path, made in self._sockets.items():
                if path.is_socket():
                    continue
                try:
                    self._private.restore()
                    server = made()
                    server.add_insecure_port(f"unix:{path}")
                except (OSError, RuntimeError) as error:
                    if not told:
                        log.error("a private socket was removed and cannot be made again: %s", error)
                    told = True
                    continue
                self._opened(server)
                await server.start()
                told = False
                log.warning("a private socket was removed, and is there again: %s", path)

    def _opened(self, server: aio.Server) -> None:
        self._servers.append(server)
        self._stack.push_async_callback(server.stop, None)


class PrivateFolder:
    """A folder of mode 0700: the sockets in it are ours alone. Those of servers that were killed are removed.

    Its lock says that its server lives.
    """

    def __init__(self) -> None:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(path)) > _LONGEST_PATH:
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self.path = path
        self._lock = self._locked()
        for other in path.parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, or removed meanwhile
                _remove_if_dead(other)

    def restore(self) -> None:
        """Make the folder again, in its place, if it was removed. Raises OSError where another user's is there."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{self.path} is not this server's any more") from None
        if not (self.path / _LOCK).exists():
            os.close(self._lock)
            self._lock = self._locked()

    def _locked(self) -> int:
        """Make the lock; the open file that holds it."""
        new = self.path / "new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # only now, so that nobody finds it without its owner
        return lock

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_dead(folder: Path) -> None:
    """Remove a folder of a server that has ended. Raises OSError where it lives, or nothing can be told."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
