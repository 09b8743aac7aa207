"""The operator's settings of the door."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Times are in seconds. Bounds hold before a body is parsed."""

    target: str
    """HOST:PORT of the conversation service, or any gRPC target."""
    tls: bool = False
    """Use TLS towards ``target``, with the system's root certificates."""
    patience_s: float = 20.0
    """Total time spent retrying an unreachable or busy service before the caller gets the error."""
    max_body_bytes: int = 4 * 1024 * 1024
    chat_ttl_s: float = 24 * 3600.0
    """Idle lifetime of a session made by a chat completion: its client keeps the history anyway."""
    completion_ttl_s: float = 600.0
    """Idle lifetime of a session made by a completion: until then the same prompt finds its state cached."""
    unstored_ttl_s: float = 600.0
    """Idle lifetime of a session that is deleted with its answer, in case the deletion fails."""
    max_heads: int = 100_000
    max_callers: int = 256
    """SDK clients that are kept: one per credential, more while it has many requests."""
    cors_origins: tuple[str, ...] = ()
    shows_metrics: bool = True
    """Serve ``/metrics``. False where a server's admin port serves them."""
    vouches: bool = False
    """The service trusts the certificate names and addresses that the door passes on, as on a server's private
    socket."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose X-Forwarded-For is trusted."""
    on_loopback: bool = False
    """The door is reachable from this machine only. While it needs no key, it answers only to names of this
    machine and ``hosts``, so that another site's page cannot reach it under its own name (DNS rebinding)."""
    hosts: tuple[str, ...] = ()
    wants_keys: bool = False
    """Refuse calls while the service accepts callers without a key: the door is open to a network."""
    heartbeat_s: float = 10.0
    """Longest silence on a stream."""
