"""Bytes by tenant, and the share of each tier that each tenant keeps whatever others do.

A share is a fraction of each tier. While a tenant holds no more pages of a tier than its share, turns of
other tenants take none of them: its chunks are not evicted from the device and not dropped from the host.
Chunks evicted from the device find room on the host as long as their tenant is below its share there. A
tenant's own turns still evict its own chunks, and pages that it does not use are open to all.

A share does not reserve pages. A turn joins the batch only if it can get its pages without the shares of others. But
a turn that runs alone, or that has begun and finds no other page, takes any page that no request uses. So no share
can stop a request that fits an empty cache, and the largest context stays as large as the device. A host copy of a
chunk that a running request has on the device counts as held, but may be evicted at any time: nothing is lost by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from pensieve.engine.cache.pages import PagePool
from pensieve.engine.cache.tiers import Tiers

Allowance = Mapping[int, int]
"""Bytes that may be taken from each tenant with a share, by tenant number. No limit for all others."""
UNLIMITED: Allowance = {}
TenantTokens = dict[str, tuple[int, int]]
"""By name of each tenant with pages: tokens that they have room for, on the device and on the host."""
TENANT_REPORT_INTERVAL_S: Final = 0.5
NO_TENANT: Final = -1
"""Stands for no tenant: copies ahead of time serve whichever turn comes next."""


class TenantShares:
    """Numbers and shares of all tenants seen. The tiers count pages and pins."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._reported_at = -math.inf
        self._numbers: dict[str, int] = {}
        self._shares: dict[int, float] = {}
        """Shares above 0, by tenant number."""

    def number(self, tenant: str) -> int:
        """Return the tenant's number in the cache: 0, 1, … in order of appearance."""
        return self._numbers.setdefault(tenant, len(self._numbers))

    def set_share(self, tenant: str, share: float) -> None:
        """Set a tenant's share; 0: none. If shares add up to more than 1, no tenant is sure of its own."""
        number = self.number(tenant)
        if share > 0:
            self._shares[number] = share
        else:
            self._shares.pop(number, None)

    @property
    def has_shares(self) -> bool:
        """Whether any tenant has a share. Otherwise evictions do not depend on tenants."""
        return bool(self._shares)

    def tokens_by_tenant(self) -> TenantTokens:
        """Return what each tenant holds of both tiers. Chunks that its sessions share count once."""
        device, host, tokens = self._tiers.device.held, self._tiers.host.held, self._tiers.tokens
        held = ((name, device.get(number, 0), host.get(number, 0)) for name, number in self._numbers.items())
        return {name: (tokens(one), tokens(other)) for name, one, other in held if one or other}

    def tokens_if_due(self, now: float) -> TenantTokens | None:
        """Return ``tokens_by_tenant`` once per interval, else None: with many tenants it is a large part of a
        report."""
        if now - self._reported_at < TENANT_REPORT_INTERVAL_S:
            return None
        self._reported_at = now
        return self.tokens_by_tenant()

    def is_below(self, pool: PagePool, tenant: int) -> bool:
        """Whether a tenant has less of a tier than its share."""
        return tenant in self._shares and pool.held[tenant] < self._bytes(pool, tenant)

    def allowance(self, pool: PagePool, tenant: int) -> Allowance:
        """Return what an eviction for a turn of ``tenant`` may take of a tier."""
        if not self._shares:
            return UNLIMITED
        return {one: max(pool.held[one] - self._bytes(pool, one), 0) for one in self._shares if one != tenant}

    def same_allowance(self, num_bytes: int) -> Allowance:
        """Allow so much from each tenant whatever its share, for a turn that finds no other page. The limit
        matters where a policy evicts chunks in groups."""
        return dict.fromkeys(self._shares, num_bytes)

    def bytes_withheld_from(self, tenant: str) -> int:
        """Return the unpinned bytes of the device that a turn of this tenant may not take."""
        kept = 0
        device = self._tiers.device
        for one, most in self.allowance(device, self.number(tenant)).items():
            idle = device.held[one] - self._tiers.pinned_by[one]
            kept += max(idle - most, 0)
        return kept

    def _bytes(self, pool: PagePool, tenant: int) -> int:
        """Return a share in bytes, rounded down."""
        return int(self._shares[tenant] * pool.size_bytes + 1e-9)
