"""Eviction index of ``CacheManager``: ranks the chunks of sessions and shared runs, and yields victims.

Shared chunks belong to no single session: each shared run has a row of its own. Only sessions of one tenant
share, so all chunks of a row belong to one tenant.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from pensieve.core import Hints
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, SharedRun
from pensieve.engine.cache.claims import Bools
from pensieve.engine.cache.index import Reclaim, ValueTable
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates.hints import NO_HINT, hint_from
from pensieve.engine.cache.tenants import UNLIMITED, Allowance
from pensieve.engine.cost.model import CostModel

Holder = CachedSession | SharedRun


def reclaim_kind(chunk: Chunk) -> Reclaim | None:
    """Return how a chunk can be reclaimed; None: not at all (pinned, being copied, or in no tier)."""
    if chunk.pins or chunk.saving or chunk.loading:
        return None
    if chunk.device == NOWHERE:
        return None if chunk.host == NOWHERE else Reclaim.HOST_COPY
    return Reclaim.SAVED_PAGE if chunk.host == NOWHERE else Reclaim.PAGE


class EvictionIndex:
    """The rows of all holders. Call ``touch`` after each change to a holder's chunks or activity."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.table = ValueTable(policy, cost)
        self._holders: list[Holder | None] = []
        self._dirty: dict[Holder, None] = {}
        self._tenants = 1
        """The largest tenant number plus one."""

    @property
    def policy(self) -> Policy:
        return self.table.policy

    # -- rows --------------------------------------------------------------------------------------------------------

    def add_row(self) -> int:
        """Allocate a row for a new holder; call ``attach`` next."""
        row = self.table.add_row()
        if row == len(self._holders):
            self._holders.append(None)
        return row

    def attach(self, holder: Holder) -> None:
        self._holders[holder.row] = holder
        self.table.tenants[holder.row] = holder.tenant
        self._tenants = max(self._tenants, holder.tenant + 1)
        self.touch(holder)

    def remove(self, holder: Holder) -> None:
        """Remove a holder and free its row for another."""
        self._dirty.pop(holder, None)
        self._holders[holder.row] = None
        self.table.remove_row(holder.row)

    def touch(self, holder: Holder) -> None:
        holder.strip = None
        self._dirty[holder] = None

    def add_owner(self, run: SharedRun, owner: CachedSession) -> None:
        self.table.claims.add(run.row, owner.row)

    def remove_owner(self, run: SharedRun, owner: CachedSession) -> None:
        self.table.claims.remove(run.row, owner.row)

    # -- activity ----------------------------------------------------------------------------------------------------

    def on_turn_end(self, session: CachedSession, now: float, hints: Hints | None = None) -> None:
        """Record the end of the session's turn; its tokens must be those of the whole context. Call ``touch`` next."""
        session.kind = self.policy.on_turn_end(session.key, session.new_tokens, len(session.tokens), now)
        self.set_hints(session, hints)

    def set_hints(self, session: CachedSession, hints: Hints | None) -> None:
        """Set the hints that count from ``last_active`` until the session's next turn. Call ``touch`` next."""
        if hints is not None and self.policy.uses_hints:
            session.hint, self.table.hinted = hint_from(hints), True

    def on_turn_start(self, session: CachedSession, new_tokens: int, now: float) -> None:
        """Record that a turn starts with this much input; 0: a suspended turn goes on. Call ``touch`` next."""
        session.new_tokens = new_tokens or session.new_tokens
        session.hint = NO_HINT
        self.policy.on_return(session.key, now)

    def on_suspend(self, session: CachedSession, now: float) -> None:
        """Record that the turn was suspended: its chunks are kept by recency alone, not by the session's kind."""
        session.kind, session.hint = UNKNOWN, NO_HINT
        self.policy.on_return(session.key, now)

    # -- questions ---------------------------------------------------------------------------------------------------

    def round(
        self, reclaim: Reclaim, now: float, expected: int, allowance: Allowance = UNLIMITED
    ) -> EvictionRound:
        """Start an eviction round over the present cache. ``expected``: how many victims will likely be taken."""
        self._refresh()
        return EvictionRound(self, reclaim, now, expected, allowance)

    def total(self, reclaim: Reclaim) -> int:
        self._refresh()
        return int(self.table.candidates[reclaim].sum())

    def allowed(self, reclaim: Reclaim, allowance: Allowance) -> int:
        """Return how many chunks can be reclaimed this way now, within the allowance of each tenant."""
        if not allowance:
            return self.total(reclaim)
        self._refresh()
        used = self.table.rows
        found = np.bincount(self.table.tenants[:used], self.table.candidates[reclaim, :used], self._tenants)
        for tenant, most in allowance.items():
            if tenant < self._tenants:
                found[tenant] = min(found[tenant], most)
        return int(found.sum())

    def barred(self, allowance: Allowance) -> Bools | None:
        """Rows of tenants that may give nothing, bool [rows]; None: there are none."""
        tenants = [tenant for tenant, most in allowance.items() if not most and tenant < self._tenants]
        if not tenants:
            return None
        barred = np.zeros(self._tenants, np.bool_)
        barred[tenants] = True
        return barred.take(
            self.table.tenants[: self.table.rows], mode="clip"
        )  # clip is fast; nothing is out of range

    def holder_at(self, row: int) -> Holder | None:
        """Return the row's holder; None when it was removed during the round."""
        return self._holders[row]

    def value(self, holder: Holder, chunk_index: int, candidates: int, now: float) -> float:
        """Value of a holder's next victim, in a round that began at ``now``."""
        if isinstance(holder, SharedRun):
            return self.table.run_value(holder.row, chunk_index, candidates)
        idle = now - holder.last_active
        return self.table.session_value(chunk_index, candidates, idle, holder.kind, holder.hint)

    def _refresh(self) -> None:
        table = self.table
        for holder in self._dirty:
            row = holder.row
            if isinstance(holder, CachedSession):
                table.last_active[row] = holder.last_active
                table.kinds[row] = holder.kind
                if table.hinted:
                    table.pauses[row], table.weights[row] = holder.hint
            ways = [reclaim_kind(chunk) for chunk in holder.own_chunks]
            for reclaim in Reclaim:
                count = ways.count(reclaim)
                first = holder.first_index + ways.index(reclaim) if count else -1
                table.candidates[reclaim, row] = count
                table.first_cost[reclaim, row] = table.chunk_cost(first)
        self._dirty.clear()

    def check(self) -> None:
        """Assert that every row agrees with its holder's chunks, and the claims with the owners of runs."""
        self._refresh()
        table = self.table
        pairs: set[tuple[int, int]] = set()
        for row, holder in enumerate(self._holders):
            if holder is None:
                assert not np.isfinite(table.first_cost[:, row]).any(), f"row {row} outlived its session"
                continue
            if isinstance(holder, CachedSession):
                assert table.kinds[row] == holder.kind, f"{holder.key}: kind is stale"
                assert (table.pauses[row], table.weights[row]) == holder.hint, f"{holder.key}: hint is stale"
            else:
                pairs |= {(row, owner.row) for owner in holder.owners}
                assert {owner.tenant for owner in holder.owners} == {holder.tenant}, f"row {row}: tenants mix"
            assert table.tenants[row] == holder.tenant, f"row {row}: tenant is stale"
            for reclaim in Reclaim:
                count = sum(reclaim_kind(chunk) is reclaim for chunk in holder.own_chunks)
                assert table.candidates[reclaim, row] == count, f"row {row}: {reclaim.name} count is stale"
        assert set(table.claims.pairs()) == pairs, "the claims differ from the owners of runs"


class EvictionRound:
    """Yields groups of victims, lowest value first, within an allowance. Made by ``EvictionIndex.round``.

    Valid until the cache changes in any way other than evicting these victims. A holder's chunks are
    classified once per round and stay candidates until taken. Chunks that become a holder's own meanwhile
    were shared with a session that has been removed, so they are in no tier. Classifying all of them again
    for each victim took half of the time to plan a step that swaps in a long session.
    """

    def __init__(
        self, index: EvictionIndex, reclaim: Reclaim, now: float, expected: int, allowance: Allowance
    ) -> None:
        self._index = index
        self._reclaim = reclaim
        self._now = now
        self._remaining = dict(allowance)
        """Chunks that may still be taken from each tenant with a share."""
        self._seen: dict[Holder, list[int]] = {}
        """Candidate chunk indices of each holder seen so far, ascending."""
        barred = index.barred(allowance) if allowance else None
        rows, values = index.table.lowest_rows(reclaim, now, expected, barred)
        self._heap = list(zip(values.tolist(), rows.tolist(), strict=True))
        heapq.heapify(self._heap)

    def peek(self) -> float:
        """Return the value of the next victim; infinity when there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def peek_tenant(self) -> int:
        """Return the tenant of the next victim. The heap must not be empty."""
        return int(self._index.table.tenants[self._heap[0][1]])

    def take(self) -> list[Chunk]:
        """Return the next group in ascending position; [] when there is none. Evict it, then call ``put_back``."""
        while self._heap:
            holder = self._index.holder_at(self._heap[0][1])
            if (
                holder is None
                or (remaining := self._remaining.get(holder.tenant)) == 0
                or not (indices := self._candidates(holder))
            ):
                heapq.heappop(self._heap)
                continue
            group = self._index.policy.group(indices)
            if remaining is not None:
                group = group[:remaining]
                self._remaining[holder.tenant] = remaining - len(group)
            own, first = holder.own_chunks, holder.first_index
            chunks = [own[index - first] for index in group]
            at = bisect_left(indices, group[0])
            del indices[at : at + len(group)]
            return chunks
        return []

    def put_back(self) -> None:
        """Rank the holder of the group just taken again, by its remaining candidates."""
        row = self._heap[0][1]
        holder = self._index.holder_at(row)
        if holder is not None and (indices := self._candidates(holder)):
            value = self._index.value(holder, indices[0], len(indices), self._now)
            heapq.heapreplace(self._heap, (value, row))
        else:
            heapq.heappop(self._heap)
        # ``peek`` must describe the group that ``take`` returns.
        while self._remaining and self._heap and self._remaining.get(self.peek_tenant()) == 0:
            heapq.heappop(self._heap)

    def _candidates(self, holder: Holder) -> list[int]:
        indices = self._seen.get(holder)
        if indices is None:
            indices = [chunk.index for chunk in holder.own_chunks if reclaim_kind(chunk) is self._reclaim]
            self._seen[holder] = indices
        return indices
