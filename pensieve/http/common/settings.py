"""What an operator may set of the door. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Bounds are checked before a body is parsed, times are seconds."""

    target: str
    """HOST:PORT of the conversation service, or any gRPC target."""
    tls: bool = False
    """TLS towards ``target``, with the system's root certificates."""
    patience_s: float = 20.0
    """Sum of the waits for a service that is away or busy, before its caller is told."""
    max_body_bytes: int = 4 * 1024 * 1024
    chat_ttl_s: float = 24 * 3600.0
    """Idle lifetime of a session that a chat completion made: its client keeps the history anyway."""
    completion_ttl_s: float = 600.0
    """Of a session that a completion made: so long the same prompt finds its state cached."""
    unstored_ttl_s: float = 600.0
    """Of a session that is deleted with its answer, in case that fails."""
    max_heads: int = 100_000
    """Ends of conversations that are remembered, so that who resends a history is found to go on with it."""
    max_callers: int = 256
    """Connections to the service that are kept: for each credential one, and more while it has many requests."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the door from a browser; none unless said."""
    shows_metrics: bool = True
    """Serve ``/metrics``; not where a server's admin port shows them."""
    vouches: bool = False
    """The service believes what the door says of its callers' certificates and addresses, as on a server's private
    socket."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of the proxies that are believed when they say for whom they call (X-Forwarded-For)."""
