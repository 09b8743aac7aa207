"""The two tiers: the only writer of each chunk's pages, fill level and pins.

It owns the fields of a ``Slice``: ``device``, ``host``, ``filled``, ``pins``, ``saving`` and ``loading``, and the
pages that they name. A chunk is the slice of the model's first KV group; with two groups it has another one, and
everything below holds for each slice alone. It decides nothing: the calls below are events, and the last column
names the class that decides each.

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
``store_state``        writes to DEVICE and BOTH         a plan computes a state                          Tails
``move``               all with a device page            pages of the other group need the room           Evictor
``set_leftover``       unpinned, with a device page      only an earlier resume point needs the slice     Tails
``truncate``           all; HOST → DROPPED at 0 tokens   other tokens will follow; ``filled`` shrinks     CacheManager
``pin``, ``unpin``     all                               a request that uses it begins or ends            CacheManager
``complete``           BOTH → DEVICE if it was filled    the plan was launched; its copies are made       CacheManager
=====================  ================================  ===============================================  ==============

A pinned chunk is not evicted from the device. A chunk is ``saving`` or ``loading`` from ``save``, ``load`` or
``copy`` until ``complete``. A chunk that is saving counts as DEVICE. It becomes HOST if the same plan takes
its device page, because a plan copies out before it writes. ``filled`` of a DROPPED chunk is 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, OtherSlice, SharedRun, Slice
from pensieve.engine.cache.pages import PagePool, PageSize
from pensieve.engine.plan import Copy, PageCheck

Pages = tuple[int, int]
"""Numbers of pages of the first and the second group."""


class PlannedCopies(NamedTuple):
    """The copies and checks of one plan, named as in ``Plan``."""

    swap_out: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]
    checks: tuple[PageCheck, ...]


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


class Tiers:
    """The pages of both tiers and the slices in them. Calls ``changed`` with the holder of each changed slice."""

    def __init__(self, config: CacheConfig, changed: Callable[[CachedSession | SharedRun], None]) -> None:
        self.device, self.host = _pools(config)
        self.chunk_tokens = config.chunk_tokens
        self.pinned = [0, 0]
        """Slices of each group that some running request uses. Each has a device page or is about to get one."""
        self.promised = 0
        """Pages of the second group that are kept for running requests, besides pinned ones; ``Tails`` counts them."""
        self.repeated = 0
        """Pins of the second group's slices beyond the first of each. A request that lets such a slice go is promised
        a page for it, so the tier keeps one for each."""
        self.pinned_by: defaultdict[int, int] = defaultdict(int)
        """Bytes of pinned pages, by tenant number."""
        self.spare: dict[Slice, None] = {}
        """Pinned slices with a host copy, which running requests do not need; oldest first."""
        self.leftovers: dict[OtherSlice, None] = {}
        """Slices that only a turn needs which begins before the end of their holder; oldest first. They are on the
        device, unpinned, evicted first and never saved."""
        self.dropped_tokens = 0
        self.moves = 0
        """Slices moved since start: a page table made before the latest move may be stale."""
        self.floor_bytes = config.device_floor_bytes
        """Bytes that an elastic device tier keeps at least; None: it has one size."""
        self._page_bytes = [group.page_bytes for group in self.device.groups] + [0]
        moves = len(self.device.groups) > 1 or self.floor_bytes is not None
        self._at: dict[tuple[int, int], Slice] | None = {} if moves else None
        """The slice in each device page, by group and page: for moves, which a model with one group needs only in an
        elastic tier."""
        self._changed = changed
        self._dropped: dict[CachedSession | SharedRun, None] = {}
        """Holders of slices dropped since ``take_dropped``, by their latest drop."""
        self._swap_out: list[Copy] = []
        self._copies: list[Copy] = []
        self._swap_in: list[Copy] = []
        self._in_flight: list[Slice] = []
        """Slices that the plan being made saves or loads."""
        self._stale: list[Slice] = []
        """Slices that the plan being made writes to. Their host copies are stale afterwards."""
        self._fresh: set[Slice] = set()
        """Shared slices that the plan being made writes to."""
        self._computed: list[Chunk] | None = [] if config.check_recomputed else None
        """Chunks completed by a step, until a plan checks them; None: no plan checks any."""
        self._moved: dict[Slice, int] = {}
        """Slices that the plan being made moves, and the page that each had before: copies still read that page."""

    # -- questions: change nothing -----------------------------------------------------------------------------------

    def unpinned_bytes(self, more: Pages = (0, 0)) -> int:
        """Return the bytes of the device tier that no running request holds, free or available by eviction, if ``more``
        pages were pinned; negative when they cannot be."""
        pinned = self.claimed
        return self.device.spare(pinned[0] + more[0], pinned[1] + more[1])

    @property
    def claimed(self) -> Pages:
        """The pages of the device tier that running requests use or may take without asking."""
        return self.pinned[0], self.pinned[1] + self.promised + self.repeated

    def least_pages(self, chunks: int) -> int:
        """Return the pages of the first group that the device tier always holds; ``chunks``: its pages if it has one
        size."""
        group = self.device.groups[0]
        if self.floor_bytes is None or not group.layers:
            return chunks
        return self.floor_bytes // group.unit_bytes * group.unit_pages

    def holds_empty(self, pages: Pages) -> bool:
        """Whether the device tier can hold that many pages at its smallest size, if it holds nothing else."""
        least = self.device.ceiling_bytes if self.floor_bytes is None else self.floor_bytes
        return self.device.bytes_for(*pages) <= least

    @property
    def swaps_in(self) -> bool:
        return bool(self._swap_in)

    def is_pinned(self, group: int, page: int) -> bool:
        """Whether running requests use a device page, in a tier whose pages can move."""
        assert self._at is not None
        return self._at[group, page].pins > 0

    def can_copy(self, part: Slice) -> bool:
        """Whether the slice's KV is on the device before the plan being made loads and writes."""
        return part.device != NOWHERE and not part.loading and part not in self._fresh

    def occupancy(self, reclaimable: int) -> Occupancy:
        """Return how full both tiers are. ``reclaimable``: bytes of used device pages that can be taken at once."""
        return Occupancy(
            device_free=self.tokens(self.device.free_bytes),
            device_reclaimable=self.tokens(reclaimable),
            device_used=self.tokens(self.device.used_bytes),
            host_free=self.tokens(self.host.free_bytes),
            host_used=self.tokens(self.host.used_bytes),
            dropped=self.dropped_tokens,
        )

    def page_bytes(self, part: Slice) -> int:
        return self._page_bytes[part.group]

    def bytes_of(self, pages: Pages) -> int:
        return pages[0] * self._page_bytes[0] + pages[1] * self._page_bytes[1]

    def tokens(self, num_bytes: int) -> int:
        """Return how many tokens these bytes hold, with all groups kept whole."""
        return num_bytes * self.chunk_tokens // self.bytes_of((1, 1))

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, parts: Iterable[Slice]) -> None:
        """Pin slices of one tenant for one more running request."""
        first = []
        for part in parts:
            part.pins += 1
            if part.pins > 1:
                self.repeated += part.group
            else:
                first.append(part)
                if part.host != NOWHERE:
                    self.spare[part] = None
                if isinstance(part, OtherSlice) and part.leftover:
                    self._forget_leftover(part)
        self._count_pins(first, 1)

    def unpin(self, parts: Iterable[Slice]) -> None:
        """Undo ``pin`` for one running request."""
        last = []
        for part in parts:
            part.pins -= 1
            if part.pins:
                self.repeated -= part.group
            else:
                last.append(part)
                self.spare.pop(part, None)
        self._count_pins(last, -1)

    def _count_pins(self, parts: list[Slice], change: int) -> None:
        if parts:
            group = parts[0].group
            self.pinned[group] += change * len(parts)
            self.pinned_by[parts[0].holder.tenant] += change * len(parts) * self._page_bytes[group]
            for holder in dict.fromkeys([part.holder for part in parts]):
                self._changed(holder)

    # -- what pages hold ---------------------------------------------------------------------------------------------

    def fill(self, parts: Iterable[Slice], start: int, end: int) -> None:
        """Record that the plan being made computes KV of positions ``[start, end)``, which these slices hold."""
        size = self.chunk_tokens
        for part in parts:
            first = part.index * size
            low, high = max(start - first, 0), min(end - first, size)
            assert part.filled == low, (
                f"chunk {part.index}: filled {part.filled}, but {low} was computed next"
            )
            self._write(part, high)

    def store_state(self, part: OtherSlice, filled: int) -> None:
        """Record that the plan being made stores the state after the chunk's first ``filled`` tokens."""
        assert part.filled < filled <= self.chunk_tokens, f"chunk {part.index}: a state at {filled} again"
        self._write(part, filled)

    def _write(self, part: Slice, filled: int) -> None:
        part.filled = filled
        if part.host != NOWHERE:
            self._stale.append(part)
        if isinstance(part.holder, SharedRun):
            self._fresh.add(part)
        if self._computed is not None and isinstance(part, Chunk) and filled == self.chunk_tokens:
            self._computed.append(part)

    def discard(self, part: OtherSlice) -> None:
        """Let the contents of a slice that the plan being made moves to the host be computed again: that plan cannot
        load them."""
        assert part.saving and part.device == NOWHERE
        part.filled = 0
        self._stale.append(part)

    def truncate(self, part: Slice, filled: int) -> None:
        """Limit a slice to its first ``filled`` tokens, because other tokens will follow them."""
        part.filled = min(part.filled, filled)
        if part.filled == 0 and part.host != NOWHERE:
            self.evict_from_host(part)  # an empty slice must not be copied in

    # -- device pages ------------------------------------------------------------------------------------------------

    def place(self, part: Slice) -> None:
        part.device = self.device.take(part.group, part.holder.tenant)
        if self._at is not None:
            # With two groups, the worth of a tail counts all chunks that are cached.
            self._changed(part.holder)
            if self._page_bytes[part.group]:
                self._at[part.group, part.device] = part

    def load(self, part: Slice) -> None:
        """Give a HOST slice a device page and plan the copy into it."""
        self.place(part)
        self._plan(self._swap_in, Copy(part.host, part.device, part.group))
        part.loading = True
        self._in_flight.append(part)

    def bring(self, part: Slice) -> None:
        """Give a slice a device page, with a planned copy of what the host has of it. ``discard`` leaves nothing."""
        if part.host != NOWHERE and part.filled:
            self.load(part)
        else:
            self.place(part)

    def copy(self, source: Slice, target: Slice, filled: int) -> None:
        """Give a new slice a device page and plan the copy of the first ``filled`` tokens of ``source``.

        The source needs no pin: a plan reads the sources of all copies before it writes to any page.
        """
        self.place(target)
        target.filled = filled
        target.loading = True
        self._in_flight.append(target)
        self._plan(self._copies, Copy(self._read_from(source), target.device, target.group))

    def move_page(self, source: Slice, target: Slice) -> None:
        """Move a device page to a slice with the same tokens that has none; ``source`` will be freed."""
        if isinstance(source, OtherSlice) and source.leftover:
            self._forget_leftover(source)
        target.device, source.device = source.device, NOWHERE
        target.filled = source.filled
        if self._at is not None and self._page_bytes[target.group]:
            self._at[target.group, target.device] = target
        if source in self._moved:
            self._moved[target] = self._moved.pop(source)
        self._changed(target.holder)
        self._changed(source.holder)

    def move(self, group: int, source: int, target: int) -> Slice:
        """Move the slice in page ``source`` to the page ``target``, which the pool has taken for it; return it.

        A slice that the plan being made loads goes to the new page at once. Any other is copied before the plan
        loads and writes. The page tables of running requests that use it must be made again.
        """
        assert self._at is not None
        part = self._at.pop((group, source))
        self._at[group, target] = part
        part.device = target
        self.moves += 1
        for planned in (self._swap_in, self._copies):
            for at, copy in enumerate(planned):
                if part.loading and copy.dst == source and copy.group == group:
                    planned[at] = Copy(copy.src, target, group)
                    return part
        if part.filled:
            origin = self._moved.setdefault(part, source)
            self._copies = [one for one in self._copies if (one.group, one.dst) != (group, source)]
            self._copies.append(Copy(origin, target, group))
        return part

    def _plan(self, copies: list[Copy], copy: Copy) -> None:
        if self._page_bytes[copy.group]:  # pages of a group without layers hold nothing
            copies.append(copy)

    def _read_from(self, part: Slice) -> int:
        """Return the device page that a copy of the plan being made reads: before the plan moves anything."""
        return self._moved.get(part, part.device)

    # -- host pages, evictions ---------------------------------------------------------------------------------------

    def save(self, part: Slice) -> None:
        """Plan the copy of a DEVICE slice to a free host page."""
        part.host = self.host.take(part.group, part.holder.tenant)
        part.saving = True
        self._plan(self._swap_out, Copy(self._read_from(part), part.host, part.group))
        self._in_flight.append(part)
        self._changed(part.holder)

    def evict_from_device(self, part: Slice) -> None:
        """Free a slice's device page; without a host copy the slice is dropped.

        The page is free at once even if it has yet to be read: a plan copies out before it writes.
        """
        self._leave_device(part)
        self._after_eviction(part)

    def evict_from_host(self, part: Slice) -> None:
        """Free a slice's host page; without a device page the slice is dropped."""
        self._leave_host(part)
        self._after_eviction(part)

    def drop(self, part: Slice) -> None:
        if part.device != NOWHERE:
            self.evict_from_device(part)
        if part.host != NOWHERE:
            self.evict_from_host(part)

    def free(self, part: Slice) -> None:
        """Free all pages of a slice that no session needs any more. It does not count as dropped."""
        if part.device != NOWHERE:
            self._leave_device(part)
        if part.host != NOWHERE:
            self._leave_host(part)
        part.filled = 0
        if part.group:  # its chunk stays
            self._changed(part.holder)

    def set_leftover(self, part: OtherSlice, leftover: bool) -> None:
        """Say whether only an earlier resume point needs an unpinned slice. A leftover has no host copy."""
        if leftover and part.host != NOWHERE and not part.saving:
            self.free(part) if part.device == NOWHERE else self.evict_from_host(part)
        leftover = leftover and part.device != NOWHERE
        if leftover != part.leftover:
            if leftover:
                part.leftover = True
                self.leftovers[part] = None
            else:
                self._forget_leftover(part)
            self._changed(part.holder)

    def _forget_leftover(self, part: OtherSlice) -> None:
        part.leftover = False
        del self.leftovers[part]

    def _leave_device(self, part: Slice) -> None:
        self.device.put_back(part.device, part.group, part.holder.tenant)
        if self._at is not None:
            self._at.pop((part.group, part.device), None)
            self._forget_move(part)
            if isinstance(part, OtherSlice) and part.leftover:
                self._forget_leftover(part)
        part.device = NOWHERE

    def _leave_host(self, part: Slice) -> None:
        if part.saving:  # the page may be taken again at once: the plan being made must not write it twice
            gone = part.group, part.host
            self._swap_out = [one for one in self._swap_out if (one.group, one.dst) != gone]
            part.saving = False
        self.host.put_back(part.host, part.group, part.holder.tenant)
        part.host = NOWHERE
        self.spare.pop(part, None)

    def _forget_move(self, part: Slice) -> None:
        """Cancel the planned move of a slice whose page is given up: its target may be taken again."""
        if self._moved.pop(part, None) is not None:
            gone = part.group, part.device
            self._copies = [one for one in self._copies if (one.group, one.dst) != gone]

    def _after_eviction(self, part: Slice) -> None:
        holder = part.holder
        self._changed(holder)
        if not part.cached:
            self.dropped_tokens += part.filled if part.group == 0 else 0
            part.filled = 0
            self._dropped.pop(holder, None)
            self._dropped[holder] = None

    def take_dropped(self) -> list[CachedSession | SharedRun]:
        """Return the holders of slices dropped since the last call, ordered by the latest drop of each. The
        order matters: where values are equal, the rows that they free decide the next eviction."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    # -- plan and commit ---------------------------------------------------------------------------------------------

    def take_copies(self) -> PlannedCopies:
        """Return the copies planned since the last call, and the checks, once all else of a plan is decided. Each copy
        is in exactly one plan."""
        copies = tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in)
        planned = PlannedCopies(*copies, self._take_checks())
        self._swap_out, self._copies, self._swap_in = [], [], []
        return planned

    def _take_checks(self) -> tuple[PageCheck, ...]:
        """Return the chunks that were computed, have an address and are on the device after the plan being made.
        Generated chunks wait for their address until their request ends."""
        if self._computed is None or not self._page_bytes[0]:
            return ()
        checks, waiting = [], []
        for chunk in self._computed:
            if chunk.filled == self.chunk_tokens and chunk.device != NOWHERE:
                if chunk.digest:
                    address = int.from_bytes(chunk.digest[:8], "little", signed=True)
                    checks.append(PageCheck(address, chunk.device))
                elif chunk.pins:
                    waiting.append(chunk)
        self._computed = waiting
        return tuple(checks)

    def complete(self) -> None:
        """Record the launch of the plan with all planned copies: later plans find the copies made."""
        for part in self._in_flight:
            part.saving = part.loading = False
            self._changed(part.holder)
        self._in_flight.clear()
        for part in self._stale:
            if part.host != NOWHERE:
                self.evict_from_host(part)
        self._stale.clear()
        self._fresh.clear()
        self._moved.clear()


def _pools(config: CacheConfig) -> tuple[PagePool, PagePool]:
    """Return the empty device and host tiers. Host tiers have units of one page: no kernel reads there."""
    chunk_bytes = sum(group.page_bytes for group in config.groups)
    units = [group.device_unit or config.device_chunks for group in config.groups]
    device = [
        PageSize(group.layers, group.layer_page_bytes, unit)
        for group, unit in zip(config.groups, units, strict=True)
    ]
    host = [PageSize(group.layers, group.layer_page_bytes, 1) for group in config.groups]
    sizes = (config.device_bytes, config.device_chunks), (config.host_bytes, config.host_chunks)
    device_bytes, host_bytes = (
        chunks * chunk_bytes if num_bytes is None else num_bytes for num_bytes, chunks in sizes
    )
    elastic = config.device_floor_bytes is not None
    return PagePool(device_bytes, device, elastic=elastic), PagePool(host_bytes, host)
