"""Which pages of a tier are free. The lowest goes first, so that runs of adjacent pages form and tests are exact.

Of those that are taken the pool counts how many each tenant has.
"""

from __future__ import annotations

import heapq
from collections import defaultdict


class PagePool:
    """Free list over pages ``0 … capacity-1``."""

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
