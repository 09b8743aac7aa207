"""Limits of tenants on what they keep: sessions and bytes in the history store.

The store is asked once in ``FRESH_S`` per tenant; sessions made here meanwhile are added, so that of many calls at once
no more get through than there is room for. Other replicas count as soon as the store is asked again. A session that
exists, or a turn that is in history, is what it is: to send its request again is no use of a quota.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from pensieve.server import ids
from pensieve.server.tenants import TenantTable, quota_exceeded
from pensieve.store import HistoryStore, Key, TenantUsage

USAGE_MAX_AGE_S: Final = 1.0
RETRY_S: Final = 60.0
"""Room comes when sessions are deleted or expire: nothing of seconds."""


class StorageQuotas:
    """One per process. Used on one event loop."""

    def __init__(
        self, store: HistoryStore, tenants: TenantTable, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._monotonic = monotonic
        self._known: dict[str, tuple[float, TenantUsage]] = {}
        self._being_made: Counter[str] = Counter()
        self._made_since: Counter[str] = Counter()
        """Sessions made here since the store was asked."""

    @asynccontextmanager
    async def reserve_session(
        self, tenant: str, exists: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Around the making of a session. Raises ResourceExhausted without room, unless it ``exists`` already."""
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
        """Before something is added to a session. Raises ResourceExhausted when the tenant stores too much."""
        if self._tenants.limits(tenant).max_stored_bytes is None:
            return
        if self._has_too_many_bytes(tenant, await self._usage(tenant)):
            raise self._too_many_bytes(tenant)

    async def check_turn(self, key: Key, request_id: str) -> None:
        """Before a turn, or items that are added: as ``change``, unless these very ones are in history."""
        if self._tenants.limits(key.tenant).max_stored_bytes is None:
            return
        if not self._has_too_many_bytes(key.tenant, await self._usage(key.tenant)):
            return
        if await self._store.find_request(key, request_id) is None:
            raise self._too_many_bytes(key.tenant)

    def on_session_removed(self, tenant: str) -> None:
        """A session was removed: the store is asked again before the tenant is refused for want of room."""
        self._known.pop(tenant, None)

    def _has_too_many_bytes(self, tenant: str, usage: TenantUsage) -> bool:
        most = self._tenants.limits(tenant).max_stored_bytes
        return most is not None and usage.bytes >= most

    def _too_many_bytes(self, tenant: str) -> Exception:
        most = self._tenants.limits(tenant).max_stored_bytes
        return quota_exceeded(tenant, "max_stored_bytes", f"{most} bytes stored", RETRY_S)

    async def _usage(self, tenant: str) -> TenantUsage:
        now = self._monotonic()
        known = self._known.get(tenant)
        if known is not None and now - known[0] < USAGE_MAX_AGE_S:
            return known[1]
        # What is made while the store answers may be counted twice until it is asked again, never not at all.
        self._made_since[tenant] = 0
        usage = await self._store.usage(tenant)
        claims = await self._store.usage(ids.claims_tenant(tenant))
        usage = TenantUsage(usage.sessions, usage.bytes + claims.bytes)
        self._known[tenant] = now, usage
        return usage
