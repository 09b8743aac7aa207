"""The server's ports: the gRPC port, the admin port, and the HTTP door with its private socket.

Ports are bound first, so that a taken port is reported before a model is loaded. They take calls after ``start``,
except for health on the admin port, which answers from the beginning. All calls pass one ``AccessControl``.

The admin service is on the admin port and, if there are keys, on the gRPC port too. With keys, both require the scope
``admin``. Without keys every caller of the gRPC port could drain the server, so the service is not there.
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

from pensieve.config import DoorSettings
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
from pensieve.server.rpc.grpc_server import (
    BindError,
    add_health_and_reflection,
    bind,
    check_free,
    connection_limit,
    split_address,
    tls_credentials,
)
from pensieve.server.rpc.interceptor import DEFAULT_IN_FLIGHT, AccessControl
from pensieve.server.rpc.service import AdminService, ConversationService
from pensieve.server.tasks import cancel_and_wait
from pensieve.v1 import pensieve_pb2_grpc

log = logging.getLogger(__name__)

_STDOUT: Final = 1
DATA_SERVICE: Final = "pensieve.v1.ConversationService"
ADMIN_SERVICE: Final = "pensieve.v1.AdminService"
LAST_CALLS_S: Final = 2.0
_LONGEST_PATH: Final = 90
"""Longest folder for Unix sockets: the system allows 107 bytes including the name."""
SOCKET_CHECK_S: Final = 1.0
_PREFIX: Final = "pensieve-"
_LOCK: Final = "lock"


class Ports:
    """The ports of one server. Opened parts are pushed on the given stack, which closes them."""

    def __init__(self, options: ServeOptions, access: AccessControl, stack: AsyncExitStack) -> None:
        self._options = options
        self._access = access
        self._stack = stack
        self._servers: list[aio.Server] = []
        self._gateway: Gateway | None = None
        self._folder = PrivateFolder()
        stack.callback(self._folder.close)
        self._sockets: dict[Path, Callable[[], aio.Server]] = {}
        self.grpc_address = self.admin_address = self.http_address = ""

    def say_ready(self) -> None:
        """Print the ready line. The program that started the server may have gone since."""
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
                check_free(address)  # the admin port too, though it opens later: nothing has been started yet
            except BindError as error:
                raise BindError(f"--{name}: {error}") from error
        credentials = None
        if options.tls_cert is not None and options.tls_key is not None:
            credentials = tls_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
        # Calls that the engine would run or queue must get in; a full queue has its own error.
        max_in_flight = max(DEFAULT_IN_FLIGHT, 2 * options.max_queued)
        server = self._access.make_server(max_in_flight, connection_limit(options.max_connections))
        service = ConversationService(conversations)
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(service, server)
        self._admin = AdminService(link, conversations, options.device_cache)
        keyless = options.api_keys is None
        if not keyless:
            pensieve_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        # Without a key, callers must not even list the services; operators can on the admin port.
        add_health_and_reflection(server, monitor.servicer, [DATA_SERVICE], reflects=keyless)
        try:
            port = bind(server, options.listen, credentials)
        except BindError as error:
            raise BindError(f"--listen: {error}") from error
        self._add_server(server)
        self.grpc_address = _with_port(options.listen, port)
        if options.http is not None:
            self._bind_http(options.http, service, monitor)

    async def open_admin(self, monitor: HealthMonitor, metrics: Metrics, page: WebPage) -> None:
        """Open the admin port and start the HTTP door's process. Call after ``bind``. Raises BindError."""
        grpc_socket = self._folder.path / "admin"

        def make_server() -> aio.Server:
            server = self._access.make_server()
            pensieve_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
            add_health_and_reflection(server, monitor.servicer, [ADMIN_SERVICE, DATA_SERVICE])
            return server

        server = self._on_private_socket(grpc_socket, make_server)
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
        door = self._gateway
        if door is None:
            return None
        return HttpDoorState(door.state, self.http_address, round(door.since_s, 3), door.restarts)

    async def start(self) -> None:
        """Take calls. Raises GatewayError."""
        for server in self._servers:
            await server.start()
        watching = asyncio.create_task(self._restore_sockets(), name="private sockets")
        self._stack.push_async_callback(cancel_and_wait, watching)
        if self._gateway is not None:
            await self._gateway.ready()

    async def drain(self) -> None:
        """The HTTP door refuses new calls. The gRPC service answers new turns with DRAINING itself."""
        if self._gateway is not None:
            await self._gateway.drain()

    async def end(self) -> None:
        """End all calls, those of the HTTP door first. The last answers have ``LAST_CALLS_S``."""
        if self._gateway is not None:
            await self._gateway.finish(LAST_CALLS_S)
        for server in self._servers:
            await server.stop(LAST_CALLS_S)

    def _bind_http(self, address: str, service: ConversationService, monitor: HealthMonitor) -> None:
        options = self._options

        def make_server() -> aio.Server:
            server = self._access.make_private_server()
            pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(service, server)
            add_health_and_reflection(server, monitor.servicer, [DATA_SERVICE], reflects=False)
            return server

        path = self._folder.path / "http"
        self._add_server(self._on_private_socket(path, make_server))
        settings = DoorSettings(
            f"unix:{path}",
            max_body_bytes=options.http_max_body << 20,
            patience_s=options.http_patience_s,
            cors_origins=tuple((options.http_cors_origin or "").split()),
            shows_metrics=False,
            vouches=True,
            proxies=tuple((options.http_trusted_proxy or "").split()),
            hosts=tuple((options.http_host or "").split()),
            on_loopback=is_loopback(address),
            heartbeat_s=options.heartbeat_s,
        )
        self._gateway = Gateway(
            GatewayCommand(
                settings,
                options.tls_cert,
                options.tls_key,
                options.tls_client_ca,
                options.log_level,
                options.log_json,
            )
        )
        try:
            port = self._gateway.open(*split_address(address))
        except GatewayError as error:
            raise GatewayError(f"--http: {error}") from error
        self.http_address = _with_port(address, port)

    def _on_private_socket(self, path: Path, make_server: Callable[[], aio.Server]) -> aio.Server:
        """Return a server that will listen on a private socket. It is recreated if the socket is removed."""
        self._sockets[path] = make_server
        server = make_server()
        server.add_insecure_port(f"unix:{path}")
        return server

    async def _restore_sockets(self) -> None:
        """Recreate private sockets that were removed, for example by programs that clean temporary folders. The old
        server keeps its connections but gets no new ones."""
        reported = False
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            for path, make_server in self._sockets.items():
                if path.is_socket():
                    continue
                try:
                    self._folder.restore()
                    server = make_server()
                    server.add_insecure_port(f"unix:{path}")
                except (OSError, RuntimeError) as error:
                    if not reported:
                        log.error("a private socket was removed and cannot be made again: %s", error)
                    reported = True
                    continue
                self._add_server(server)
                await server.start()
                reported = False
                log.warning("a private socket was removed, and is there again: %s", path)

    def _add_server(self, server: aio.Server) -> None:
        self._servers.append(server)
        self._stack.push_async_callback(server.stop, None)


class PrivateFolder:
    """A folder of mode 0700 for this server's sockets. Removes the folders of servers that were killed. A locked file
    in the folder shows that its server is alive."""

    def __init__(self) -> None:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(path)) > _LONGEST_PATH:
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self.path = path
        self._lock = self._create_lock()
        for other in path.parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, or removed meanwhile
                _remove_if_dead(other)

    def restore(self) -> None:
        """Recreate the folder if it was removed. Raises OSError if another user's folder is in its place."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(f"{self.path} does not belong to this server") from None
        if not (self.path / _LOCK).exists():
            # In this order: should there be no room for a new one, the old number must not be closed again.
            before, self._lock = self._lock, self._create_lock()
            os.close(before)

    def _create_lock(self) -> int:
        new = self.path / "new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # renamed only once locked, so that no other server sees it unlocked
        return lock

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_dead(folder: Path) -> None:
    """Remove the folder of a server that has ended. Raises OSError if it is alive or cannot be checked."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
