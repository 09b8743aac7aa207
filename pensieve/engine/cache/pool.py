"""Slots of one tier: who is free. Lowest number first, so that runs of adjacent pages form and tests are exact."""

from __future__ import annotations

import heapq


class PagePool:
    """Free list over slots ``0 … capacity-1``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap = list(range(capacity))
        self._free = set(self._heap)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self) -> int:
        """A free slot. Raises IndexError when there is none: ask ``free`` first."""
        slot = heapq.heappop(self._heap)
        self._free.remove(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """Return a slot. Returning a free slot is a bug and raises."""
        if slot in self._free or not 0 <= slot < self.capacity:
            raise ValueError(f"slot {slot} of {self.capacity} is not taken")
        self._free.add(slot)
        heapq.heappush(self._heap, slot)

    def is_free(self, slot: int) -> bool:
        return slot in self._free
