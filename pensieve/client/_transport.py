"""Channel setup for both clients: target, credentials, options and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pensieve import tracing
from pensieve.client._retry import RetryPolicy
from pensieve.client.identity import identity_credentials
from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2_grpc

ROUTE_KEY = "x-session-route"
MAX_TIMEOUT_S = 1e9
"""Seconds. gRPC treats a timeout somewhat above this, infinity included, as already expired."""

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Only the SDK retries: it bounds the tries and knows what may be sent again. gRPC's own retries can also hang: a
    # call whose server is killed within a millisecond never ends, and cannot be cancelled.
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # This one bounds the time to detect a dead peer.
    # While gRPC waits to reconnect every call fails at once. Its default wait grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The arguments of a client."""

    target: str
    """``HOST:PORT`` or any gRPC target. A leading ``pensieve://`` is removed."""
    api_key: str | None = None
    """Sent as ``authorization: Bearer KEY``."""
    tls: bool = False
    """TLS with the system's root certificates."""
    credentials: grpc.ChannelCredentials | Path | None = None
    """TLS with custom roots or a client certificate, or the file for ``identity_credentials``; implies ``tls``."""
    timeout: float = 60.0
    """Seconds for each call that is not a turn, retries included."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    options: Sequence[tuple[str, Any]] = ()
    """Additional channel options; they override ours."""
    more_metadata: Sequence[tuple[str, str | bytes]] = ()

    def __post_init__(self) -> None:
        """Raise InvalidArgument for values that gRPC would reject on each try, as if the server were away."""
        scheme, separator, _ = self.target.partition("://")
        if separator and scheme in ("http", "https", "grpc", "grpcs"):
            tls = ", with tls=True" if scheme.endswith("s") else ""
            raise InvalidArgument.field("target", f"must be HOST:PORT{tls}, got {self.target!r}")
        key = "" if self.api_key is None else self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise InvalidArgument.field(
                "api_key", "must consist of printable ASCII characters, such as ck_ID_SECRET"
            )

    @property
    def address(self) -> str:
        return self.target.removeprefix("pensieve://")

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None for plain text. Raises OSError for a file that cannot be used."""
        if isinstance(self.credentials, Path):
            return identity_credentials(self.credentials)
        if self.credentials is not None:
            return self.credentials
        return grpc.ssl_channel_credentials() if self.tls else None

    @property
    def channel_options(self) -> list[tuple[str, Any]]:
        return list({**dict(CHANNEL_OPTIONS), **dict(self.options)}.items())

    def metadata(self, session: str, traceparent: str = "") -> list[tuple[str, str | bytes]]:
        """Return the metadata of one call: routing key for proxies, trace context, credential."""
        pairs: list[tuple[str, str | bytes]] = [(ROUTE_KEY, session)] if session else []
        pairs += self.more_metadata
        given = any(name == tracing.HEADER for name, _ in self.more_metadata)
        if not given and (header := traceparent or tracing.outgoing_traceparent()):
            pairs.append((tracing.HEADER, header))
        if self.api_key is not None:
            # A key that was read from a file may end with a newline.
            pairs.append(("authorization", f"Bearer {self.api_key.strip()}"))
        return pairs


def open_channel(settings: ClientSettings, library: Any) -> tuple[Any, Any]:
    """Open a channel and stub with ``library``, which is ``grpc`` or ``grpc.aio``."""
    make_stub: Any = pensieve_pb2_grpc.ConversationServiceStub  # Generated code has no annotations.
    credentials = settings.channel_credentials
    if credentials is None:
        channel = library.insecure_channel(settings.address, options=settings.channel_options)
    else:
        channel = library.secure_channel(settings.address, credentials, options=settings.channel_options)
    return channel, make_stub(channel)
