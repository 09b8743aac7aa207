"""The two tiers: the only writer of each chunk's pages, fill level and pins.

It owns these fields of a ``Chunk``: ``device``, ``host``, ``filled``, ``pins``, ``saving`` and ``loading``,
and the pages that they name. It decides nothing: the calls below are events, and the last column names the
class that decides each.

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
``place``              DROPPED → DEVICE                  a request will compute the chunk                 CacheManager
``copy``, its target   DROPPED → DEVICE                  copy on write, and a branch's tail               CacheManager
``load``               HOST → BOTH                       swapped in; the host copy stays, clean           CacheManager
``save``               DEVICE → BOTH                     copied out, ahead of time or on demand           Evictor
``evict_from_device``  BOTH → HOST, DEVICE → DROPPED     the page is needed; DROPPED: host is full        Evictor
``evict_from_host``    HOST → DROPPED, BOTH → DEVICE     the page is needed for a more valuable chunk     Evictor
``drop``               all → DROPPED                     its KV was never computed                        CacheManager
``move_page``          all → with a device page, or      two chunks with the same tokens become one       SharedChunks
                       without it
``free``               all → DROPPED, its last event     no session owns the chunk any more               SharedChunks
``fill``               writes to DEVICE and BOTH         a plan computes KV; ``filled`` grows             CacheManager
``truncate``           all; HOST → DROPPED at 0 tokens   other tokens will follow; ``filled`` shrinks     CacheManager
``pin``, ``unpin``     all                               a request that uses it begins or ends            CacheManager
``complete``           BOTH → DEVICE if it was filled    the plan was launched; its copies are made       CacheManager
=====================  ================================  ===============================================  ==============

A pinned chunk is not evicted from the device. A chunk is ``saving`` or ``loading`` from ``save``, ``load`` or
``copy`` until ``complete``. A chunk that is saving counts as DEVICE. It becomes HOST if the same plan takes
its device page, because a plan copies out before it writes. ``filled`` of a DROPPED chunk is 0.
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
    """Copies that one plan must make, named as in ``Plan``."""

    swap_out: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full both tiers are: KV-tokens that their pages have room for, however full each page is.

    ``dropped``: valid KV-tokens dropped for lack of room since start.
    """

    device_free: int
    device_reclaimable: int
    """In used pages that can be taken at once."""
    device_used: int
    host_free: int
    host_used: int
    dropped: int


class PagePool:
    """Free list over pages ``0 … capacity-1``. The lowest goes first: runs of adjacent pages form, and tests
    are exact."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap = list(range(capacity))
        self._free = set(self._heap)
        self.held: defaultdict[int, int] = defaultdict(int)
        """Pages in use, by tenant number."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self, tenant: int = 0) -> int:
        """Take a free page for a tenant. Raises IndexError when there is none: check ``free`` first."""
        page = heapq.heappop(self._heap)
        self._free.remove(page)
        self.held[tenant] += 1
        return page

    def put_back(self, page: int, tenant: int = 0) -> None:
        """Return a page of a tenant. Raises ValueError if it is free already."""
        if page in self._free or not 0 <= page < self.capacity:
            raise ValueError(f"page {page} of {self.capacity} is not taken")
        self._free.add(page)
        self.held[tenant] -= 1
        heapq.heappush(self._heap, page)

    def is_free(self, page: int) -> bool:
        return page in self._free


class Tiers:
    """The pages of both tiers and the chunks in them. Calls ``changed`` with the holder of each changed chunk."""

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
        """Chunks that some running request uses. Each has a device page or is about to get one."""
        self.pinned_by: defaultdict[int, int] = defaultdict(int)
        self.spare: dict[Chunk, None] = {}
        """Pinned chunks with a host copy, which running requests do not need; oldest first."""
        self.dropped_tokens = 0
        self._changed = changed
        self._dropped: dict[CachedSession | SharedRun, None] = {}
        """Holders of chunks dropped since ``take_dropped``, by their latest drop."""
        self._swap_out: list[Copy] = []
        self._copies: list[Copy] = []
        self._swap_in: list[Copy] = []
        self._in_flight: list[Chunk] = []
        """Chunks that the plan being made saves or loads."""
        self._stale: list[Chunk] = []
        """Chunks that the plan being made writes to. Their host copies are stale afterwards."""
        self._fresh: set[Chunk] = set()
        """Shared chunks that the plan being made writes to."""
        self._copied: list[Chunk] = []
        """Sources of copies on the device in the plan being made, pinned so that their pages are not
        overwritten."""

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def unpinned(self) -> int:
        """Device pages that no running request holds: free, or available by eviction."""
        return self.device.capacity - self.pinned

    @property
    def swaps_in(self) -> bool:
        return bool(self._swap_in)

    def can_copy(self, chunk: Chunk) -> bool:
        """Whether the chunk's KV is on the device before the plan being made loads and writes."""
        return chunk.device != NOWHERE and not chunk.loading and chunk not in self._fresh

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Pin chunks of one tenant for one more running request."""
        first = []
        for chunk in chunks:
            chunk.pins += 1
            if chunk.pins == 1:
                first.append(chunk)
                if chunk.host != NOWHERE:
                    self.spare[chunk] = None
        self._count_pins(first, len(first))

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        """Undo ``pin`` for one running request."""
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
        """Record that the plan being made computes KV of positions ``[start, end)``, which these chunks hold."""
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
        """Limit a chunk to its first ``filled`` tokens, because other tokens will follow them."""
        chunk.filled = min(chunk.filled, filled)
        if chunk.filled == 0 and chunk.host != NOWHERE:
            self.evict_from_host(chunk)  # an empty chunk must not be copied in

    # -- device pages ------------------------------------------------------------------------------------------------

    def place(self, chunk: Chunk) -> None:
        chunk.device = self.device.take(chunk.holder.tenant)

    def load(self, chunk: Chunk) -> None:
        """Give a HOST chunk a device page and plan the copy into it."""
        self.place(chunk)
        self._swap_in.append(Copy(chunk.host, chunk.device))
        chunk.loading = True
        self._in_flight.append(chunk)

    def copy(self, source: Chunk, target: Chunk, filled: int) -> None:
        """Give a new chunk a device page and plan the copy of the first ``filled`` tokens of ``source``."""
        self.pin((source,))
        self._copied.append(source)
        self.place(target)
        target.filled = filled
        target.loading = True
        self._in_flight.append(target)
        self._copies.append(Copy(source.device, target.device))

    def move_page(self, source: Chunk, target: Chunk) -> None:
        """Move a device page to a chunk with the same tokens that has none; ``source`` will be freed."""
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
        """Free a chunk's device page; without a host copy the chunk is dropped.

        The page is free at once even if it has yet to be read: a plan copies out before it writes.
        """
        self.device.put_back(chunk.device, chunk.holder.tenant)
        chunk.device = NOWHERE
        self._after_eviction(chunk)

    def evict_from_host(self, chunk: Chunk) -> None:
        """Free a chunk's host page; without a device page the chunk is dropped."""
        self.host.put_back(chunk.host, chunk.holder.tenant)
        chunk.host = NOWHERE
        self.spare.pop(chunk, None)
        self._after_eviction(chunk)

    def drop(self, chunk: Chunk) -> None:
        if chunk.device != NOWHERE:
            self.evict_from_device(chunk)
        if chunk.host != NOWHERE:
            self.evict_from_host(chunk)

    def free(self, chunk: Chunk) -> None:
        """Free all pages of a chunk that no session owns any more. It does not count as dropped."""
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
        """Return the holders of chunks dropped since the last call, ordered by the latest drop of each. The
        order matters: where values are equal, the rows that they free decide what is evicted next."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    # -- plan and commit ---------------------------------------------------------------------------------------------

    def take_copies(self) -> PlannedCopies:
        """Return the copies planned since the last call. Each copy is in exactly one plan."""
        planned = PlannedCopies(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in))
        self._swap_out, self._copies, self._swap_in = [], [], []
        return planned

    def complete(self) -> None:
        """Record the launch of the plan with all planned copies: later plans find the copies made."""
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
