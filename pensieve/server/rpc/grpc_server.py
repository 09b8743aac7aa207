"""gRPC servers as this project runs them: options, binding, TLS.

Why the options have these values, with measurements where they decided (grpcio 1.85):

* *One server per port.* By default a second server binds the same port without an error and takes half of the calls.
* *Message size.* The largest request is an imported transcript. This limit applies before decoding, ``RequestLimits``
  after it. Hostile messages grow in memory: 4 MB of empty sub-messages decode to over 100 MB. Therefore fields are
  counted before a large message is decoded, and the interceptor bounds how many bodies are read at once.
* *No growing windows.* gRPC widens a stream's window to the bandwidth of the connection and buffers that much of each
  message before a handler reads it: 100 refused requests of 4 MB left 500 MB behind. A message that a handler reads
  still arrives at full speed.
* *Streams per connection.* One connection is one client. Calls beyond the limit wait inside that client, so one
  client cannot take the whole server. The interceptor limits the calls of all clients together and lets health checks
  through; gRPC's ``maximum_concurrent_rpcs`` cannot tell methods apart and would refuse them under load.
* *Keepalive.* A dead peer is detected after the keepalive time plus the ping timeout. Of the two timeouts only
  ``http2.ping_timeout_ms`` matters: without it, detection took a minute more. Clients may ping every 20 s, also
  between calls (the SDK pings every 30 s); a server that allows less would close their connections.
* *Connections.* Each takes a file descriptor. Without a limit, idle connections could leave none for the store. gRPC
  closes those beyond ``max_allowed_incoming_connections``. It does not tell addresses apart: one caller can take them
  all, so a proxy in front has to limit each.
* *Age of connections.* Connections close after 15 idle minutes, or at an age of 30 minutes, so that load spreads to
  new replicas. Running calls get 10 minutes more, then the client re-attaches.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from pensieve.renewed_files import RenewedTls, TlsFiles

_GRPC_LOG: Final = logging.getLogger("grpc._cython.cygrpc")

RESERVED_FILES: Final = 256
"""File descriptors reserved for the process itself; connections of callers get the rest of its limit."""
MAX_RECEIVE_BYTES: Final = 4 * 1024 * 1024
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_connection_idle_ms", 900_000),
    ("grpc.max_connection_age_ms", 1_800_000),
    ("grpc.max_connection_age_grace_ms", 600_000),
)


class BindError(Exception):
    """A port cannot be bound; the message is for the operator."""


def connection_limit(requested: int) -> int:
    """Return the limit on a port's connections, 0 for none: ``requested``, or for 0 what the file limit leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if requested or files == resource.RLIM_INFINITY:
        return requested
    return max(files - RESERVED_FILES, files // 2)


def make_server(
    interceptors: Sequence[aio.ServerInterceptor], *, max_streams: int | None = None, connections: int = 0
) -> aio.Server:
    """Return an unbound server with this project's options. ``max_streams``: per connection, instead of the default.
    ``connections``: limit on all, 0 for none."""
    options = dict(SERVER_OPTIONS)
    if connections:
        options["grpc.max_allowed_incoming_connections"] = connections
    if max_streams is not None:
        options["grpc.max_concurrent_streams"] = max_streams
    _GRPC_LOG.addFilter(_is_no_lost_answer)
    return aio.server(interceptors=tuple(interceptors), options=tuple(options.items()))


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Filter gRPC's log: for each answer whose client has gone it has an error with a traceback."""
    return record.exc_info is None or not isinstance(record.exc_info[1], aio.InternalError)


def add_health_and_reflection(
    server: aio.Server, servicer: health_aio.HealthServicer, services: Sequence[str], *, reflects: bool = True
) -> None:
    """Serve ``grpc.health.v1``, and with ``reflects`` also reflection of ``services``, health and itself."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflects:
        names = (*services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def bind(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on ``HOST:PORT`` and return the port; port 0 lets the system choose. Raises BindError."""
    check_free(address)
    try:
        if credentials is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: {error}") from error
    if port == 0:
        raise BindError(f"cannot listen on {address}")
    return port


def split_address(address: str) -> tuple[str, int]:
    """Return the host (without brackets) and port of ``HOST:PORT``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Raise BindError with the system's reason if the address cannot be bound: gRPC reports no reason."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror or error}") from error


def tls_credentials(cert: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Return TLS credentials from PEM files. Renewed files are used from the next connection on.

    With ``client_ca`` every client must show a certificate signed by one of these authorities. Raises BindError for
    files that cannot be used.
    """
    files = TlsFiles(cert, key, client_ca)

    def load() -> grpc.ServerCertificateConfiguration:
        files.context()  # gRPC would name neither the file nor the fault, and takes no authorities for some
        pairs = [(key.read_bytes(), cert.read_bytes())]
        roots = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=roots)

    try:
        tls = RenewedTls(files, load)
    except OSError as error:
        raise BindError(str(error)) from error
    return grpc.dynamic_ssl_server_credentials(
        tls.current,
        lambda: tls.current if tls.renew() else None,
        require_client_authentication=client_ca is not None,
    )
