"""The eviction index of ``CacheManager``: whose chunks give way next, be they a session's own or shared.

Chunks that several sessions own are no session's: the runs that they form have rows of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, SharedRun
from pensieve.engine.cache.index import Reclaim, SessionIndex, VictimRound

Holder = CachedSession | SharedRun


def can_reclaim(chunk: Chunk, reclaim: Reclaim) -> bool:
    """Whether a chunk is a candidate."""
    if chunk.pins or chunk.saving or chunk.loading:
        return False
    if chunk.device == NOWHERE:
        return reclaim is Reclaim.HOST_COPY and chunk.host != NOWHERE
    return reclaim is (Reclaim.SAVED_PAGE if chunk.host == NOWHERE else Reclaim.PAGE)


class EvictionIndex(SessionIndex[CachedSession, Holder]):
    """The index of ``CacheManager``."""

    def round(self, reclaim: Reclaim, now: float, expected: int) -> EvictionRound:
        """Victims in ascending value, as the cache is now. ``expected``: how many will likely be taken."""
        return EvictionRound(self, reclaim, now, expected)

    def first_and_count(self, holder: Holder, reclaim: Reclaim) -> tuple[int, int]:
        indices = _candidates(holder, reclaim)
        return (indices[0], len(indices)) if indices else (-1, 0)

    def next_group(self, holder: Holder, reclaim: Reclaim) -> Sequence[int]:
        indices = _candidates(holder, reclaim)
        return self.policy.group(indices) if indices else ()

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
            for reclaim in Reclaim:
                first, count = self.first_and_count(holder, reclaim)
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
            for reclaim in Reclaim:
                count = sum(can_reclaim(chunk, reclaim) for chunk in holder.own)
                assert self._candidates[reclaim, row] == count, f"row {row}: {reclaim.name} count is stale"
        assert set(self._claims.pairs()) == pairs, "the claims are not those of the owners"


class EvictionRound(VictimRound[CachedSession, Holder]):
    """A round of the engine's index, in chunks."""

    def take(self) -> list[Chunk]:
        """The next group, in ascending position; empty when there is none. The caller evicts it, then ``put_back``s."""
        found = self.take_group()
        if found is None:
            return []
        holder, group = found
        own, first = holder.own, holder.first
        return [own[index - first] for index in group]


def _candidates(holder: Holder, reclaim: Reclaim) -> list[int]:
    return [chunk.index for chunk in holder.own if can_reclaim(chunk, reclaim)]
