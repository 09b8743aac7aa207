"""The eviction index of ``TurnCache``: as ``pensieve.engine.cache.index``, over sessions whose chunks are bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pensieve.engine.cache.index import Reclaim, lowest
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cost.model import CostModel

DROPPED: Final = 0
HOST: Final = 1
DEVICE: Final = 2
BOTH: Final = 3
CHOSEN: Final = 4
"""On the device, about to be evicted."""
HOST_SAVING: Final = 5
"""Evicted by the plan that is being made: a candidate again when that plan is complete."""
BOTH_SAVING: Final = 6
BOTH_LOADING: Final = 7
SETTLED: Final = bytes((DROPPED, HOST, DEVICE, BOTH, CHOSEN, HOST, BOTH, BOTH, *range(8, 256)))
"""Place after the plan is complete, for ``bytearray.translate``."""
RECLAIMED: Final = bytes((DROPPED, HOST, DEVICE, HOST, *range(4, 256)))
"""Place of a chunk of an idle session that gave up its device slot if it could do so for nothing."""
ADMITTED: Final = bytes((DEVICE, BOTH_LOADING, *range(2, 256)))
"""Place of a chunk that was given a device slot if it had none."""
RECLAIMS: Final = {Reclaim.PAGE: BOTH, Reclaim.SAVED_PAGE: DEVICE, Reclaim.HOST_COPY: HOST}
"""Which place makes a chunk of an idle session a candidate."""


@dataclass(slots=True, eq=False)
class Resident:
    """A session with cached chunks."""

    key: int
    row: int
    tokens: int = 0
    places: bytearray = field(default_factory=bytearray)
    """One of the places above per chunk."""
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    """Of its latest turn."""
    kind: int = UNKNOWN
    """See ``Policy.left``."""
    cached: int = 0


class PlacesIndex:
    """One row per resident session. ``touch`` it after any change."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self.one_by_one = list(policy.group([0, 1, 2, 3])) == [0]
        self._cost = cost
        self._chunk_costs = cost.chunk_costs(256).tolist()
        self._residents: list[Resident | None] = []
        self._free_rows: list[int] = []
        self._dirty: dict[int, Resident] = {}
        self._first_cost = np.full((len(Reclaim), 64), np.inf)
        self._candidates = np.zeros((len(Reclaim), 64))
        self._last_active = np.zeros(64)
        self._kinds = np.full(64, UNKNOWN, np.int64)
        self._one = np.zeros((3, 1))
        """Columns of one session."""
        self._one_kind = np.zeros(1, np.int64)

    def add_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._residents.append(None)
        row = len(self._residents) - 1
        if row >= self._last_active.size:
            grow = ((0, 0), (0, row))
            self._first_cost = np.pad(self._first_cost, grow, constant_values=np.inf)
            self._candidates = np.pad(self._candidates, grow)
            self._last_active = np.pad(self._last_active, grow[1])
            self._kinds = np.pad(self._kinds, grow[1])
        return row

    def attach(self, resident: Resident) -> None:
        self._residents[resident.row] = resident
        self.touch(resident)

    def remove(self, resident: Resident) -> None:
        row = resident.row
        self._dirty.pop(row, None)
        self._residents[row] = None
        self._first_cost[:, row] = np.inf
        self._candidates[:, row] = 0
        self._free_rows.append(row)

    def touch(self, resident: Resident) -> None:
        self._dirty[resident.row] = resident

    def touch_all(self, residents: Iterable[Resident]) -> None:
        self._dirty.update({resident.row: resident for resident in residents})

    def left(self, resident: Resident, now: float) -> None:
        """As ``EvictionIndex.left``."""
        resident.kind = self.policy.left(resident.key, resident.new_tokens, resident.tokens, now)
        self.touch(resident)

    def came_back(self, resident: Resident, new_tokens: int, now: float) -> None:
        """As ``EvictionIndex.came_back``."""
        resident.new_tokens = new_tokens or resident.new_tokens
        self.policy.came_back(resident.key, now)
        self.touch(resident)

    def resident_at(self, row: int) -> Resident | None:
        return self._residents[row]

    def chunk_cost(self, index: int) -> float:
        if index >= len(self._chunk_costs):
            self._chunk_costs = self._cost.chunk_costs(2 * index + 1).tolist()
        return float(self._chunk_costs[index])

    def total(self, reclaim: Reclaim) -> int:
        """How many chunks could be reclaimed this way now."""
        self._refresh()
        return int(self._candidates[reclaim].sum())

    def value(self, resident: Resident, first: int, candidates: int, now: float) -> float:
        """Retention value of one session's next victim."""
        cost, count, idle = self._one
        cost[0], count[0], idle[0] = self.chunk_cost(first), candidates, now - resident.last_active
        self._one_kind[0] = resident.kind
        return float(self.policy.values(cost, count, idle, self._one_kind)[0])

    def round(self, reclaim: Reclaim, now: float, expected: int) -> PlacesRound:
        """Victims in ascending value, as the cache is now."""
        self._refresh()
        used = len(self._residents)
        first_cost = self._first_cost[reclaim, :used]
        idle = now - self._last_active[:used]
        values = self.policy.values(first_cost, self._candidates[reclaim, :used], idle, self._kinds[:used])
        values[np.isinf(first_cost)] = np.inf
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return PlacesRound(self, reclaim, now, rows.tolist(), values[rows].tolist())

    def _refresh(self) -> None:
        """Row by row would be simpler, and a tenth of a simulation's time."""
        if not self._dirty:
            return
        rows, residents = list(self._dirty), self._dirty.values()
        self._last_active[rows] = [resident.last_active for resident in residents]
        self._kinds[rows] = [resident.kind for resident in residents]
        for reclaim, place in RECLAIMS.items():
            firsts = [-1 if resident.running else resident.places.find(place) for resident in residents]
            self._first_cost[reclaim, rows] = [
                self.chunk_cost(first) if first >= 0 else np.inf for first in firsts
            ]
            self._candidates[reclaim, rows] = [
                resident.places.count(place) if first >= 0 else 0
                for resident, first in zip(residents, firsts, strict=True)
            ]
        self._dirty.clear()


class PlacesRound:
    """Hands out (session, chunk indices), lowest value first. Valid until the cache changes in another way."""

    def __init__(
        self, index: PlacesIndex, reclaim: Reclaim, now: float, rows: list[int], values: list[float]
    ) -> None:
        self._index = index
        self._place = RECLAIMS[reclaim]
        self._now = now
        self._heap = list(zip(values, rows, strict=True))
        heapq.heapify(self._heap)

    def peek(self) -> float:
        """Value of the next victim; infinity when there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def take(self) -> tuple[Resident, list[int]] | None:
        """The next group; None when there is none. The caller evicts it, then ``put_back``s."""
        while self._heap:
            resident = self._index.resident_at(self._heap[0][1])
            if resident is not None and not resident.running:
                first = resident.places.find(self._place)
                if first >= 0:
                    return resident, self._group(resident, first)
            heapq.heappop(self._heap)
        return None

    def _group(self, resident: Resident, first: int) -> list[int]:
        if self._index.one_by_one:
            return [first]
        candidates = [index for index, place in enumerate(resident.places) if place == self._place]
        return list(self._index.policy.group(candidates))

    def put_back(self) -> None:
        """Re-rank the session whose group was just taken, with what it still has."""
        _, row = self._heap[0]
        resident = self._index.resident_at(row)
        first = -1 if resident is None else resident.places.find(self._place)
        if resident is None or first < 0:
            heapq.heappop(self._heap)
            return
        value = self._index.value(resident, first, resident.places.count(self._place), self._now)
        heapq.heapreplace(self._heap, (value, row))
