"""How a channel is set up: target, credentials, options, metadata. The same for both clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from pensieve import tracing
from pensieve.client._retry import RetryPolicy
from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2_grpc

ROUTE_KEY = "x-session-route"
MAX_TIMEOUT_S = 1e9
"""Seconds. Somewhat beyond, infinity included, gRPC takes a timeout for one that has passed."""

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # All tries are made by the SDK, which bounds them and knows what may be sent again. The library's own also hang: of
    # a call whose server is killed within a millisecond nothing more is heard, and cancelling does not end it.
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # The one that bounds detection of a dead peer.
    # While the library waits to connect again every call fails at once; by default it comes to wait for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client was made with."""

    target: str
    """``HOST:PORT`` or any gRPC target; a leading ``pensieve://`` is dropped."""
    api_key: str | None = None
    """Sent as ``authorization: Bearer KEY``."""
    tls: bool = False
    """TLS with the system's root certificates."""
    credentials: grpc.ChannelCredentials | None = None
    """TLS with other roots or a client certificate; implies ``tls``."""
    timeout: float = 60.0
    """Seconds for each call that is not a turn."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    options: Sequence[tuple[str, Any]] = ()
    """More channel options; a later one wins over ours."""
    more_metadata: Sequence[tuple[str, str | bytes]] = ()
    """Sent with every call."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what gRPC would refuse at each try, as if the server were away."""
        if self.target.startswith(("http://", "https://")):
            tls = ", with tls=True" if self.target.startswith("https") else ""
            raise InvalidArgument.field("target", f"must be HOST:PORT{tls}, got {self.target!r}")
        key = "" if self.api_key is None else self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise InvalidArgument.field(
                "api_key", "must be of printable ASCII characters, such as ck_ID_SECRET"
            )

    @property
    def address(self) -> str:
        return self.target.removeprefix("pensieve://")

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: plain text."""
        if self.credentials is not None:
            return self.credentials
        return grpc.ssl_channel_credentials() if self.tls else None

    @property
    def channel_options(self) -> list[tuple[str, Any]]:
        return list({**dict(CHANNEL_OPTIONS), **dict(self.options)}.items())

    def metadata(self, session: str, traceparent: str = "") -> list[tuple[str, str | bytes]]:
        """Metadata of one call: the routing key for proxies, the trace it belongs to, and the credential."""
        pairs: list[tuple[str, str | bytes]] = [(ROUTE_KEY, session)] if session else []
        pairs += self.more_metadata
        given = any(name == tracing.HEADER for name, _ in self.more_metadata)
        if not given and (header := traceparent or tracing.outgoing_traceparent()):
            pairs.append((tracing.HEADER, header))
        if self.api_key is not None:
            # A key that was read from a file comes with the end of its line.
            pairs.append(("authorization", f"Bearer {self.api_key.strip()}"))
        return pairs


def open_channel(settings: ClientSettings, library: Any) -> tuple[Any, Any]:
    """Channel and stub of ``library``, which is ``grpc`` or ``grpc.aio``."""
    make_stub: Any = pensieve_pb2_grpc.ConversationServiceStub  # Generated code has no annotations.
    credentials = settings.channel_credentials
    if credentials is None:
        channel = library.insecure_channel(settings.address, options=settings.channel_options)
    else:
        channel = library.secure_channel(settings.address, credentials, options=settings.channel_options)
    return channel, make_stub(channel)
