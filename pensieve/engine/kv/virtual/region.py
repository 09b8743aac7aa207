"""One range of addresses, backed with memory from both ends (the interface of vAttention, section 5.3).

The range is cut into *slots*, and a *handle* of physical memory backs each slot or does not::

    byte 0                                                                                     ceiling
    ├── permanent ──┼─ slot ─┼─ slot ─┤· · · · · · · · · · · · · · · · ┼─ slot ─┼─ slot ─┼─ slot ─┤
      large handles           low ──▶            not backed                   ◀── high

Reading or writing memory that is not backed ends the process. New memory may hold anything.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

LARGE_HANDLE: Final = 256 << 20
"""Bytes of the handles of the permanent part: fewer calls at the start."""
MOST_OF_HANDLE: Final = 32 << 20
"""Most bytes of a handle above the permanent part: mapping 32 MiB takes as long as mapping 2 MiB."""
MOST_HANDLES: Final = 4096
"""About as many handles back a range at most: Linux limits the mappings of a process to 65,530."""


class Backend(Protocol):
    """Makes one range of addresses and handles of physical memory for it. Offsets are bytes from the range's start."""

    @property
    def granule(self) -> int:
        """Bytes; slots and handles are multiples of it."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Reserve the range; call it once. Raises MemoryError when there are not enough addresses."""
        ...

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """View the start of the range, uint8 [num_bytes]. Its first byte must be backed. Views that exist after
        ``free`` must not be used."""
        ...

    def create(self, num_bytes: int) -> int:
        """Return a new handle. Raises MemoryError when memory does not suffice."""
        ...

    def map(self, offset: int, num_bytes: int, handle: int) -> None:
        """Back ``num_bytes`` from ``offset`` on with a handle of this size. Raises MemoryError like ``create``."""
        ...

    def unmap(self, offset: int, num_bytes: int) -> None:
        """Take the handle from a slot. No kernel or copy may touch the slot any more."""
        ...

    def release(self, handle: int, num_bytes: int) -> None:
        """Give the memory of a handle back. It must not be mapped."""
        ...

    def free(self) -> None:
        """Give the range back. No slot is backed."""
        ...


@dataclass(frozen=True, slots=True)
class RegionSizes:
    """Sizes of a region's parts, in bytes. The defaults switch optional parts off."""

    permanent: int = 0
    """Backed as long as the region exists, from byte 0 on, besides what ``step`` asks for. At least one handle is."""
    handle: int = 0
    """Size of a handle above the permanent part, rounded up to a granule."""
    ahead: int = 0
    """Mapped at most beyond an end that has grown (eager allocation, vAttention section 6.1.2)."""
    kept: int = 0
    """Most bytes of unmapped handles that are kept for the next growth (deferred reclamation, section 6.1.2)."""


class Region:
    """A reserved range and the handles that back it. All calls may come from any thread."""

    def __init__(self, ceiling_bytes: int, backend: Backend, sizes: RegionSizes) -> None:
        """Reserve the range and back the permanent part. Raises MemoryError when either is impossible."""
        self._backend, self._sizes, self.ceiling = backend, sizes, ceiling_bytes
        self._edges = _edges(ceiling_bytes, backend.granule, sizes)
        self._slots = len(self._edges) - 1
        self._permanent = max(1, bisect.bisect_left(self._edges, min(sizes.permanent, ceiling_bytes)))
        self._lock = threading.Lock()
        self._mapped: dict[int, int] = {}
        """Handle of each backed slot."""
        self._ahead: set[int] = set()
        """Slots that are backed before anything asked for them."""
        self._kept: defaultdict[int, list[int]] = defaultdict(list)
        """Handles that back no slot, by their size."""
        self._held = 0
        self._low = self._high = 0
        self._below, self._above = self._bounds(0, 0)
        """Slots below the one and from the other on must be backed."""
        self._grown = 0, 0
        """Bytes by which the latest growth made each end longer."""
        self._freed = False
        backend.reserve(self._edges[-1])
        try:
            self._back(range(self._permanent))
            self.tensor = backend.tensor(ceiling_bytes)
            """uint8 [ceiling]."""
        except BaseException:
            self.free()
            raise

    @property
    def permanent(self) -> int:
        """Bytes from the bottom that are always backed."""
        return min(self._edges[self._permanent], self.ceiling)

    @property
    def low(self) -> int:
        """Bytes that are to be backed from the bottom, the permanent part aside."""
        return self._low

    @property
    def high(self) -> int:
        """Bytes that are to be backed from the top."""
        return self._high

    @property
    def held(self) -> int:
        """Bytes of all handles: of backed slots, mapped ahead, and kept for reuse."""
        return self._held

    def step(self, low: int, high: int) -> None:
        """Back exactly these bytes of each end, rounded outwards to slots, and the permanent part.

        Grows before it shrinks. Raises MemoryError when a handle cannot be made: then everything is as it was.
        """
        self.grow(low, high)
        self.lower(low, high)
        self.sweep()

    def grow(self, low: int, high: int) -> None:
        """Back at least these bytes of each end. Raises MemoryError like ``step``, ValueError for an end that is
        longer than the range."""
        with self._lock:
            if self._freed:
                raise RuntimeError("the region has been freed")
            if not (0 <= low <= self.ceiling and 0 <= high <= self.ceiling):
                raise ValueError(f"ends of {low} and {high} bytes in a range of {self.ceiling}")
            low, high = max(low, self._low), max(high, self._high)
            below, above = self._bounds(low, high)
            # Slots that an end had before are backed already.
            wanted = {*range(self._below, below), *range(above, self._above)}
            self._back_or_trim(sorted(wanted))
            self._ahead -= wanted
            self._grown = low - self._low, high - self._high
            self._low, self._high, self._below, self._above = low, high, below, above

    def lower(self, low: int, high: int) -> None:
        """Let the ends be no longer than this. ``sweep`` then gives the memory beyond them back."""
        with self._lock:
            low, high = min(low, self._low), min(high, self._high)
            if (low, high) != (self._low, self._high):
                self._ahead.clear()
                self._grown = 0, 0
                self._low, self._high = low, high
                self._below, self._above = self._bounds(low, high)

    def sweep(self, *, keep: bool = True) -> None:
        """Unmap handles that back nothing needed, one handle at a time, so that ``grow`` waits for one at most.

        ``keep``: handles may be kept for reuse. Otherwise those that have been kept so far go, too.
        """
        with self._lock:
            found = [slot for slot in self._mapped if self._is_spare(slot)]
        for slot in found:
            with self._lock:
                if slot in self._mapped and self._is_spare(slot):
                    self._unmap(slot, keep=keep)
        while not keep and self._release_one():
            pass

    def map_ahead(self) -> None:
        """Map beyond the ends that grew last as much as they grew by, up to ``ahead`` bytes, as far as there are slots
        and memory. ``grow`` waits for one handle at most."""
        for end in (0, 1):
            while self._map_one_ahead(end):
                pass

    def trim(self) -> None:
        """Give back handles that are mapped ahead or kept for reuse."""
        with self._lock:
            self._grown = 0, 0
            self._trim()

    def free(self) -> None:
        """Give everything back. No kernel, copy or view may touch the range any more. May be called again."""
        with self._lock:
            if self._freed:
                return
            self._freed = True
            for slot in list(self._mapped):
                self._unmap(slot)
            self._trim()
            self._backend.free()

    def _release_one(self) -> bool:
        with self._lock:
            size = next((size for size, handles in self._kept.items() if handles), None)
            if size is not None:
                self._release(self._kept[size].pop(), size)
            return size is not None

    def _map_one_ahead(self, end: int) -> bool:
        with self._lock:
            most = min(self._grown[end], self._sizes.ahead)
            middle = range(self._below, self._above)
            slot = next((at for at in (reversed(middle) if end else middle) if at not in self._mapped), None)
            ahead = sum(map(self._size, self._ahead))
            if self._freed or slot is None or ahead + self._size(slot) > most:
                return False
            try:
                self._back([slot])
            except MemoryError:
                return False  # ``grow`` says so if this memory is ever needed
            self._ahead.add(slot)
            return True

    # -- with the lock held ------------------------------------------------------------------------------------------

    def _size(self, slot: int) -> int:
        return self._edges[slot + 1] - self._edges[slot]

    def _bounds(self, low: int, high: int) -> tuple[int, int]:
        """Return (below, above): the slots below the one and from the other on hold bytes of ends of these lengths, or
        of the permanent part."""
        below = max(self._permanent, bisect.bisect_left(self._edges, low))
        above = bisect.bisect_right(self._edges, self.ceiling - high) - 1 if high else self._slots
        return below, max(above, below)

    def _is_spare(self, slot: int) -> bool:
        return self._below <= slot < self._above and slot not in self._ahead

    def _back(self, slots: Iterable[int]) -> None:
        """Back all of these slots that are not yet, or none of them."""
        done: list[int] = []
        try:
            for slot in slots:
                if slot in self._mapped:
                    continue
                size = self._size(slot)
                handle = self._kept[size].pop() if self._kept[size] else self._create(size)
                try:
                    self._backend.map(self._edges[slot], size, handle)
                except BaseException:
                    self._release(handle, size)
                    raise
                self._mapped[slot] = handle
                done.append(slot)
        except BaseException:
            for slot in done:
                self._unmap(slot)
            raise

    def _back_or_trim(self, slots: list[int]) -> None:
        """``_back``; if memory is missing, with that which this region holds without need."""
        spare = bool(self._ahead or self._kept_bytes())
        try:
            self._back(slots)
        except MemoryError:
            self._trim()
            if not spare:
                raise
            try:
                self._back(slots)
            except MemoryError:
                self._trim()
                raise

    def _unmap(self, slot: int, *, keep: bool = True) -> None:
        """Take the memory from a slot, and keep its handle for reuse if it may be."""
        size, handle = self._size(slot), self._mapped[slot]
        self._backend.unmap(self._edges[slot], size)
        del self._mapped[slot]
        if keep and self._kept_bytes() + size <= self._sizes.kept and not self._freed:
            self._kept[size].append(handle)
        else:
            self._release(handle, size)

    def _kept_bytes(self) -> int:
        return sum(size * len(handles) for size, handles in self._kept.items())

    def _trim(self) -> None:
        for slot in self._ahead:
            self._unmap(slot)
        self._ahead.clear()
        for size, handles in self._kept.items():
            while handles:
                self._release(handles.pop(), size)

    def _create(self, size: int) -> int:
        handle = self._backend.create(size)
        self._held += size
        return handle

    def _release(self, handle: int, size: int) -> None:
        self._backend.release(handle, size)
        self._held -= size


def reserve(ceiling_bytes: int, backend: Backend, sizes: RegionSizes | None = None) -> Region:
    """Return a region of ``ceiling_bytes``, of which only the permanent part is backed. Raises MemoryError."""
    return Region(ceiling_bytes, backend, sizes or RegionSizes())


def handle_bytes(unit_bytes: int, ceiling_bytes: int) -> int:
    """Return the bytes of a handle for units of this size: a unit takes one or a few, unless it is tiny."""
    return max(min(unit_bytes, MOST_OF_HANDLE), ceiling_bytes // MOST_HANDLES, 1)


def _edges(ceiling: int, granule: int, sizes: RegionSizes) -> list[int]:
    """Return the first byte of each slot and the end of the last."""

    def rounded(num_bytes: int) -> int:
        return -(-num_bytes // granule) * granule

    end, permanent = rounded(max(ceiling, 1)), rounded(min(sizes.permanent, ceiling))
    handle = rounded(max(sizes.handle, 1))
    starts = itertools.chain(range(0, permanent, rounded(LARGE_HANDLE)), range(permanent, end, handle))
    return [*starts, end]
