"""The eviction index of ``CacheManager``: whose chunks give way next, be they a session's own or shared.

Chunks that several sessions own are no session's: the runs that they form have rows of their own. Sessions of one
tenant alone share, so a row's chunks are one tenant's.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from pensieve.core import Ints
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, SharedRun
from pensieve.engine.cache.claims import Bools
from pensieve.engine.cache.index import Reclaim, SessionIndex, VictimRound
from pensieve.engine.cache.policy import Policy
from pensieve.engine.cache.tenants import ANY, Allowance
from pensieve.engine.cost.model import CostModel

Holder = CachedSession | SharedRun


def way_of(chunk: Chunk) -> Reclaim | None:
    """In which way a chunk is a candidate; None: in none."""
    if chunk.pins or chunk.saving or chunk.loading:
        return None
    if chunk.device == NOWHERE:
        return None if chunk.host == NOWHERE else Reclaim.HOST_COPY
    return Reclaim.SAVED_PAGE if chunk.host == NOWHERE else Reclaim.PAGE


class EvictionIndex(SessionIndex[CachedSession, Holder]):
    """The index of ``CacheManager``."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        super().__init__(policy, cost)
        self._tenants: Ints = np.zeros(64, np.int64)
        """Whose the chunks in each row are."""
        self._numbers = 1
        """More than any of these."""

    def attach(self, holder: Holder) -> None:
        if holder.row >= self._tenants.size:
            self._tenants = np.pad(self._tenants, (0, self._last_active.size - self._tenants.size))
        self._tenants[holder.row] = holder.tenant
        self._numbers = max(self._numbers, holder.tenant + 1)
        super().attach(holder)

    def touch(self, holder: Holder) -> None:
        holder.strip = None
        super().touch(holder)

    def round(self, reclaim: Reclaim, now: float, expected: int, allowance: Allowance = ANY) -> EvictionRound:
        """Victims in ascending value, as the cache is now. ``expected``: how many will likely be taken."""
        return EvictionRound(self, reclaim, now, expected, allowance)

    def allowed(self, reclaim: Reclaim, allowance: Allowance) -> int:
        """How many chunks could be reclaimed this way now, with no more from each tenant than that."""
        if not allowance:
            return self.total(reclaim)
        self._refresh()
        used = len(self._sessions)
        found = np.bincount(self._tenants[:used], self._candidates[reclaim, :used], self._numbers)
        for tenant, most in allowance.items():
            if tenant < self._numbers:
                found[tenant] = min(found[tenant], most)
        return int(found.sum())

    def tenant_at(self, row: int) -> int:
        """Whose the chunks in a row are."""
        return int(self._tenants[row])

    def barred(self, allowance: Allowance) -> Bools | None:
        """Rows of tenants from whom nothing may be taken; None: there are none."""
        tenants = [tenant for tenant, most in allowance.items() if not most and tenant < self._numbers]
        if not tenants:
            return None
        table = np.zeros(self._numbers, np.bool_)
        table[tenants] = True
        return table.take(
            self._tenants[: len(self._sessions)], mode="clip"
        )  # the fast one: none is out of range

    def value(self, holder: Holder, chunk_index: int, candidates: int, now: float) -> float:
        if isinstance(holder, CachedSession):
            return self.session_value(holder, chunk_index, candidates, now)
        return self.run_value(holder, chunk_index, candidates)

    def _context(self, session: CachedSession) -> int:
        return len(session.tokens)

    def _fill(self, holders: list[Holder]) -> None:
        for holder in holders:
            row = holder.row
            if isinstance(holder, CachedSession):
                self._last_active[row] = holder.last_active
                self._kinds[row] = holder.kind
                if self._hinted:
                    self._pauses[row], self._weights[row] = holder.hint
            ways = [way_of(chunk) for chunk in holder.own]
            for reclaim in Reclaim:
                count = ways.count(reclaim)
                first = holder.first + ways.index(reclaim) if count else -1
                self._candidates[reclaim, row] = count
                self._first_cost[reclaim, row] = self.chunk_cost(first)

    def check(self) -> None:
        """Every row says what its holder's chunks say, and the claims are those of the owners."""
        self._refresh()
        pairs: set[tuple[int, int]] = set()
        for row, holder in enumerate(self._sessions):
            if holder is None:
                assert not np.isfinite(self._first_cost[:, row]).any(), f"row {row} outlived its session"
                continue
            if isinstance(holder, CachedSession):
                assert self._kinds[row] == holder.kind, f"{holder.key}: kind is stale"
                assert (self._pauses[row], self._weights[row]) == holder.hint, f"{holder.key}: hint is stale"
            else:
                pairs |= {(row, owner.row) for owner in holder.owners}
                assert {owner.tenant for owner in holder.owners} == {holder.tenant}, f"row {row}: tenants mix"
            assert self._tenants[row] == holder.tenant, f"row {row}: tenant is stale"
            for reclaim in Reclaim:
                count = sum(way_of(chunk) is reclaim for chunk in holder.own)
                assert self._candidates[reclaim, row] == count, f"row {row}: {reclaim.name} count is stale"
        assert set(self._claims.pairs()) == pairs, "the claims are not those of the owners"


class EvictionRound(VictimRound[CachedSession, Holder]):
    """A round of the engine's index, in chunks, within an allowance.

    A holder's chunks are looked at once in a round: from then on they are candidates until they are handed out. What
    else becomes its own meanwhile was shared with a session that is forgotten, so it is in no tier. To look at all
    of them again for each victim was half of the time to plan a step that swaps a long session in.
    """

    def __init__(
        self, index: EvictionIndex, reclaim: Reclaim, now: float, expected: int, allowance: Allowance
    ) -> None:
        super().__init__(index, reclaim, now, expected, index.barred(allowance) if allowance else None)
        self._tenant_at = index.tenant_at
        self._policy = index.policy
        self._left = dict(allowance)
        self._seen: dict[Holder, list[int]] = {}

    def first_and_count(self, holder: Holder) -> tuple[int, int]:
        indices = self._candidates(holder)
        return (indices[0], len(indices)) if indices else (-1, 0)

    def next_group(self, holder: Holder) -> Sequence[int]:
        indices = self._candidates(holder)
        return self._policy.group(indices) if indices else ()

    def _candidates(self, holder: Holder) -> list[int]:
        indices = self._seen.get(holder)
        if indices is None:
            indices = [chunk.index for chunk in holder.own if way_of(chunk) is self._reclaim]
            self._seen[holder] = indices
        return indices

    def take(self) -> list[Chunk]:
        """The next group, in ascending position; empty when there is none. The caller evicts it, then ``put_back``s."""
        while (found := self.take_group()) is not None:
            holder, group = found
            left = self._left.get(holder.tenant)
            if left == 0:
                heapq.heappop(self._heap)
                continue
            if left is not None:
                group = group[:left]
                self._left[holder.tenant] = left - len(group)
            own, first = holder.own, holder.first
            chunks = [own[index - first] for index in group]
            indices = self._candidates(holder)
            at = bisect_left(indices, group[0])
            del indices[at : at + len(group)]
            return chunks
        return []

    def put_back(self) -> None:
        super().put_back()
        # So that ``peek`` tells of what ``take`` gives.
        while self._left and self._heap and self._left.get(self.peek_tenant()) == 0:
            heapq.heappop(self._heap)

    def peek_tenant(self) -> int:
        """Whose the next victim is; there is one."""
        return self._tenant_at(self._heap[0][1])
