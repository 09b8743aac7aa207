"""The two tiers: the only writer of where each chunk is, of how much of it is filled, and of its pins.

It owns these fields of a ``Chunk``: ``device``, ``host``, ``filled``, ``pins``, ``saving`` and ``loading``; and the
pages that they name. It decides nothing: the calls below are events, and the last column says whose decision each is.

::

                place, copy                     save
    DROPPED ───────────────────▶ DEVICE ───────────────────────▶ BOTH
       ▲  ▲                        │ ▲                           │  ▲
       │  │   evict_from_device    │ │      evict_from_host      │  │ load
       │  └────────────────────────┘ └───────────────────────────┤  │
       │                                       evict_from_device │  │
       │                                                         ▼  │
       └────────────────────────────────────────────────────── HOST ┘
                           evict_from_host

=====================  ================================  ===============================================  ==============
event                  before → after                    why                                              called by
=====================  ================================  ===============================================  ==============
``place``              DROPPED → DEVICE                  a page for what a request will compute           CacheManager
``copy``, its target   DROPPED → DEVICE                  copy on write, and a branch's tail               CacheManager
``load``               HOST → BOTH                       swapped in; the host copy stays, clean           CacheManager
``save``               DEVICE → BOTH                     copied out, ahead of time or on demand           Evictor
``evict_from_device``  BOTH → HOST, DEVICE → DROPPED     the page is wanted; DROPPED: no room on the host Evictor
``evict_from_host``    HOST → DROPPED, BOTH → DEVICE     the page is wanted for a chunk worth more        Evictor
``drop``               all → DROPPED                     what it was to hold was never computed           CacheManager
``move_page``          all → with a device page, or      of two chunks with the same tokens one stays     SharedChunks
                       without it
``free``               all → DROPPED, its last event     no session owns the chunk any more               SharedChunks
``fill``               writes to DEVICE and BOTH         a plan computes KV; ``filled`` grows             CacheManager
``truncate``           all; HOST → DROPPED at 0 tokens   other tokens will follow; ``filled`` shrinks     CacheManager
``pin``, ``unpin``     all                               requests that use it begin and end               CacheManager
``complete``           BOTH → DEVICE if it was filled    the plan was launched; its copies are made       CacheManager
=====================  ================================  ===============================================  ==============

A pinned chunk is not evicted from the device. A chunk is ``saving`` or ``loading`` from ``save``, ``load`` or ``copy``
until ``complete``; a chunk that is saving counts as DEVICE, and is HOST when its device page is taken by the same plan,
which copies out before it writes anything. Where KV is DROPPED, ``filled`` is 0.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, SharedRun
from pensieve.engine.plan import Copy


class PlannedCopies(NamedTuple):
    """Copies that one plan must make, under the names that they have in ``Plan``."""

    swap_out: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full both tiers are: KV-tokens that their pages have room for, whatever part of a page is filled.

    ``dropped`` is what was dropped for want of room since start: KV-tokens that were there.
    """

    device_free: int
    device_reclaimable: int
    """In pages that are used, but can be taken at once."""
    device_used: int
    host_free: int
    host_used: int
    dropped: int


class PagePool:
    """Free list over pages ``0 … capacity-1``.

    The lowest page goes first, so that runs of adjacent pages form and tests are exact.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap = list(range(capacity))
        self._free = set(self._heap)
        self.held: defaultdict[int, int] = defaultdict(int)
        """Pages that are taken, by the number of the tenant."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self, tenant: int = 0) -> int:
        """Take a free page for a tenant. Raises IndexError when there is none: ask ``free`` first."""
        page = heapq.heappop(self._heap)
        self._free.remove(page)
        self.held[tenant] += 1
        return page

    def put_back(self, page: int, tenant: int = 0) -> None:
        """Return a page that was taken for a tenant. Returning a free one is a bug and raises ValueError."""
        if page in self._free or not 0 <= page < self.capacity:
            raise ValueError(f"page {page} of {self.capacity} is not taken")
        self._free.add(page)
        self.held[tenant] -= 1
        heapq.heappush(self._heap, page)

    def is_free(self, page: int) -> bool:
        return page in self._free


class Tiers:
    """The pages of both tiers and the chunks in them. ``changed`` is called with the holder of each changed chunk."""

    def __init__(
        self,
        device_chunks: int,
        host_chunks: int,
        chunk_tokens: int,
        changed: Callable[[CachedSession | SharedRun], None],
    ) -> None:
        self.device = PagePool(device_chunks)
        self.host = PagePool(host_chunks)
        self.chunk_tokens = chunk_tokens
        self.pinned = 0
        """Chunks that some running request uses. Each has a device page, or is about to get one."""
        self.pinned_by: defaultdict[int, int] = defaultdict(int)
        """The same, by the number of the tenant."""
        self.spare: dict[Chunk, None] = {}
        """Pinned chunks with a host copy, which their requests do not need while they run. Oldest first."""
        self.dropped_tokens = 0
        """KV-tokens that were dropped since start."""
        self._changed = changed
        self._dropped: dict[CachedSession | SharedRun, None] = {}
        """Holders of chunks that were dropped since ``take_dropped``."""
        self._swap_out: list[Copy] = []
        self._copies: list[Copy] = []
        self._swap_in: list[Copy] = []
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

    def can_copy(self, chunk: Chunk) -> bool:
        """Whether a plan that copies before it loads and writes finds what the chunk holds on the device."""
        return chunk.device != NOWHERE and not chunk.loading and chunk not in self._fresh

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """One more running request uses each of these chunks, which are one tenant's."""
        first = []
        for chunk in chunks:
            chunk.pins += 1
            if chunk.pins == 1:
                first.append(chunk)
                if chunk.host != NOWHERE:
                    self.spare[chunk] = None
        self._count_pins(first, len(first))

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        """One running request less uses each of these chunks, which are one tenant's."""
        last = []
        for chunk in chunks:
            chunk.pins -= 1
            if chunk.pins == 0:
                last.append(chunk)
                self.spare.pop(chunk, None)
        self._count_pins(last, -len(last))

    def _count_pins(self, chunks: list[Chunk], change: int) -> None:
        if chunks:
            self.pinned += change
            self.pinned_by[chunks[0].holder.tenant] += change
            for holder in dict.fromkeys([chunk.holder for chunk in chunks]):
                self._changed(holder)

    # -- what pages hold ---------------------------------------------------------------------------------------------

    def fill(self, chunks: Iterable[Chunk], start: int, end: int) -> None:
        """The plan in the making computes KV of positions ``[start, end)`` of a context, which are in these chunks."""
        size = self.chunk_tokens
        for chunk in chunks:
            first = chunk.index * size
            low, high = max(start - first, 0), min(end - first, size)
            assert chunk.filled == low, (
                f"chunk {chunk.index}: filled {chunk.filled}, but {low} was computed next"
            )
            chunk.filled = high
            if chunk.host != NOWHERE:
                self._stale.append(chunk)
            if chunk.shared:
                self._fresh.add(chunk)

    def truncate(self, chunk: Chunk, filled: int) -> None:
        """A chunk holds KV of its first ``filled`` tokens at most: others will follow those."""
        chunk.filled = min(chunk.filled, filled)
        if chunk.filled == 0 and chunk.host != NOWHERE:
            self.evict_from_host(chunk)  # or an empty chunk would be copied in

    # -- device pages ------------------------------------------------------------------------------------------------

    def place(self, chunk: Chunk) -> None:
        """Give a chunk that is not on the device a free page there."""
        chunk.device = self.device.take(chunk.holder.tenant)

    def load(self, chunk: Chunk) -> None:
        """Place a HOST chunk on the device and plan the copy of what it holds."""
        self.place(chunk)
        self._swap_in.append(Copy(chunk.host, chunk.device))
        chunk.loading = True
        self._in_flight.append(chunk)

    def copy(self, source: Chunk, target: Chunk, filled: int) -> None:
        """Place a new chunk on the device and plan the copy of another's first ``filled`` tokens, which are there."""
        self.pin((source,))
        self._copied.append(source)
        self.place(target)
        target.filled = filled
        target.loading = True
        self._in_flight.append(target)
        self._copies.append(Copy(source.device, target.device))

    def move_page(self, source: Chunk, target: Chunk) -> None:
        """Give a chunk without a device page that of another, which holds the same tokens and will be freed."""
        target.device, source.device = source.device, NOWHERE
        target.filled = source.filled
        self._changed(target.holder)
        self._changed(source.holder)

    # -- host pages, evictions ---------------------------------------------------------------------------------------

    def save(self, chunk: Chunk) -> None:
        """Plan the copy of a DEVICE chunk to a free host page."""
        chunk.host = self.host.take(chunk.holder.tenant)
        chunk.saving = True
        self._swap_out.append(Copy(chunk.device, chunk.host))
        self._in_flight.append(chunk)
        self._changed(chunk.holder)

    def evict_from_device(self, chunk: Chunk) -> None:
        """Free a chunk's device page; without a host copy it is dropped.

        The page is free at once even if it has yet to be read: a plan swaps out before it writes anything.
        """
        self.device.put_back(chunk.device, chunk.holder.tenant)
        chunk.device = NOWHERE
        self._after_eviction(chunk)

    def evict_from_host(self, chunk: Chunk) -> None:
        """Free a chunk's host page; what the device still has stays, else it is dropped."""
        self.host.put_back(chunk.host, chunk.holder.tenant)
        chunk.host = NOWHERE
        self.spare.pop(chunk, None)
        self._after_eviction(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Evict a chunk from both tiers."""
        if chunk.device != NOWHERE:
            self.evict_from_device(chunk)
        if chunk.host != NOWHERE:
            self.evict_from_host(chunk)

    def free(self, chunk: Chunk) -> None:
        """Free every page of a chunk that no session owns any more: it does not count as dropped."""
        if chunk.device != NOWHERE:
            self.device.put_back(chunk.device, chunk.holder.tenant)
        if chunk.host != NOWHERE:
            self.host.put_back(chunk.host, chunk.holder.tenant)
        chunk.device = chunk.host = NOWHERE
        chunk.filled = 0
        self.spare.pop(chunk, None)

    def _after_eviction(self, chunk: Chunk) -> None:
        holder = chunk.holder
        self._changed(holder)
        if not chunk.cached:
            self.dropped_tokens += chunk.filled
            chunk.filled = 0
            self._dropped.pop(holder, None)
            self._dropped[holder] = None

    def take_dropped(self) -> list[CachedSession | SharedRun]:
        """The holders of chunks that were dropped since the last call, in the order of the last drop of each: where
        values are equal, the rows that they leave in the index decide what is evicted next."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

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
            self._changed(chunk.holder)
        self._in_flight.clear()
        for chunk in self._stale:
            if chunk.host != NOWHERE:
                self.evict_from_host(chunk)
        self._stale.clear()
        self._fresh.clear()
        for chunk in self._copied:
            self.unpin((chunk,))
        self._copied.clear()
