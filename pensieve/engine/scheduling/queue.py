"""The queue: fair between tenants, first come, first served within a tenant.

The tenant that was served least is next: fair queueing by virtual time (start-time fair queueing: Goyal, Vin and
Cheng, SIGCOMM 1996). Costs need not be known beforehand: each tenant has a counter of computed tokens, divided by
its weight (the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A
tenant that returns after a pause starts at the counter of the tenants present, so a pause earns no credit.

Within a tenant, a level of priority counts as a fixed time of waiting, so that no request waits forever
behind others of higher priority. Suspended requests come before those that never ran. With one tenant, all of
this is one queue in order of arrival.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pensieve.engine.scheduling.request import Request


class FairQueue:
    """Waiting requests, and the tenants that have any request waiting or running. The engine's thread owns it."""

    def __init__(self, places: int) -> None:
        """``places``: most requests in the batch."""
        self._places = places
        self._waiting: dict[str, list[Request]] = {}
        """Waiting requests by tenant; no list is empty."""
        self._present: Counter[str] = Counter()
        """Waiting and running requests of each tenant."""
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        """Virtual time of each tenant: tokens computed for it, divided by its weight."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        for line in self._waiting.values():
            yield from line

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting.get(request.tenant, ())

    # -- tenants -----------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Register a new request. The latest request sets its tenant's weight."""
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
        self._present[request.tenant] -= 1
        if not self._present[request.tenant]:
            del self._present[request.tenant]

    def charge(self, request: Request, tokens: int) -> None:
        """Charge a request's tenant for computed tokens. Warm-ups are free, and so is a tenant that is alone:
        one that arrives later starts at its counter."""
        if not (self.is_for_one or request.warm):
            self._served[request.tenant] += tokens / self._weights[request.tenant]

    def charge_each(self, requests: Iterable[Request]) -> None:
        if not self.is_for_one:
            for request in requests:
                self.charge(request, 1)

    @property
    def is_for_one(self) -> bool:
        """Whether all requests belong to one tenant."""
        return len(self._present) < 2

    def share(self, tenant: str) -> float:
        """Return a tenant's share of the batch's places, by the weights of all tenants present."""
        return self._places * self._weights[tenant] / sum(self._weights[other] for other in self._present)

    def least_served_first(self, tenants: Iterable[str]) -> list[str]:
        """Return tenants that have requests, in ascending order of their virtual times."""
        return sorted(tenants, key=lambda tenant: self._served[tenant])

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight; 1 if it has no request."""
        return self._weights.get(tenant, 1.0)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        bisect.insort(self._waiting.setdefault(request.tenant, []), request, key=_order)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it does not wait."""
        line = self._waiting.get(request.tenant, [])
        line.remove(request)
        if not line:
            del self._waiting[request.tenant]

    def heads(self) -> list[Request]:
        """Return each tenant's first request in order of service: tenants below their share of the batch
        first, then by tokens served. Ties: fewer running requests, then the older request."""
        heads = [line[0] for line in self._waiting.values()]
        if len(heads) < 2:
            return heads
        places_by_weight = self._places / sum(self._weights[tenant] for tenant in self._present)

        def order(request: Request) -> tuple[bool, float, int, tuple[float, int]]:
            tenant = request.tenant
            runs = self._present[tenant] - len(self._waiting[tenant])
            share = places_by_weight * self._weights[tenant]
            return runs + 1 > share, self._served[tenant], runs, request.queue_order

        return sorted(heads, key=order)

    def waiting_of(self, tenant: str) -> Sequence[Request]:
        """Return a tenant's waiting requests, the next one first."""
        return self._waiting.get(tenant, ())

    def position(self, request: Request) -> int:
        """Return how many requests of its own tenant come before a waiting one."""
        return self._waiting[request.tenant].index(request)

    def is_full(self, tenant: str, limit: int) -> bool:
        """Whether a queue of ``limit`` requests refuses a further one of this tenant.

        A tenant with less than its share of the queue is not refused because others fill it. The queue never
        holds more than twice its limit.
        """
        if len(self) < limit:
            return False
        waiting = {*self._waiting, tenant}
        total = sum(self.weight(other) for other in waiting)
        return len(self._waiting.get(tenant, ())) >= limit * self.weight(tenant) / total


def max_min_shares(budget: int, demands: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Divide ``budget`` tokens by weighted max-min fairness ("water-filling").

    Each tenant gets its demand or its share of what smaller demands leave over. ``demands``: the first tenants get the
    remainder of rounding. If they were always the same ones, a small budget would leave nothing to the others.
    """
    remaining, given = float(budget), dict.fromkeys(demands, 0)
    total = sum(weights[tenant] for tenant in demands)
    for tenant in sorted(demands, key=lambda tenant: demands[tenant] / weights[tenant]):
        share = min(demands[tenant], remaining * weights[tenant] / max(total, weights[tenant]))
        given[tenant] = int(share)
        remaining -= share
        total -= weights[tenant]
    rest = min(budget, sum(demands.values())) - sum(given.values())
    for tenant in [tenant for tenant in demands if given[tenant] < demands[tenant]][:rest]:
        given[tenant] += 1
    return given


def _order(request: Request) -> tuple[bool, float, int]:
    return (request.receipt is None, *request.queue_order)
