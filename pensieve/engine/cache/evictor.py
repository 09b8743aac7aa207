"""Decides which chunks are evicted when pages are needed, and which are saved ahead of time.

Pages of chunks with a clean host copy go first, then pages whose chunks must be copied out or dropped. The
host makes room for chunks that are worth more than those it holds. ``EvictionIndex`` ranks chunks by value,
``TenantShares`` limits what may be taken from each tenant, ``Tiers`` carries it out.

With two KV groups, a page of one group can need the room of pages of the other. Leftovers go before everything else.
A tail is worth something only as a whole: when a slice of it is dropped, all that its holder has is dropped with it.
When enough is free but scattered, pages move together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, OtherSlice, SharedRun, Slice
from pensieve.engine.cache.eviction import EvictionIndex, EvictionRound, reclaim_kind
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.tenants import NO_TENANT, UNLIMITED, TenantShares
from pensieve.engine.cache.tiers import Pages, Tiers

Missing = Callable[[int, int], int]
"""How many bytes would still be missing if this many more pages of each group were evicted; 0: none."""

FREED_PER_COPY: Final = 4
"""While the device tier shrinks, a plan may free this many pages for each one that it may copy out. Freeing a page
takes the host some 10 µs: all 10 GiB in one plan made a step several milliseconds longer."""


class Evictor:
    """Decides which slices leave a tier, and which are copied out ahead of time. ``Tiers`` does it."""

    def __init__(self, config: CacheConfig, tiers: Tiers, index: EvictionIndex) -> None:
        self.shares = TenantShares(tiers)
        self._tiers = tiers
        self._index = index
        self._watermark = config.swap_watermark

    def reclaimable(self, tenant: int | None = None) -> int:
        """Return the bytes of the device tier that can be taken at once, by a turn of ``tenant`` if it is given."""
        allowance = UNLIMITED if tenant is None else self.shares.allowance(self._tiers.device, tenant)
        leftovers = self._tiers.bytes_of((0, len(self._tiers.leftovers)))
        return self._index.allowed_bytes(Reclaim.PAGE, allowance) + leftovers

    def reserve(self, pages: Pages, now: float, tenant: int = 0) -> None:
        """Make at least ``pages`` device pages free for a tenant. The caller has checked that enough can be.

        The order: leftovers, pages of chunks with a clean host copy, then of chunks that must be copied or dropped,
        and only then the shares of other tenants.
        """
        device = self._tiers.device

        def missing(gone: int, other_gone: int) -> int:
            return device.shortage(pages[0] - gone, pages[1] - other_gone)

        self._free_leftovers(lambda: device.is_short(1, *pages))
        for keep_shares in self._passes:
            for reclaim in (Reclaim.PAGE, Reclaim.SAVED_PAGE):
                self._evict(reclaim, missing, now, tenant, keep_shares=keep_shares)
        if not device.fits(*pages):
            self._gather(pages)
        assert device.fits(*pages), (
            f"{pages} device pages needed, but only {device.free_bytes} of {device.size_bytes} bytes can be free"
        )

    def shrink(self, now: float, most: int) -> None:
        """Evict pages that the limits of the device tier have no room for, in the order of ``reserve``.

        Copies out or drops at most ``most`` pages of each group, and frees at most ``FREED_PER_COPY`` times as many
        that the host has; all of a tail with the first of its pages. Later calls continue.
        """
        tiers, device = self._tiers, self._tiers.device
        self._free_leftovers(lambda: device.excess(1) > 0)
        for reclaim, limit in ((Reclaim.PAGE, FREED_PER_COPY * most), (Reclaim.SAVED_PAGE, most)):
            before = device.used(0), device.used(1)
            one, other = (device.used(group) - min(device.excess(group), limit) for group in (0, 1))

            def missing(gone: int, other_gone: int, one: int = one, other: int = other) -> int:
                beyond = max(device.used(0) - gone - one, 0), max(device.used(1) - other_gone - other, 0)
                return tiers.bytes_of(beyond)

            for keep_shares in self._passes:
                self._evict(reclaim, missing, now, NO_TENANT, keep_shares=keep_shares)
            if any(before[group] - device.used(group) >= limit for group in (0, 1)):
                return  # there may be more of this kind, which goes before the next kind

    @property
    def _passes(self) -> tuple[bool, ...]:
        """Whether each pass over the victims keeps the shares of other tenants."""
        return (True, False) if self.shares.has_shares else (False,)

    def _free_leftovers(self, is_short: Callable[[], bool]) -> None:
        for part in list(self._tiers.leftovers) if self._tiers.leftovers else ():
            if not is_short():
                break
            if not part.saving:
                self._tiers.free(part)

    def _evict(
        self, reclaim: Reclaim, missing: Missing, now: float, tenant: int, *, keep_shares: bool
    ) -> None:
        """Evict victims of one kind until no bytes are missing, or no victim is left."""
        device = self._tiers.device
        while (need := missing(0, 0)) > 0:
            if keep_shares:
                allowance = self.shares.allowance(device, tenant)
            else:  # a tail goes only as a whole, however small the need
                allowance = UNLIMITED if len(device.groups) > 1 else self.shares.same_allowance(need)
            victims = self._index.round(reclaim, now, self._most_victims(need), allowance)
            if not self._evict_round(victims, missing, now, tenant):
                break

    def _most_victims(self, num_bytes: int) -> int:
        """Return the most victims that this number of bytes takes; with a limit for each end, those of the other group
        are passed over."""
        device = self._tiers.device
        if device.limits is not None and len(device.groups) > 1:
            return self._index.table.rows
        smallest = min(size for size in self._index.page_bytes if size)
        return -(-num_bytes // smallest)

    def _gather(self, pages: Pages) -> None:
        """Move pages together until ``pages`` more fit: there is room, but in holes of the other group's end.

        Pages of idle sessions first: in simulation that moved a tenth of the bytes (bench/results/allocators.md).
        """
        tiers = self._tiers

        def idle(group: int) -> Callable[[int], bool]:
            return lambda page: not tiers.is_pinned(group, page)

        for movable in (idle, lambda _group: lambda _page: True):
            for group in (0, 1):
                for source, target in tiers.device.shrink(group, *pages, movable=movable(group)):
                    tiers.move(group, source, target)
                if tiers.device.fits(*pages):
                    return

    def save_ahead(self, now: float, limit: int) -> None:
        """Plan copies of up to ``limit`` victims while too few device pages are free or reclaimable.

        Never drops anything. A full host would lose chunks that it alone holds, to hold a second copy of
        chunks that the device still has. In simulation that doubled the recomputed tokens, and on a GPU
        copying on demand was as fast (bench/results/watermark.md).
        """
        tiers = self._tiers
        need = min(limit, self._shortfall())
        if need <= 0 or not (tiers.host.free_bytes or tiers.spare):
            return
        allowance = self.shares.allowance(tiers.device, NO_TENANT)
        victims = self._index.round(Reclaim.SAVED_PAGE, now, need, allowance)
        while need > 0 and (group := victims.take()):
            for part in group:
                if not self._free_host_page(part.group):
                    return
                tiers.save(part)
                need -= 1
            victims.put_back()

    def _shortfall(self) -> int:
        """Return how many more pages should be free or reclaimable according to the watermark, rounded up."""
        low = self._watermark * self._tiers.device.size_bytes - self._tiers.device.free_bytes
        if low <= 0:
            return 0
        one, other = self._index.page_bytes
        return int(-(-(low - self.reclaimable(NO_TENANT)) // (one or other)))

    def _evict_round(self, victims: EvictionRound, missing: Missing, now: float, tenant: int) -> bool:
        """Evict victims of a round until no bytes are missing; return whether there was any victim.

        All victims are chosen before the first one is moved. Where the host cannot take them all, the most
        valuable are saved and the least valuable dropped.
        """
        tiers, chosen = self._tiers, self._choose(victims, missing)
        room: EvictionRound | None = None
        stale = False
        for value, part in reversed(chosen):  # most valuable first: they get the room on the host
            if part.device == NOWHERE:
                continue  # it was dropped with the tail of its holder
            if part.host == NOWHERE:
                owner = part.holder.tenant
                found = self._free_host_page(part.group) or (
                    room and self._make_host_room(room, value, owner, part.group)
                )
                # Rank the host's chunks once for all victims, when no spare copy is left. Rank them again for
                # a tenant below its share: chunks saved since then add to what tenants hold above theirs.
                if not found and (room is None or (stale and self.shares.is_below(tiers.host, owner))):
                    allowance = self.shares.allowance(tiers.host, tenant)
                    room = self._index.round(Reclaim.HOST_COPY, now, len(chosen), allowance)
                    found, stale = self._make_host_room(room, value, owner, part.group), False
                if part.device == NOWHERE:
                    continue  # room was made by dropping what its own holder had on the host
                if found:
                    stale = True
                    tiers.save(part)
                elif isinstance(part, OtherSlice):
                    self._drop_all(part.holder)
                    continue
            tiers.evict_from_device(part)
        return bool(chosen)

    def _choose(self, victims: EvictionRound, missing: Missing) -> list[tuple[float, Slice]]:
        """Return victims whose pages make up for the missing bytes, each with its value, the least valuable first."""
        chosen: list[tuple[float, Slice]] = []
        gone = [0, 0]
        while (need := missing(gone[0], gone[1])) and (group := victims.take()):
            if self._tiers.device.limits is None or _helps(group, missing, gone, need):
                value = victims.peek()
                for part in group:
                    chosen.append((value, part))
                    gone[part.group] += 1
            victims.put_back()
        return chosen

    def _drop_all(self, holder: CachedSession | SharedRun) -> None:
        """Drop all slices of a holder that are not in use: it has lost its tail, and the rest saves no work."""
        for chunk in holder.own_chunks:
            for part in (chunk, chunk.other):
                if part is not None and part.cached and reclaim_kind(part) is not None:
                    self._tiers.drop(part)

    def _make_host_room(self, room: EvictionRound, value: float, tenant: int, group: int) -> bool:
        """Free a host page of a group: of a spare copy, else by dropping chunks worth at most ``value``, or any
        chunks of other tenants if ``tenant`` is below its share. Return whether a page is free.

        Spare copies go first because they can be made again. Dropped chunks must be recomputed.
        """
        while not self._free_host_page(group):
            worth = room.peek()
            due = (
                math.isfinite(worth)
                and room.peek_tenant() != tenant
                and self.shares.is_below(self._tiers.host, tenant)
            )
            if worth > value and not due:
                return False
            parts = room.take()
            if not parts:
                return False
            for part in parts:
                if part.host != NOWHERE:
                    self._tiers.evict_from_host(part)
            if isinstance(parts[-1], OtherSlice):
                self._drop_all(parts[-1].holder)
            room.put_back()
        return True

    def _free_host_page(self, group: int) -> bool:
        """Return whether a host page of a group is free, after evicting the spare copies of running chunks if need
        be."""
        host, spare = self._tiers.host, self._tiers.spare
        while not host.free(group):
            # The host copy is the only one while the chunk is not on the device or is being loaded.
            part = next((one for one in spare if one.device != NOWHERE and not one.loading), None)
            if part is None:
                return False
            self._tiers.evict_from_host(part)
        return True


def _helps(group: list[Slice], missing: Missing, gone: list[int], need: int) -> bool:
    """Whether these victims make any of the ``need`` bytes that are missing once ``gone`` pages are evicted. With a
    limit for each end, pages of one group make no room for the other."""
    others = sum(part.group for part in group)
    return missing(gone[0] + len(group) - others, gone[1] + others) < need
