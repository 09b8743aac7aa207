"""Decides which chunks are evicted when pages are needed, and which are saved ahead of time.

Pages of chunks with a clean host copy go first, then pages whose chunks must be copied out or dropped. The
host makes room for chunks that are worth more than those it holds. ``EvictionIndex`` ranks chunks by value,
``TenantShares`` limits what may be taken from each tenant, ``Tiers`` carries it out.
"""

from __future__ import annotations

import math

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import NOWHERE, Chunk
from pensieve.engine.cache.eviction import EvictionIndex, EvictionRound
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.tenants import NO_TENANT, UNLIMITED, TenantShares
from pensieve.engine.cache.tiers import Tiers


class Evictor:
    def __init__(self, config: CacheConfig, tiers: Tiers, index: EvictionIndex) -> None:
        self.shares = TenantShares(tiers)
        self._tiers = tiers
        self._index = index
        self._watermark = config.swap_watermark * config.device_chunks

    def reclaimable(self, tenant: int | None = None) -> int:
        """Return the device pages that can be taken at once, by a turn of ``tenant`` if it is given."""
        allowance = UNLIMITED if tenant is None else self.shares.allowance(self._tiers.device, tenant)
        return self._index.allowed(Reclaim.PAGE, allowance)

    def reserve(self, pages: int, now: float, tenant: int = 0) -> None:
        """Make at least ``pages`` device pages free for a tenant. The caller has checked that enough are ``unpinned``.

        The order: pages of chunks with a clean host copy, then of chunks that must be copied or dropped, and
        only then the shares of other tenants.
        """
        device = self._tiers.device
        for keep_shares in (True, False) if self.shares.has_shares else (False,):
            for reclaim in (Reclaim.PAGE, Reclaim.SAVED_PAGE):
                while (need := pages - device.free) > 0:
                    allowance = (
                        self.shares.allowance(device, tenant)
                        if keep_shares
                        else self.shares.same_allowance(need)
                    )
                    victims = self._index.round(reclaim, now, need, allowance)
                    if not self._evict_round(victims, pages, now, tenant):
                        break
        assert device.free >= pages, (
            f"{pages} device pages needed, but only {device.free} of {device.capacity} can be free"
        )

    def save_ahead(self, now: float, limit: int) -> None:
        """Plan copies of up to ``limit`` victims while too few device pages are free or reclaimable.

        Never drops anything. A full host would lose chunks that it alone holds, to hold a second copy of
        chunks that the device still has. In simulation that doubled the recomputed tokens, and on a GPU
        copying on demand was as fast (bench/results/watermark.md).
        """
        tiers = self._tiers
        need = min(limit, self._shortfall())
        if need <= 0 or not (tiers.host.free or tiers.spare):
            return
        allowance = self.shares.allowance(tiers.device, NO_TENANT)
        victims = self._index.round(Reclaim.SAVED_PAGE, now, need, allowance)
        while need > 0 and (group := victims.take()):
            for chunk in group:
                if not self._free_host_page():
                    return
                tiers.save(chunk)
                need -= 1
            victims.put_back()

    def _shortfall(self) -> int:
        """Return how many more pages should be free or reclaimable according to the watermark, rounded up."""
        low = self._watermark - self._tiers.device.free
        return 0 if low <= 0 else int(-(-(low - self.reclaimable(NO_TENANT)) // 1))

    def _evict_round(self, victims: EvictionRound, pages: int, now: float, tenant: int) -> bool:
        """Evict victims of a round until ``pages`` device pages are free; return whether there was any victim.

        All victims are chosen before the first one is moved. Where the host cannot take them all, the most
        valuable are saved and the least valuable dropped.
        """
        tiers = self._tiers
        chosen: list[tuple[float, Chunk]] = []
        while tiers.device.free + len(chosen) < pages and (group := victims.take()):
            value = victims.peek()
            chosen.extend((value, chunk) for chunk in group)
            victims.put_back()
        room: EvictionRound | None = None
        stale = False
        for value, chunk in reversed(chosen):  # most valuable first: they get the room on the host
            if chunk.host == NOWHERE:
                owner = chunk.holder.tenant
                found = self._free_host_page() or (room and self._make_host_room(room, value, owner))
                # Rank the host's chunks once for all victims, when no spare copy is left. Rank them again for
                # a tenant below its share: chunks saved since then add to what tenants hold above theirs.
                if not found and (room is None or (stale and self.shares.is_below(tiers.host, owner))):
                    allowance = self.shares.allowance(tiers.host, tenant)
                    room = self._index.round(Reclaim.HOST_COPY, now, len(chosen), allowance)
                    found, stale = self._make_host_room(room, value, owner), False
                if found:
                    stale = True
                    tiers.save(chunk)
            tiers.evict_from_device(chunk)
        return bool(chosen)

    def _make_host_room(self, room: EvictionRound, value: float, tenant: int) -> bool:
        """Free a host page: of a spare copy, else by dropping chunks worth at most ``value``, or any chunks
        of other tenants if ``tenant`` is below its share. Return whether a page is free.

        Spare copies go first because they can be made again. Dropped chunks must be recomputed.
        """
        while not self._free_host_page():
            worth = room.peek()
            due = (
                math.isfinite(worth)
                and room.peek_tenant() != tenant
                and self.shares.is_below(self._tiers.host, tenant)
            )
            if worth > value and not due:
                return False
            group = room.take()
            if not group:
                return False
            for chunk in group:
                self._tiers.evict_from_host(chunk)
            room.put_back()
        return True

    def _free_host_page(self) -> bool:
        """Return whether a host page is free, after evicting the spare copy of a running chunk if need be."""
        if self._tiers.host.free:
            return True
        for chunk in self._tiers.spare:
            # The host copy is the only one while the chunk is not on the device or is being loaded.
            if chunk.device != NOWHERE and not chunk.loading:
                self._tiers.evict_from_host(chunk)
                return True
        return False
