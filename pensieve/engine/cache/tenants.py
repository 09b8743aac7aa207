"""Whose pages there are, and what each tenant keeps of a tier whatever others do: its share.

A share is a part of each tier. While a tenant has no more pages of a tier than that, no turn of another takes one of
them: from the device its chunks do not give way, and on the host they are not dropped. What gives way on the device
finds room on the host as long as its tenant has less than its share there. Its own turns evict its own chunks as ever,
and what it does not use is everybody's.

A share is no reservation of pages. A turn joins the batch only if it can have its pages without them, but one that
nothing else runs beside, or that has begun and has nowhere else to turn, takes any page that no request uses: no share
can stop a request that fits an empty cache, and the largest context stays as large as the device. A second copy on the
host of what a running request has on the device counts as held, and may go at any time: nothing is lost by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from pensieve.engine.cache.tiers import PagePool, Tiers

Allowance = Mapping[int, int]
"""How many pages may be taken from each tenant with a share, by its number; from all others, any."""
UNLIMITED: Allowance = {}
TenantTokens = dict[str, tuple[int, int]]
"""Of each tenant with any, by name: KV-tokens that its pages have room for, on the device and on the host."""
TENANT_REPORT_INTERVAL_S: Final = 0.5
NO_TENANT: Final = -1
"""No tenant: copies ahead of time are for whoever comes."""


class TenantShares:
    """Numbers of all tenants that were seen, and their shares. The counts of pages and pins are those of the tiers."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._told = -math.inf
        self._numbers: dict[str, int] = {}
        self._shares: dict[int, float] = {}
        """Those above 0."""

    def number(self, tenant: str) -> int:
        """The number that stands for a tenant in the cache: 0, 1, … as they come."""
        return self._numbers.setdefault(tenant, len(self._numbers))

    def set_share(self, tenant: str, share: float) -> None:
        """A tenant's share is this from now on; 0: it has none. Shares of all that have one add up to 1 at most, or the
        first to come find their part gone."""
        number = self.number(tenant)
        if share > 0:
            self._shares[number] = share
        else:
            self._shares.pop(number, None)

    @property
    def has_shares(self) -> bool:
        """Whether any tenant has a share: else nothing depends on whose a page is."""
        return bool(self._shares)

    def tokens_by_tenant(self) -> TenantTokens:
        """What every tenant holds of both tiers. Chunks that its sessions share count once."""
        device, host, size = self._tiers.device.held, self._tiers.host.held, self._tiers.chunk_tokens
        pages = ((name, device.get(number, 0), host.get(number, 0)) for name, number in self._numbers.items())
        return {name: (one * size, other * size) for name, one, other in pages if one or other}

    def tokens_if_due(self, now: float) -> TenantTokens | None:
        """``held``, or None when it was told a moment ago: with many tenants it is no small part of a report."""
        if now - self._told < TENANT_REPORT_INTERVAL_S:
            return None
        self._told = now
        return self.tokens_by_tenant()

    def is_below(self, pool: PagePool, tenant: int) -> bool:
        """Whether a tenant has fewer pages of a tier than its share."""
        return tenant in self._shares and pool.held[tenant] < self._pages(pool, tenant)

    def allowance(self, pool: PagePool, tenant: int) -> Allowance:
        """What an eviction for a turn of ``tenant`` may take of a tier."""
        if not self._shares:
            return UNLIMITED
        return {one: max(pool.held[one] - self._pages(pool, one), 0) for one in self._shares if one != tenant}

    def same_allowance(self, pages: int) -> Allowance:
        """So many from each tenant, whatever its share: for a turn that finds nothing else, and takes no more than it
        needs, even where a policy lets chunks go in groups."""
        return dict.fromkeys(self._shares, pages)

    def pages_withheld_from(self, tenant: str) -> int:
        """Device pages that no request uses and that are not for a turn of this tenant."""
        kept = 0
        device = self._tiers.device
        for one, most in self.allowance(device, self.number(tenant)).items():
            idle = device.held[one] - self._tiers.pinned_by[one]
            kept += max(idle - most, 0)
        return kept

    def _pages(self, pool: PagePool, tenant: int) -> int:
        """A share in pages, rounded down."""
        return int(self._shares[tenant] * pool.capacity + 1e-9)
