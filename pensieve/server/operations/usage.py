"""Usage per tenant: turns and tokens since the start, cache tokens now, sessions and bytes in the store."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pensieve.errors import PensieveError
from pensieve.server.failures import report_bug
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore, TenantUsage

log = logging.getLogger(__name__)

STORE_TIMEOUT_S: Final = 2.0
POLL_S: Final = 15.0

CacheUse = Mapping[str, tuple[int, int]]
"""Tenant → token slots of its pages on the device and on the host."""


@dataclass(slots=True)
class TenantCounts:
    turns: int = 0
    refused: int = 0
    """Turns refused before they began."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantUse:
    tenant: str
    counts: TenantCounts
    device_tokens: int
    host_tokens: int
    stored: TenantUsage | None
    """None: the history store did not answer."""


class UsageTracker:
    """Usage of all tenants. One per process, used on one event loop."""

    def __init__(
        self,
        store: HistoryStore,
        cache_use: Callable[[], CacheUse],
        known_tenants: Callable[[], Iterable[str]],
    ) -> None:
        """``cache_use``: as the engine reported it last. ``known_tenants``: all that have a credential."""
        self._store = store
        self._cache_use = cache_use
        self._known_tenants = known_tenants
        self._counts: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        self.latest: list[TenantUse] = []

    @property
    def cache_use(self) -> CacheUse:
        return self._cache_use()

    def turn_ended(self, end: TurnEnd) -> None:
        counts, usage = self._counts[end.key.tenant], end.usage
        counts.turns += 1
        counts.computed_tokens += usage.new_tokens + usage.recomputed_tokens
        counts.cached_tokens += usage.gpu_cached_tokens + usage.swapped_in_tokens
        counts.output_tokens += end.generated_tokens

    def turn_refused(self, tenant: str) -> None:
        self._counts[tenant].refused += 1

    async def for_tenant(self, tenant: str) -> TenantUse:
        return (await self._read([tenant]))[0]

    async def for_all_tenants(self) -> list[TenantUse]:
        """Return the usage of every tenant with a credential, a count or cached state, sorted by name."""
        return await self._read(sorted({*self._known_tenants(), *self._counts, *self._cache_use()}))

    async def watch(self, interval_s: float = POLL_S) -> None:
        while True:
            try:
                self.latest = await self.for_all_tenants()
            except Exception as error:
                report_bug(error, "reading the usage of tenants")
            await asyncio.sleep(interval_s)

    async def _read(self, tenants: list[str]) -> list[TenantUse]:
        stored: dict[str, TenantUsage] = {}
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                for tenant in tenants:
                    stored[tenant] = await self._store.usage(tenant)
        except (TimeoutError, PensieveError) as error:
            log.warning(
                "the usage of tenants cannot be read from the history store: %s", type(error).__name__
            )
        cache_use, nothing = self._cache_use(), TenantCounts()
        return [
            TenantUse(name, self._counts.get(name, nothing), *cache_use.get(name, (0, 0)), stored.get(name))
            for name in tenants
        ]
