"""Who is next: the queue between tenants, and what each of them may take of a step and of the batch.

Between tenants the one is next that was served least: fair queueing by virtual time (start-time fair queueing: Goyal,
Vin and Cheng, SIGCOMM 1996), in the form that needs no cost known beforehand, a counter of tokens computed for each
tenant, divided by its weight (the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). A tenant that comes back after a pause starts where those that are there now are: nobody saves up.

Within a tenant it is first come, first served. A level of priority counts as so much time of waiting, so that nobody
waits for ever behind others of higher priority. A request that was suspended comes before those that never ran.

With one tenant all of this is one queue in order of arrival.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pensieve.engine.scheduling.request import Request


class FairQueue:
    """The requests that wait, and the tenants that have any, waiting or running. The engine's thread owns it."""

    def __init__(self, places: int) -> None:
        """``places``: of the batch."""
        self._places = places
        self._lines: dict[str, list[Request]] = {}
        """Those that wait, by tenant; never an empty one."""
        self._present: Counter[str] = Counter()
        """Requests of each tenant that is here, those that run included."""
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        """Tokens computed for each tenant, divided by its weight: its virtual time."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line

    def __contains__(self, request: Request) -> bool:
        return request in self._lines.get(request.tenant, ())

    # -- tenants -----------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request is here from now on. Its tenant's weight is what the latest one says."""
        tenant = request.tenant
        if not self._present:
            self._served.clear()
            self._weights.clear()
        if tenant not in self._present:
            floor = min((self._served[other] for other in self._present), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._present[tenant] += 1
        self._weights[tenant] = request.qos.weight

    def depart(self, request: Request) -> None:
        """A request is no more."""
        self._present[request.tenant] -= 1
        if not self._present[request.tenant]:
            del self._present[request.tenant]

    def charge(self, request: Request, tokens: int) -> None:
        """So many tokens are computed for a request. What warms a session is nobody's, and of one tenant alone nothing
        need be counted: whoever comes later starts where that one is."""
        if not (self.is_for_one or request.warm):
            self._served[request.tenant] += tokens / self._weights[request.tenant]

    def charge_each(self, requests: Iterable[Request]) -> None:
        """One token is computed for each of them."""
        if not self.is_for_one:
            for request in requests:
                self.charge(request, 1)

    @property
    def is_for_one(self) -> bool:
        """Whether all that is here is one tenant's."""
        return len(self._present) < 2

    def share(self, tenant: str) -> float:
        """A tenant's part of the places of the batch, by the weights of all that are here."""
        return self._places * self._weights[tenant] / sum(self._weights[other] for other in self._present)

    def weight(self, tenant: str) -> float:
        """Weight of a tenant that is here; of any other, 1."""
        return self._weights.get(tenant, 1.0)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Into the queue, at its place."""
        bisect.insort(self._lines.setdefault(request.tenant, []), request, key=_place)

    def remove(self, request: Request) -> None:
        """Out of the queue. Raises ValueError for one that does not wait."""
        line = self._lines.get(request.tenant, [])
        line.remove(request)
        if not line:
            del self._lines[request.tenant]

    def heads(self) -> list[Request]:
        """The first of each tenant: before others those whose tenant has less than its share of the places, then by
        what was served; among equals first whoever has fewer that run, then the older request."""
        heads = [line[0] for line in self._lines.values()]
        if len(heads) < 2:
            return heads
        places_by_weight = self._places / sum(self._weights[tenant] for tenant in self._present)

        def order(request: Request) -> tuple[bool, float, int, tuple[float, int]]:
            tenant = request.tenant
            runs = self._present[tenant] - len(self._lines[tenant])
            share = places_by_weight * self._weights[tenant]
            return runs + 1 > share, self._served[tenant], runs, request.queue_order

        return sorted(heads, key=order)

    def waiting_of(self, tenant: str) -> Sequence[Request]:
        """Those of a tenant that wait, the next one first."""
        return self._lines.get(tenant, ())

    def position(self, request: Request) -> int:
        """How many requests of its own tenant come before one that waits."""
        return self._lines[request.tenant].index(request)

    def is_full(self, tenant: str, limit: int) -> bool:
        """Whether a queue of ``limit`` requests takes no more of a tenant's.

        Whoever waits with less than its share is not refused because others fill the queue: it never holds more than
        twice its limit.
        """
        if len(self) < limit:
            return False
        waiting = {*self._lines, tenant}
        total = sum(self.weight(other) for other in waiting)
        return len(self._lines.get(tenant, ())) >= limit * self.weight(tenant) / total


def max_min_shares(budget: int, demands: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """How many of ``budget`` tokens each tenant gets: what it demands, or its share of what the modest leave over.

    Max-min fair by weight ("water-filling"); whole tokens, all of the budget if the demands use it up.
    """
    left, given = budget, dict.fromkeys(demands, 0)
    open_ = sorted(demands, key=lambda tenant: demands[tenant] / weights[tenant])
    total = sum(weights[tenant] for tenant in open_)
    for tenant in open_:
        # The last one takes what rounding has left.
        fair = left if tenant == open_[-1] else int(left * weights[tenant] / total)
        given[tenant] = min(demands[tenant], fair)
        left -= given[tenant]
        total -= weights[tenant]
    return given


def _place(request: Request) -> tuple[bool, float, int]:
    return (request.receipt is None, *request.queue_order)
