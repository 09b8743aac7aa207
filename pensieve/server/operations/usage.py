"""What each tenant uses: of this server since it was started, of its cache now, and of the history store."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pensieve.errors import PensieveError
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore, TenantUsage

log = logging.getLogger(__name__)

PATIENCE_S: Final = 2.0
"""How long the history store may take to tell of all tenants."""
LOOK_S: Final = 15.0
"""Between two looks for metrics."""

CacheUse = Mapping[str, tuple[int, int]]
"""Tokens that a tenant's pages have room for, on the device and on the host."""


@dataclass(slots=True)
class TenantCounts:
    """What one tenant came to, since the server was started."""

    turns: int = 0
    """That ended."""
    refused: int = 0
    """Turns, before they began."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant uses."""

    tenant: str
    counts: TenantCounts
    device_tokens: int
    host_tokens: int
    stored: TenantUsage | None
    """None: the history store did not answer."""


class UsageTracker:
    """One per process. Used on one event loop."""

    def __init__(
        self, store: HistoryStore, held: Callable[[], CacheUse], named: Callable[[], Iterable[str]]
    ) -> None:
        """``held``: of whom the cache holds anything, as the engine said last; ``named``: who may come."""
        self._store = store
        self._held = held
        self._named = named
        self._counts: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        self.latest: list[TenantUse] = []
        """What ``watch`` saw last."""

    @property
    def cache_use(self) -> CacheUse:
        """As the engine said last."""
        return self._held()

    def turn_ended(self, end: TurnEnd) -> None:
        counts, usage = self._counts[end.key.tenant], end.usage
        counts.turns += 1
        counts.computed_tokens += usage.new_tokens + usage.recomputed_tokens
        counts.cached_tokens += usage.gpu_cached_tokens + usage.swapped_in_tokens
        counts.output_tokens += usage.output_tokens

    def turn_refused(self, tenant: str) -> None:
        self._counts[tenant].refused += 1

    async def for_tenant(self, tenant: str) -> TenantUse:
        """What one tenant uses."""
        return (await self._look([tenant]))[0]

    async def for_all_tenants(self) -> list[TenantUse]:
        """Those that may come, were here or hold anything, by name."""
        return await self._look(sorted({*self._named(), *self._counts, *self._held()}))

    async def watch(self, interval_s: float = LOOK_S) -> None:
        """``all`` every ``interval_s``, until cancelled."""
        while True:
            self.latest = await self.for_all_tenants()
            await asyncio.sleep(interval_s)

    async def _look(self, tenants: list[str]) -> list[TenantUse]:
        stored: dict[str, TenantUsage] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                for tenant in tenants:
                    stored[tenant] = await self._store.usage(tenant)
        except (TimeoutError, PensieveError) as error:
            log.warning("the history store does not tell what tenants store: %s", type(error).__name__)
        held, nothing = self._held(), TenantCounts()
        return [
            TenantUse(name, self._counts.get(name, nothing), *held.get(name, (0, 0)), stored.get(name))
            for name in tenants
        ]
