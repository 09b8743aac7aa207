"""Limits per tenant, from the key file. All keys of a tenant share them.

A limit of None is not set: only the server's own limits apply.
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
    max_stored_bytes: _Count | None = None
    max_request_bytes: _Count | None = None
    """Bytes of one request on the wire; the server's own limit applies too."""
    turns_at_once: _Count | None = None
    queued_tokens: _Count | None = None
    """Input tokens waiting in the queue, all turns together."""
    tokens_per_minute: _Count | None = None
    """Tokens computed and generated, averaged over a minute."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    """Weight in sharing a loaded server; 1 if not set."""
    cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Part of each cache tier that other tenants cannot take from it; 0 if not set."""


NO_LIMITS = TenantLimits()


class TenantTable:
    """The present limits of all tenants. Look limits up at each use, since the key file may change."""

    def __init__(
        self,
        tenants: Mapping[str, TenantLimits] | None = None,
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """``names``: all tenants that have a credential, with or without limits."""
        self._tenants: Mapping[str, TenantLimits] = {}
        self._default = NO_LIMITS
        self.tenant_names: frozenset[str] = frozenset()
        self.replace(tenants or {}, default, names)

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of ``tenant``, or the default ones without an entry."""
        return self._tenants.get(tenant, self._default)

    def replace(
        self,
        tenants: Mapping[str, TenantLimits],
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """Replace all limits. Fields that a tenant's entry leaves open are taken from ``default``."""
        self.tenant_names = frozenset(names)
        self._default = default
        self._tenants = {name: _filled(limits, default) for name, limits in tenants.items()}


def _filled(limits: TenantLimits, default: TenantLimits) -> TenantLimits:
    own = {name: value for name in limits.__struct_fields__ if (value := getattr(limits, name)) is not None}
    return msgspec.structs.replace(default, **own)


def quota_exceeded(
    tenant: str, limit: str, description: str, retry_after_s: float | None = None
) -> ResourceExhausted:
    return ResourceExhausted(
        f"the limit is {description}",
        reason="QUOTA_EXCEEDED",
        metadata={"subject": tenant, "limit": limit},
        retry_after_s=retry_after_s,
    )
