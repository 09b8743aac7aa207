"""Eviction index of ``CacheManager``: ranks the chunks of sessions and shared runs, and yields victims.

Shared chunks belong to no single session: each shared run has a row of its own. Only sessions of one tenant
share, so all chunks of a row belong to one tenant.

In a model with two KV groups a holder has a *tail*: the slices of the second group that the next turn needs. A turn
that lacks any of them recomputes all positions before it. So a holder's next victim is the cheaper of two, per byte:
its first chunk, or all that it has left (``HolderVictims``). Without a tail it is always the chunk.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pensieve.core import Hints
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, OtherSlice, SharedRun, Slice
from pensieve.engine.cache.index import Bools, Reclaim, ValueTable
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates import NO_HINT, hint_from
from pensieve.engine.cache.tenants import UNLIMITED, Allowance
from pensieve.engine.cost import CostModel

Holder = CachedSession | SharedRun


def reclaim_kind(part: Slice) -> Reclaim | None:
    """Return how a slice can be reclaimed; None: not at all (pinned, being copied, or in no tier)."""
    if part.pins or part.saving or part.loading:
        return None
    if part.device == NOWHERE:
        return None if part.host == NOWHERE else Reclaim.HOST_COPY
    return Reclaim.SAVED_PAGE if part.host == NOWHERE else Reclaim.PAGE


@dataclass(slots=True)
class HolderVictims:
    """The slices that a holder can lose in one way of reclaiming."""

    chunks: list[int]
    """Indices of its candidate chunks, ascending."""
    tail: list[OtherSlice] = field(default_factory=list)
    """Candidate slices of the second group."""
    kept_cost: float = 0.0
    """Cost of recomputing all chunks that it has in any tier: lost with the tail."""

    @property
    def count(self) -> int:
        return len(self.chunks) + (1 if self.tail else 0)


class EvictionIndex:
    """The rows of all holders. Call ``touch`` after each change to a holder's chunks or activity."""

    def __init__(self, policy: Policy, cost: CostModel, page_bytes: Sequence[int] = (1,)) -> None:
        """``page_bytes``: bytes of a page of each KV group."""
        self.table = ValueTable(policy, cost)
        self.page_bytes = (page_bytes[0], page_bytes[1] if len(page_bytes) > 1 else 0)
        self._two_groups = len(page_bytes) > 1
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

    def total_bytes(self, reclaim: Reclaim) -> int:
        self._refresh()
        table, (one, other) = self.table, self.page_bytes
        found = int(table.candidates[reclaim].sum()) * one
        return found + int(table.tails[reclaim].sum()) * other if self._two_groups else found

    def allowed_bytes(self, reclaim: Reclaim, allowance: Allowance) -> int:
        """Return how many bytes can be reclaimed this way now, within the allowance of each tenant."""
        if not allowance:
            return self.total_bytes(reclaim)
        self._refresh()
        table, used = self.table, self.table.rows
        weights = table.candidates[reclaim, :used] * self.page_bytes[0]
        if self._two_groups:
            weights = weights + table.tails[reclaim, :used] * self.page_bytes[1]
        found = np.bincount(table.tenants[:used], weights, self._tenants)
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

    def value(self, holder: Holder, cost: float, candidates: int, now: float) -> float:
        """Value of a holder's next victim, of this cost, in a round that began at ``now``."""
        if isinstance(holder, SharedRun):
            return self.table.run_value(holder.row, cost, candidates)
        idle = now - holder.last_active
        return self.table.session_value(cost, candidates, idle, holder.kind, holder.hint)

    def victims(self, holder: Holder) -> list[HolderVictims]:
        """Return the slices that a holder can lose, by ``Reclaim``."""
        found = [HolderVictims([]) for _ in Reclaim]
        counts = bool(self.page_bytes[0])  # a group without layers: its pages are worth nothing
        for chunk in holder.own_chunks:
            if counts and (way := reclaim_kind(chunk)) is not None:
                found[way].chunks.append(chunk.index)
            other = chunk.other
            if other is not None and not other.leftover and (way := reclaim_kind(other)) is not None:
                found[way].tail.append(other)
        if any(victims.tail for victims in found):
            cost = self.table.chunk_cost
            kept = sum(cost(chunk.index) for chunk in holder.own_chunks if chunk.cached)
            for victims in found:
                victims.kept_cost = kept if victims.tail else 0.0
        return found

    def next_cost(self, victims: HolderVictims) -> float:
        """Return the cost of the next victim, for each page of the first group; infinity when there is none."""
        first = self.table.chunk_cost(victims.chunks[0] if victims.chunks else -1)
        return min(first, self._whole_cost(victims)) if victims.tail else first

    def loses_all(self, victims: HolderVictims) -> bool:
        """Whether the next victim is all that the holder has left."""
        if not victims.tail:
            return False
        return self._whole_cost(victims) <= self.table.chunk_cost(victims.chunks[0] if victims.chunks else -1)

    def _whole_cost(self, victims: HolderVictims) -> float:
        one, other = self.page_bytes
        return victims.kept_cost * (one or other) / (len(victims.chunks) * one + len(victims.tail) * other)

    def _refresh(self) -> None:
        table = self.table
        for holder in self._dirty:
            row = holder.row
            if isinstance(holder, CachedSession):
                table.last_active[row] = holder.last_active
                table.kinds[row] = holder.kind
                if table.hinted:
                    table.pauses[row], table.weights[row] = holder.hint
            if self._two_groups:
                for reclaim, victims in enumerate(self.victims(holder)):
                    table.candidates[reclaim, row] = len(victims.chunks)
                    table.tails[reclaim, row] = len(victims.tail)
                    table.first_cost[reclaim, row] = self.next_cost(victims)
                continue
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
            for reclaim, victims in enumerate(self.victims(holder)):
                found = table.candidates[reclaim, row], table.tails[reclaim, row]
                assert found == (len(victims.chunks), len(victims.tail)), (
                    f"row {row}: {Reclaim(reclaim).name} count is stale"
                )
                assert table.first_cost[reclaim, row] == self.next_cost(victims), f"row {row}: cost is stale"
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
        """Bytes that may still be taken from each tenant with a share."""
        self._seen: dict[Holder, HolderVictims] = {}
        """Candidates of each holder seen so far that are not taken yet."""
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

    def take(self) -> list[Slice]:
        """Return the next group, chunks in ascending position and then a tail; [] when there is none. Evict it, then
        call ``put_back``."""
        while self._heap:
            holder = self._index.holder_at(self._heap[0][1])
            if holder is None or not (group := self._take_from(holder)):
                heapq.heappop(self._heap)
                continue
            return group
        return []

    def _take_from(self, holder: Holder) -> list[Slice]:
        victims = self._candidates(holder)
        remaining = self._remaining.get(holder.tenant)
        own, first = holder.own_chunks, holder.first_index
        one, other = self._index.page_bytes
        if self._index.loses_all(victims):
            needed = len(victims.chunks) * one + len(victims.tail) * other
            if remaining is not None and needed > remaining:
                return []
            taken: list[Slice] = [*(own[index - first] for index in victims.chunks), *victims.tail]
            victims.chunks, victims.tail = [], []
        else:
            if not victims.chunks or (remaining is not None and remaining < one):
                return []
            group = self._index.policy.group(victims.chunks)
            if remaining is not None:
                group = group[: remaining // one]
            needed = len(group) * one
            at = bisect_left(victims.chunks, group[0])
            taken = [own[index - first] for index in group]
            del victims.chunks[at : at + len(taken)]
            if victims.tail:
                victims.kept_cost -= sum([self._index.table.chunk_cost(part.index) for part in taken])
        if remaining is not None:
            self._remaining[holder.tenant] = remaining - needed
        return taken

    def put_back(self) -> None:
        """Rank the holder of the group just taken again, by its remaining candidates."""
        row = self._heap[0][1]
        holder = self._index.holder_at(row)
        if holder is not None and (victims := self._candidates(holder)).count:
            cost = self._index.next_cost(victims)
            value = self._index.value(holder, cost, len(victims.chunks), self._now)
            heapq.heapreplace(self._heap, (value, row))
        else:
            heapq.heappop(self._heap)
        # ``peek`` must describe the group that ``take`` returns.
        while self._remaining and self._heap and self._remaining.get(self.peek_tenant()) == 0:
            heapq.heappop(self._heap)

    def _candidates(self, holder: Holder) -> HolderVictims:
        victims = self._seen.get(holder)
        if victims is None:
            victims = self._seen[holder] = self._index.victims(holder)[self._reclaim]
        return victims
