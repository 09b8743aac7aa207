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
    """Clients of the service that are kept: for each credential one, and more while it has many requests."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the door from a browser; none unless said."""
    shows_metrics: bool = True
    """Serve ``/metrics``; not where a server's admin port shows them."""
    vouches: bool = False
    """The service believes what the door says of its callers' certificates and addresses, as on a server's private
    socket."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of the proxies that are believed when they say for whom they call (X-Forwarded-For)."""
    on_loopback: bool = False
    """Callers reach the door on this machine only. If they need no key there, it is served under names of this machine
    and ``hosts``, so that a page of another site cannot reach it through a browser under a name of its own."""
    hosts: tuple[str, ...] = ()
    """More names that callers may use for it."""
    wants_keys: bool = False
    """Refuse calls while the service lets in callers without a key: the door is open to a network."""
    heartbeat_s: float = 10.0
    """Longest silence on a stream."""
