"""What a tenant may use. The values come from the key file; keys of one tenant share them.

A limit that is None is not set: the tenant is bounded by the server's own limits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from pensieve.errors import ResourceExhausted

_Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant, over all of its keys."""

    max_sessions: _Count | None = None
    """Sessions that exist at once."""
    max_stored_bytes: _Count | None = None
    """Bytes that its sessions take in the history store."""
    max_request_bytes: _Count | None = None
    """Bytes of one request on the wire; the server's own limit stays in force."""
    turns_at_once: _Count | None = None
    """Turns that run or wait in the queue."""
    queued_tokens: _Count | None = None
    """Tokens of prompts that wait in the queue, all turns together."""
    tokens_per_minute: _Count | None = None
    """Tokens computed and generated for it, as a mean over a minute."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    """Its part of a loaded server, in relation to the weights of the others; 1 where it is not set."""
    cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Part of each tier of the cache below which nothing of it gives way to another tenant; 0 where it is not set."""


NO_LIMITS = TenantLimits()


class TenantTable:
    """The limits of all tenants, as they are now: ask again for each use, since the key file may change."""

    def __init__(
        self,
        tenants: Mapping[str, TenantLimits] | None = None,
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """``names``: of all that may come, whether they have limits or not."""
        self._tenants: Mapping[str, TenantLimits] = {}
        self._default = NO_LIMITS
        self.tenant_names: frozenset[str] = frozenset()
        self.replace(tenants or {}, default, names)

    def limits(self, tenant: str) -> TenantLimits:
        """The limits of ``tenant``; those for all where it has no entry of its own."""
        return self._tenants.get(tenant, self._default)

    def replace(
        self,
        tenants: Mapping[str, TenantLimits],
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """Put others in force. A field that a tenant's entry leaves open is that of ``default``."""
        self.tenant_names = frozenset(names)
        self._default = default
        self._tenants = {name: _filled(limits, default) for name, limits in tenants.items()}


def _filled(limits: TenantLimits, default: TenantLimits) -> TenantLimits:
    given = {name: value for name in limits.__struct_fields__ if (value := getattr(limits, name)) is not None}
    return msgspec.structs.replace(default, **given)


def quota_exceeded(
    tenant: str, limit: str, what: str, retry_after_s: float | None = None
) -> ResourceExhausted:
    """What a caller gets beyond a limit of its tenant. ``limit``: the field of ``TenantLimits``; ``what``: in words."""
    return ResourceExhausted(
        f"the limit is {what}",
        reason="QUOTA_EXCEEDED",
        metadata={"subject": tenant, "limit": limit},
        retry_after_s=retry_after_s,
    )
