"""Which pages of a tier are free. The lowest goes first, so that runs of adjacent pages form and tests are exact."""

from __future__ import annotations

import heapq


class PagePool:
    """Free list over pages ``0 … capacity-1``."""

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
        """Take a free page. Raises IndexError when there is none: ask ``free`` first."""
        page = heapq.heappop(self._heap)
        self._free.remove(page)
        return page

    def put_back(self, page: int) -> None:
        """Return a page. Returning a free one is a bug and raises ValueError."""
        if page in self._free or not 0 <= page < self.capacity:
            raise ValueError(f"page {page} of {self.capacity} is not taken")
        self._free.add(page)
        heapq.heappush(self._heap, page)

    def is_free(self, page: int) -> bool:
        return page in self._free
