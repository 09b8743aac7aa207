"""Decides what is evicted: which chunks give their pages when others need them, and which are saved ahead of time.

Pages of chunks with a clean host copy go first, then those that must be copied out or dropped; the host makes room for
what is worth more than it holds. ``EvictionIndex`` says what chunks are worth, ``TenantShares`` whose may go, and
``Tiers`` does it.
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
    """Makes room in both tiers."""

    def __init__(self, config: CacheConfig, tiers: Tiers, index: EvictionIndex) -> None:
        self.shares = TenantShares(tiers)
        self._tiers = tiers
        self._index = index
        self._watermark = config.swap_watermark * config.device_chunks

    def reclaimable(self, tenant: int | None = None) -> int:
        """Device pages of unpinned chunks with a clean host copy; those that a turn of ``tenant`` may take."""
        allowance = UNLIMITED if tenant is None else self.shares.allowance(self._tiers.device, tenant)
        return self._index.allowed(Reclaim.PAGE, allowance)

    def reserve(self, pages: int, now: float, tenant: int = 0) -> None:
        """Make at least ``pages`` device pages free for a tenant; the caller knows that enough are ``unpinned``.

        Chunks with a clean host copy lose theirs first, then those that must be copied or dropped, then others' shares.
        """
        device = self._tiers.device
        for kept in (True, False) if self.shares.has_shares else (False,):
            for reclaim in (Reclaim.PAGE, Reclaim.SAVED_PAGE):
                while (need := pages - device.free) > 0:
                    allowance = (
                        self.shares.allowance(device, tenant) if kept else self.shares.same_allowance(need)
                    )
                    victims = self._index.round(reclaim, now, need, allowance)
                    if not self._evict_round(victims, pages, now, tenant):
                        break
        assert device.free >= pages, (
            f"{pages} device pages asked for, {device.free} of {device.capacity} could be had"
        )

    def save_ahead(self, now: float, limit: int) -> None:
        """Plan copies of up to ``limit`` victims while too few device pages are free or reclaimable.

        Nothing is dropped for it. A full host would lose what only it has, to hold twice what the device still has: in
        simulation that doubled what had to be recomputed, and on a GPU copying when a page is needed was as fast
        (bench/results/watermark.md).
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
        """Pages that are neither free nor reclaimable and should be, by the watermark; rounded up."""
        low = self._watermark - self._tiers.device.free
        return 0 if low <= 0 else int(-(-(low - self.reclaimable(NO_TENANT)) // 1))

    def _evict_round(self, victims: EvictionRound, pages: int, now: float, tenant: int) -> bool:
        """Evict victims of one round until ``pages`` device pages are free; returns whether there was a victim.

        All victims are chosen before the first is moved: where the host cannot take them all, the most valuable are
        saved and the least valuable dropped.
        """
        tiers = self._tiers
        chosen: list[tuple[float, Chunk]] = []
        while tiers.device.free + len(chosen) < pages and (group := victims.take()):
            value = victims.peek()
            chosen.extend((value, chunk) for chunk in group)
            victims.put_back()
        room: EvictionRound | None = None
        stale = False
        for value, chunk in reversed(chosen):  # from the highest down: the best get what room there is
            if chunk.host == NOWHERE:
                whose = chunk.holder.tenant
                found = self._free_host_page() or (room and self._make_host_room(room, value, whose))
                # The host is ranked once for all of them, when no spare copy is left; and once more for a tenant that
                # is below its share, as what was saved meanwhile counts for those who gave nothing.
                if not found and (room is None or (stale and self.shares.is_below(tiers.host, whose))):
                    allowance = self.shares.allowance(tiers.host, tenant)
                    room = self._index.round(Reclaim.HOST_COPY, now, len(chosen), allowance)
                    found, stale = self._make_host_room(room, value, whose), False
                if found:
                    stale = True
                    tiers.save(chunk)
            tiers.evict_from_device(chunk)
        return bool(chosen)

    def _make_host_room(self, room: EvictionRound, value: float, tenant: int) -> bool:
        """Free a host page at the cost of a spare copy, else by dropping chunks that are worth no more than ``value``,
        or whatever others have if ``tenant`` has less than its share; returns whether one is free.

        Spare copies go first: they can be made again, whereas what is dropped has to be recomputed.
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
        """Whether a host page is free, if need be by evicting the spare copy of a chunk in use."""
        if self._tiers.host.free:
            return True
        for chunk in self._tiers.spare:
            # What is not on the device yet, or is just coming, has nothing but its copy.
            if chunk.device != NOWHERE and not chunk.loading:
                self._tiers.evict_from_host(chunk)
                return True
        return False
