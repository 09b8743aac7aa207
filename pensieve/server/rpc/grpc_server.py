"""gRPC servers as this project runs them: options, binding, TLS.

Why the options of both servers are what they are, with what was measured where that decided (grpcio 1.85):

* *One server per port.* By default a second server binds the same port without an error and takes half of the calls.
* *Message size.* The largest request is an imported transcript; ``RequestLimits`` is checked after decoding, this
  before. Hostile messages grow in memory: 4 MB of empty sub-messages decode to over 100 MB, which is why fields are
  counted before a large message is decoded, and the interceptor bounds how many bodies are read at once.
* *No growing windows.* gRPC widens the window of a stream to what the connection carries, and buffers so much of each
  message before anybody reads it: 100 refused requests of 4 MB left 500 MB behind. A message that is being read is
  still taken as fast as it comes.
* *Streams per connection.* One connection is one client. Calls beyond the limit wait inside that client, so it keeps
  one client from taking the whole server. The bound on calls of all clients is the interceptor's, which lets
  health checks through; gRPC's ``maximum_concurrent_rpcs`` knows no methods and would refuse them under load.
* *Keepalive.* A dead peer is noticed after the keepalive time plus the ping timeout. Of the two timeouts
  ``http2.ping_timeout_ms`` is the one that counts: without it, noticing took a minute more. Clients may ping every 20 s
  (the SDK does every 30 s), also between calls; a server that allows less would close their connections for it.
* *Connections.* Each takes a file, and a process may open so many; without a limit of their own, connections that do
  nothing would leave none for the store. gRPC closes what comes beyond ``max_allowed_incoming_connections``. It knows
  no addresses: one caller can take all of them, so a proxy in front has to limit each.
* *Age of connections.* They are closed when they are idle for 15 minutes or have lived for 30, so that load spreads
  over replicas that came later. Running calls get 10 minutes more, then the client re-attaches.
"""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

log = logging.getLogger(__name__)

FILES_KEPT: Final = 256
"""Files that the process keeps for itself: callers' connections get the rest of its limit."""
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
    """A port cannot be listened on; the text is for the operator."""


def connection_limit(asked: int) -> int:
    """How many connections a port may have, 0: any number. It is ``asked``, or for 0 what the limit on files leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if asked or files == resource.RLIM_INFINITY:
        return asked
    return max(files - FILES_KEPT, files // 2)


def make_server(
    interceptors: Sequence[aio.ServerInterceptor], *, most_streams: int | None = None, connections: int = 0
) -> aio.Server:
    """A server with this project's options, not yet bound. ``most_streams``: of a connection, for another limit.
    ``connections``: to it at once; 0: any number."""
    options = dict(SERVER_OPTIONS)
    if connections:
        options["grpc.max_allowed_incoming_connections"] = connections
    if most_streams is not None:
        options["grpc.max_concurrent_streams"] = most_streams
    return aio.server(interceptors=tuple(interceptors), options=tuple(options.items()))


def add_health_and_reflection(
    server: aio.Server, servicer: health_aio.HealthServicer, services: Sequence[str], *, reflects: bool = True
) -> None:
    """Serve ``grpc.health.v1`` and, if it ``reflects``, describe ``services``, health and reflection themselves."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflects:
        names = (*services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def bind(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on ``HOST:PORT``; the port, found by the system when it was 0. Raises BindError."""
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
    """Host (without brackets) and port of ``HOST:PORT``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """grpc says only that binding failed; the system says why. Raises BindError."""
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
    """TLS with these PEM files; renewed ones are used from the next connection on. Raises OSError, and BindError for
    files that are none.

    With ``client_ca`` every client has to show a certificate that one of these authorities signed.
    """

    def stamp() -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in (cert, key, client_ca) if path is not None)

    def load() -> grpc.ServerCertificateConfiguration:
        pairs = [(key.read_bytes(), cert.read_bytes())]
        roots = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=roots)

    try:  # gRPC would say no more than that the port cannot be bound
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise BindError(
            f"--tls-cert, --tls-key: {cert} and {key} are not a certificate in PEM and its key"
        ) from error
    known = stamp()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        try:
            now = stamp()
            if now == known:
                return None
            configuration = load()
        except OSError as error:
            log.error("certificate not read again, the one in force stays: %s", error)
            return None
        known = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        load(), renewed, require_client_authentication=client_ca is not None
    )
