"""The two tiers: their pages, evictions between them, and the copies that a plan must make. A part of ``CacheManager``.

How a chunk changes its ``place``, and which call does it:

=============================  ================  ======================================================================
call                           before → after    what happens
=============================  ================  ======================================================================
``reserve``                    BOTH → HOST       its device page is taken at once: what it holds is on the host already
``reserve``                    DEVICE → HOST     it is copied out on demand, in the plan that needs its page
``reserve``                    DEVICE → DROPPED  the host has no room for something this cheap
``reserve``                    HOST → DROPPED    it makes room on the host for a chunk worth more
``save_ahead``                 DEVICE → BOTH     it is copied out in the background (EuroSys §4.3.2)
``reserve``, ``save_ahead``    BOTH → DEVICE     it is in use and needs no host copy, which makes room for another's
``load``                       HOST → BOTH       it is swapped in; the host copy stays, clean
=============================  ================  ======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Place, SharedRun
from pensieve.engine.cache.eviction import EvictionIndex, EvictionRound
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.occupancy import Occupancy, PlannedCopies
from pensieve.engine.cache.pool import PagePool
from pensieve.engine.cache.tenants import ANY, NOBODY, TenantShares
from pensieve.engine.plan import Copy


class Tiers:
    """The page pools of both tiers. ``emptied`` is called with a holder that has lost its last cached chunk."""

    def __init__(
        self,
        config: CacheConfig,
        index: EvictionIndex,
        emptied: Callable[[CachedSession | SharedRun], None],
    ) -> None:
        self.device = PagePool(config.device_chunks)
        self.host = PagePool(config.host_chunks)
        self.shares = TenantShares(self.device, self.host, config.chunk_tokens)
        self.pinned = 0
        """Chunks that some running request uses. Each has a device page, or is about to get one."""
        self.spare: dict[Chunk, None] = {}
        """Pinned chunks with a host copy: while their requests run, nobody needs that copy. Oldest first."""
        self._watermark = config.swap_watermark * config.device_chunks
        self._chunk_tokens = config.chunk_tokens
        self._index = index
        self._emptied = emptied
        self._swap_out: list[Copy] = []
        self._copies: list[Copy] = []
        self._swap_in: list[Copy] = []
        self._dropped = 0
        self._in_flight: list[Chunk] = []
        """Chunks that are being saved or loaded by the plan in the making."""
        self._stale: list[Chunk] = []
        """Chunks that the plan in the making writes to: their host copies are no copies afterwards."""
        self._fresh: set[Chunk] = set()
        """Shared chunks that the plan in the making writes to."""
        self._copied: list[Chunk] = []
        """Chunks that the plan in the making copies on the device; pinned, so that their pages are not written to."""

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def unpinned(self) -> int:
        """Device pages that no running request holds: free, or to be had by an eviction."""
        return self.device.capacity - self.pinned

    @property
    def swaps_in(self) -> bool:
        """Whether the plan in the making copies chunks in from the host."""
        return bool(self._swap_in)

    def reclaimable(self, tenant: int | None = None) -> int:
        """Device pages of unpinned chunks with a clean host copy; those that a turn of ``tenant`` may take."""
        allowance = ANY if tenant is None else self.shares.allowance(self.device, tenant)
        return self._index.allowed(Reclaim.PAGE, allowance)

    def occupancy(self) -> Occupancy:
        size = self._chunk_tokens
        return Occupancy(
            device_free=self.device.free * size,
            device_reclaimable=self.reclaimable() * size,
            device_used=self.device.used * size,
            host_free=self.host.free * size,
            host_used=self.host.used * size,
            dropped=self._dropped,
        )

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, chunk: Chunk) -> None:
        """A running request uses the chunk from now on; it cannot be evicted."""
        chunk.pins += 1
        if chunk.pins == 1:
            self.pin_new(chunk.holder.tenant, 1)
            if chunk.host != NOWHERE:
                self.spare[chunk] = None
            self._touch(chunk)

    def unpin(self, chunk: Chunk) -> None:
        """One running request less uses the chunk."""
        chunk.pins -= 1
        if chunk.pins == 0:
            self.pin_new(chunk.holder.tenant, -1)
            self.spare.pop(chunk, None)
            self._touch(chunk)

    def pin_new(self, tenant: int, count: int) -> None:
        """So many more chunks of a tenant are pinned."""
        self.pinned += count
        self.shares.pinned[tenant] += count

    # -- device pages ------------------------------------------------------------------------------------------------

    def reserve(self, pages: int, now: float, tenant: int = 0) -> None:
        """Make at least ``pages`` device pages free for a tenant; the caller knows that enough are ``unpinned``.

        Chunks with a clean host copy lose theirs first, then those that must be copied or dropped, then others' shares.
        """
        for kept in (True, False) if self.shares.any else (False,):
            for reclaim in (Reclaim.PAGE, Reclaim.SAVED_PAGE):
                while (need := pages - self.device.free) > 0:
                    allowance = (
                        self.shares.allowance(self.device, tenant) if kept else self.shares.of_each(need)
                    )
                    victims = self._index.round(reclaim, now, need, allowance)
                    if not self._evict_round(victims, pages, now, tenant):
                        break
        assert self.device.free >= pages, (
            f"{pages} device pages asked for, {self.device.free} of {self.device.capacity} could be had"
        )

    def place_on_device(self, chunk: Chunk) -> None:
        """Let a chunk that is not on the device have a free page there."""
        if chunk.host == NOWHERE:
            chunk.holder.cached += 1
        chunk.device = self.device.take(chunk.holder.tenant)

    def load(self, chunk: Chunk) -> None:
        """Place a HOST chunk on the device and plan the copy of what it holds."""
        self.place_on_device(chunk)
        self._swap_in.append(Copy(chunk.host, chunk.device))
        chunk.loading = True
        self._in_flight.append(chunk)

    def duplicate(self, source: Chunk, target: Chunk) -> None:
        """Place a new chunk on the device and plan the copy of what another holds there."""
        self.pin(source)
        self._copied.append(source)
        self.place_on_device(target)
        target.loading = True
        self._in_flight.append(target)
        self._copies.append(Copy(source.device, target.device))

    def hand_over(self, source: Chunk, target: Chunk) -> None:
        """Let a chunk that has no page have the device page of another, which holds the same tokens."""
        target.holder.cached += target.place is Place.DROPPED
        source.holder.cached -= source.host == NOWHERE
        target.device, source.device = source.device, NOWHERE
        target.filled = source.filled
        self._touch(target)
        self._touch(source)

    def written(self, chunk: Chunk) -> None:
        """The plan in the making writes to a chunk."""
        if chunk.host != NOWHERE:
            self._stale.append(chunk)
        if chunk.shared:
            self._fresh.add(chunk)

    def can_duplicate(self, chunk: Chunk) -> bool:
        """Whether a plan that copies before it loads and writes finds what the chunk holds on the device."""
        return chunk.device != NOWHERE and not chunk.loading and chunk not in self._fresh

    # -- ahead of time -----------------------------------------------------------------------------------------------

    def save_ahead(self, now: float, limit: int) -> None:
        """Plan copies of up to ``limit`` victims while too few device pages are free or reclaimable.

        Nothing is dropped for it. A full host would lose what only it has, to hold twice what the device still has: in
        simulation that doubled what had to be recomputed, and on a GPU copying when a page is needed was as fast
        (bench/results/watermark.md).
        """
        need = min(limit, self._shortfall())
        if need <= 0 or not (self.host.free or self.spare):
            return
        victims = self._index.round(Reclaim.SAVED_PAGE, now, need, self.shares.allowance(self.device, NOBODY))
        while need > 0 and (group := victims.take()):
            for chunk in group:
                if not self._host_page_for_nothing():
                    return
                self._save(chunk)
                need -= 1
            victims.put_back()

    def _shortfall(self) -> int:
        """Pages that are neither free nor reclaimable and should be, by the watermark; rounded up."""
        low = self._watermark - self.device.free
        return 0 if low <= 0 else int(-(-(low - self.reclaimable(NOBODY)) // 1))

    # -- evictions ---------------------------------------------------------------------------------------------------

    def _evict_round(self, victims: EvictionRound, pages: int, now: float, tenant: int) -> bool:
        """Evict victims of one round until ``pages`` device pages are free; returns whether there was a victim.

        All victims are chosen before the first is moved: where the host cannot take them all, the most valuable are
        saved and the least valuable dropped.
        """
        chosen: list[tuple[float, Chunk]] = []
        while self.device.free + len(chosen) < pages and (group := victims.take()):
            value = victims.peek()
            for chunk in group:
                # Nothing is copied yet, but what is being saved is no candidate: the round won't choose it again.
                chunk.saving = True
                chosen.append((value, chunk))
            victims.put_back()
        room: EvictionRound | None = None
        stale = False
        for value, chunk in reversed(chosen):  # from the highest down: the best get what room there is
            chunk.saving = False
            if chunk.host == NOWHERE:
                whose = chunk.holder.tenant
                found = self._host_page_for_nothing() or (room and self._make_host_room(room, value, whose))
                # The host is ranked once for all of them, when no copy is left that could be forgotten; and once more
                # for whom there should be a page, as what was saved meanwhile counts for those who gave nothing.
                if not found and (room is None or (stale and self.shares.is_below(self.host, whose))):
                    allowance = self.shares.allowance(self.host, tenant)
                    room = self._index.round(Reclaim.HOST_COPY, now, len(chosen), allowance)
                    found, stale = self._make_host_room(room, value, whose), False
                if found:
                    stale = True
                    self._save(chunk)
            # The page is free at once even if it has yet to be read: a plan swaps out before it writes anything.
            self._leave_device(chunk)
        return bool(chosen)

    def _make_host_room(self, room: EvictionRound, value: float, tenant: int) -> bool:
        """Free a host page at the cost of a copy that nobody needs now, else by dropping chunks that are worth no more
        than ``value``, or whatever others have if ``tenant`` has less than its share; returns whether one is free.

        Copies of chunks in use go first: they can be made again, whereas what is dropped has to be recomputed.
        """
        while not self._host_page_for_nothing():
            worth = room.peek()
            due = (
                math.isfinite(worth)
                and room.peek_tenant() != tenant
                and self.shares.is_below(self.host, tenant)
            )
            if worth > value and not due:
                return False
            group = room.take()
            if not group:
                return False
            for chunk in group:
                self.discard_host(chunk)
            room.put_back()
        return True

    def _host_page_for_nothing(self) -> bool:
        """Whether a host page is free, if need be by forgetting the copy of a chunk in use."""
        if self.host.free:
            return True
        for chunk in self.spare:
            # What is not on the device yet, or is just coming, has nothing but its copy.
            if chunk.device != NOWHERE and not chunk.loading:
                self.discard_host(chunk)
                return True
        return False

    def _save(self, chunk: Chunk) -> None:
        """Plan the copy of a DEVICE chunk to a free host page."""
        chunk.host = self.host.take(chunk.holder.tenant)
        chunk.saving = True
        self._swap_out.append(Copy(chunk.device, chunk.host))
        self._in_flight.append(chunk)
        self._touch(chunk)

    def _leave_device(self, chunk: Chunk) -> None:
        self.device.put_back(chunk.device, chunk.holder.tenant)
        chunk.device = NOWHERE
        self._after_loss(chunk)

    def discard_host(self, chunk: Chunk) -> None:
        """Free a chunk's host page; what the device still has stays."""
        self.host.put_back(chunk.host, chunk.holder.tenant)
        chunk.host = NOWHERE
        self.spare.pop(chunk, None)
        self._after_loss(chunk)

    def discard(self, chunk: Chunk) -> None:
        """Free every page that a chunk has."""
        if chunk.device != NOWHERE:
            self._leave_device(chunk)
        if chunk.host != NOWHERE:
            self.discard_host(chunk)

    def give_up(self, chunk: Chunk) -> None:
        """Free every page of a chunk that nobody owns any more: it is not dropped for want of room."""
        if chunk.device != NOWHERE:
            self.device.put_back(chunk.device, chunk.holder.tenant)
        if chunk.host != NOWHERE:
            self.host.put_back(chunk.host, chunk.holder.tenant)
        chunk.holder.cached -= chunk.place is not Place.DROPPED
        chunk.device = chunk.host = NOWHERE
        chunk.filled = 0
        self.spare.pop(chunk, None)

    def _after_loss(self, chunk: Chunk) -> None:
        """A chunk has lost a page. With the last one its KV is gone, and maybe its sessions with it."""
        self._touch(chunk)
        if chunk.place is not Place.DROPPED:
            return
        self._dropped += chunk.filled
        chunk.filled = 0
        chunk.holder.cached -= 1
        if chunk.holder.cached == 0:
            self._emptied(chunk.holder)

    def _touch(self, chunk: Chunk) -> None:
        """The row that the chunk is in is out of date."""
        self._index.touch(chunk.holder)

    # -- plan and commit ---------------------------------------------------------------------------------------------

    def take_copies(self) -> PlannedCopies:
        """What was planned since the last call; each copy is in exactly one plan."""
        planned = PlannedCopies(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in))
        self._swap_out, self._copies, self._swap_in = [], [], []
        return planned

    def complete(self) -> None:
        """The plan that held all planned copies was launched: what comes after it finds them made."""
        for chunk in self._in_flight:
            chunk.saving = chunk.loading = False
            self._touch(chunk)
        self._in_flight.clear()
        for chunk in self._stale:
            if chunk.host != NOWHERE:
                self.discard_host(chunk)
        self._stale.clear()
        self._fresh.clear()
        for chunk in self._copied:
            self.unpin(chunk)
        self._copied.clear()
