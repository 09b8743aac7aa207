"""The two tiers: slots, evictions between them, and the copies that a plan must make. A part of ``CacheManager``.

Where a chunk can go (``place`` before → after):

====================  ======  =========================================================
``reserve``           BOTH → HOST       device slot taken at once, lazily
``reserve``           DEVICE → HOST     copied out in the same plan, on demand
``reserve``           DEVICE → DROPPED  the host has no room for something this cheap
``save_ahead``        DEVICE → BOTH     copied in the background (EuroSys §4.3.2)
either                BOTH → DEVICE     of a chunk in use, to make room on the host
either                HOST → DROPPED    to make room for a chunk worth more
``load``              HOST → BOTH       swapped in; the host copy stays, clean
====================  ======  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Place
from pensieve.engine.cache.index import EvictionIndex, EvictionRound, Reclaim
from pensieve.engine.cache.pool import PagePool
from pensieve.engine.plan import Copy


class Tiers:
    """Both slot pools. ``forget`` is called with a session that lost its last cached chunk."""

    def __init__(
        self, config: CacheConfig, index: EvictionIndex, forget: Callable[[CachedSession], None]
    ) -> None:
        self.device = PagePool(config.device_chunks)
        self.host = PagePool(config.host_chunks)
        self._watermark = config.swap_watermark * config.device_chunks
        self._index = index
        self._forget = forget
        self.swap_out: list[Copy] = []
        self.copies: list[Copy] = []
        self.swap_in: list[Copy] = []
        self._in_flight: list[Chunk] = []
        self.spare: dict[Chunk, None] = {}
        """Pinned chunks with a host copy: while its request runs, nobody needs that copy. Oldest first."""
        self.dropped_tokens = 0

    # -- device slots ------------------------------------------------------------------------------------------------

    def reserve(self, slots: int, now: float) -> None:
        """Make at least ``slots`` device slots free; the caller knows that enough chunks are unpinned.

        First chunks with a clean host copy, which cost nothing; then chunks that must be copied or dropped.
        """
        for reclaim in (Reclaim.PAGE, Reclaim.SAVED_PAGE):
            while (need := slots - self.device.free) > 0:
                victims = self._index.round(reclaim, now, need)
                if not self._evict_round(victims, slots, now):
                    break
        assert self.device.free >= slots, (
            f"{slots} device slots asked for, {self.device.free} of {self.device.capacity} could be had"
        )

    def place_on_device(self, chunk: Chunk) -> None:
        """Give a chunk a free device slot."""
        if chunk.place is Place.DROPPED:
            for owner in chunk.owners:
                owner.cached += 1
        chunk.device = self.device.take()

    def load(self, chunk: Chunk) -> None:
        """Plan the copy of a HOST chunk to a device slot of its own."""
        self.place_on_device(chunk)
        self.swap_in.append(Copy(chunk.host, chunk.device))
        chunk.loading = True
        self._in_flight.append(chunk)

    # -- ahead of time -----------------------------------------------------------------------------------------------

    def reclaimable(self) -> int:
        """Device slots of unpinned chunks with a clean host copy."""
        return self._index.total(Reclaim.PAGE)

    def save_ahead(self, now: float, limit: int) -> None:
        """Plan copies of up to ``limit`` victims while too few device slots are free or reclaimable.

        Nothing is dropped for it. A full host would lose what only it has, to hold twice what the device still has: in
        simulation that doubled what had to be recomputed, and on a GPU copying when a slot is needed was as fast
        (bench/results/watermark.md).
        """
        need = min(limit, self._shortfall())
        if need <= 0 or not (self.host.free or self.spare):
            return
        victims = self._index.round(Reclaim.SAVED_PAGE, now, need)
        while need > 0 and (group := victims.take()):
            for chunk in group:
                if not self._host_slot_for_nothing():
                    return
                self._save(chunk)
                need -= 1
            victims.put_back()

    def _shortfall(self) -> int:
        low = self._watermark - self.device.free
        return 0 if low <= 0 else int(-(-(low - self.reclaimable()) // 1))

    # -- evictions ---------------------------------------------------------------------------------------------------

    def _evict_round(self, victims: EvictionRound, slots: int, now: float) -> bool:
        """Evict from one round until enough is free; whether it gave anything.

        All victims are chosen before the first is moved: where the host cannot take them all, the most valuable are
        saved and the least valuable dropped.
        """
        chosen: list[tuple[float, Chunk]] = []
        while self.device.free + len(chosen) < slots and (group := victims.take()):
            value = victims.peek()
            for chunk in group:
                chunk.saving = True  # no candidate any more
                chosen.append((value, chunk))
            victims.put_back()
        room: EvictionRound | None = None
        for value, chunk in reversed(chosen):
            chunk.saving = False
            if chunk.host == NOWHERE:
                room = room or self._index.round(Reclaim.HOST_COPY, now, len(chosen))
                if self._make_host_room(room, value):
                    self._save(chunk)
            self._leave_device(chunk)
        return bool(chosen)

    def _make_host_room(self, room: EvictionRound, value: float) -> bool:
        """A free host slot: at the cost of a copy that nobody needs now, else by dropping chunks that are worth no more
        than ``value``; False when there is none.

        Copies of chunks in use go first because the link has room to make them again, whereas what is dropped has to be
        recomputed.
        """
        while not self._host_slot_for_nothing():
            if room.peek() > value:
                return False
            group = room.take()
            if not group:
                return False
            for chunk in group:
                self.discard_host(chunk)
            room.put_back()
        return True

    def pinned(self, chunk: Chunk) -> None:
        """A request began to use a chunk that nobody used."""
        if chunk.host != NOWHERE:
            self.spare[chunk] = None

    def unpinned(self, chunk: Chunk) -> None:
        """Nobody uses a chunk any more."""
        self.spare.pop(chunk, None)

    def _host_slot_for_nothing(self) -> bool:
        """Whether a host slot is free, if need be by forgetting the copy of a chunk in use."""
        if self.host.free:
            return True
        for chunk in self.spare:
            # What is not on the device yet, or is just coming, has nothing but its copy.
            if chunk.device != NOWHERE and not chunk.loading:
                self.discard_host(chunk)
                return True
        return False

    def _save(self, chunk: Chunk) -> None:
        chunk.host = self.host.take()
        chunk.saving = True
        self.swap_out.append(Copy(chunk.device, chunk.host))
        self._in_flight.append(chunk)
        self._touch(chunk)

    def _leave_device(self, chunk: Chunk) -> None:
        self.device.put_back(chunk.device)
        chunk.device = NOWHERE
        self._after_loss(chunk)

    def discard_host(self, chunk: Chunk) -> None:
        """Free a chunk's host slot; what the device still has stays."""
        self.host.put_back(chunk.host)
        chunk.host = NOWHERE
        self.spare.pop(chunk, None)
        self._after_loss(chunk)

    def discard(self, chunk: Chunk) -> None:
        """Free everything a chunk holds."""
        if chunk.device != NOWHERE:
            self._leave_device(chunk)
        if chunk.host != NOWHERE:
            self.discard_host(chunk)

    def _after_loss(self, chunk: Chunk) -> None:
        self._touch(chunk)
        if chunk.place is not Place.DROPPED:
            return
        self.dropped_tokens += chunk.filled
        chunk.filled = 0
        for owner in chunk.owners:
            owner.cached -= 1
            if owner.cached == 0 and not owner.running:
                self._forget(owner)

    def _touch(self, chunk: Chunk) -> None:
        for owner in chunk.owners:
            self._index.touch(owner)

    # -- plan and commit ---------------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...], tuple[Copy, ...]]:
        """(swap_out, copies, swap_in) decided since the last call; each is in exactly one plan."""
        result = tuple(self.swap_out), tuple(self.copies), tuple(self.swap_in)
        self.swap_out, self.copies, self.swap_in = [], [], []
        return result

    def complete(self) -> None:
        """The plan that held all planned copies was executed."""
        for chunk in self._in_flight:
            chunk.saving = chunk.loading = False
            self._touch(chunk)
        self._in_flight.clear()
