"""Limits of what tenants store: sessions and bytes in the history store.

The store is asked at most once in ``USAGE_MAX_AGE_S`` per tenant, and sessions created here meanwhile are
added. A repeated request for an existing session or a committed turn uses no quota.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from pensieve.server import ids
from pensieve.server.keys import TenantTable, quota_exceeded
from pensieve.store import HistoryStore, Key, TenantUsage

USAGE_MAX_AGE_S: Final = 1.0
RETRY_S: Final = 60.0
"""Room appears when sessions are deleted or expire, which takes more than seconds."""


class StorageQuotas:
    """One per process. Used on one event loop."""

    def __init__(
        self, store: HistoryStore, tenants: TenantTable, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._monotonic = monotonic
        self._known: dict[str, tuple[float, TenantUsage]] = {}
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._being_made: Counter[str] = Counter()
        self._made_since: Counter[str] = Counter()
        """Sessions created here since the store was asked."""

    @asynccontextmanager
    async def reserve_session(
        self, tenant: str, exists: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Wraps a session's creation. Raises ResourceExhausted without room, unless the session ``exists``."""
        limits = self._tenants.limits(tenant)
        if limits.max_sessions is None and limits.max_stored_bytes is None:
            yield
            return
        usage = await self._usage(tenant)
        sessions = usage.sessions + self._being_made[tenant] + self._made_since[tenant]
        full = limits.max_sessions is not None and sessions >= limits.max_sessions
        if (full or self._has_too_many_bytes(tenant, usage)) and not await exists():
            if full:
                raise quota_exceeded(tenant, "max_sessions", f"{limits.max_sessions} sessions", RETRY_S)
            raise self._too_many_bytes(tenant)
        self._being_made[tenant] += 1
        try:
            yield
            self._made_since[tenant] += 1
        finally:
            self._being_made[tenant] -= 1

    async def check_change(self, tenant: str) -> None:
        """Call before adding to a session. Raises ResourceExhausted when the tenant stores too much."""
        if self._tenants.limits(tenant).max_stored_bytes is None:
            return
        if self._has_too_many_bytes(tenant, await self._usage(tenant)):
            raise self._too_many_bytes(tenant)

    async def check_turn(self, key: Key, request_id: str) -> None:
        """Like ``check_change``, before a turn or appended items; passes if this request is in history."""
        if self._tenants.limits(key.tenant).max_stored_bytes is None:
            return
        if not self._has_too_many_bytes(key.tenant, await self._usage(key.tenant)):
            return
        if await self._store.find_request(key, request_id) is None:
            raise self._too_many_bytes(key.tenant)

    def on_session_removed(self, tenant: str) -> None:
        """Discard the tenant's cached usage, so that freed room counts at once."""
        self._known.pop(tenant, None)

    def _has_too_many_bytes(self, tenant: str, usage: TenantUsage) -> bool:
        most = self._tenants.limits(tenant).max_stored_bytes
        return most is not None and usage.bytes >= most

    def _too_many_bytes(self, tenant: str) -> Exception:
        most = self._tenants.limits(tenant).max_stored_bytes
        return quota_exceeded(tenant, "max_stored_bytes", f"{most} bytes stored", RETRY_S)

    async def _usage(self, tenant: str) -> TenantUsage:
        # One at a time: the answer to an earlier call would lack what was created before a later one began to count.
        async with self._asking[tenant]:
            return await self._usage_now(tenant)

    async def _usage_now(self, tenant: str) -> TenantUsage:
        now = self._monotonic()
        known = self._known.get(tenant)
        if known is not None and now - known[0] < USAGE_MAX_AGE_S:
            return known[1]
        # Sessions created during this call may count twice until the next one; none is ever missed.
        self._made_since[tenant] = 0
        usage = await self._store.usage(tenant)
        claims = await self._store.usage(ids.claims_tenant(tenant))
        usage = TenantUsage(usage.sessions, usage.bytes + claims.bytes)
        self._known[tenant] = now, usage
        return usage
