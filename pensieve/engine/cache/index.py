"""Who gives way next: an index over all cached sessions that answers in well under a millisecond for 100,000 of them.

Retention values change with every tick of the clock and not in proportion, so no ordered structure over them stays
valid. Instead each session keeps one row (cost of its first candidate chunk, number of candidates, time of last
activity, kind) in flat arrays; a round evaluates the policy over whole columns once and merges from there: to find the
n lowest chunks only the n sessions with the lowest first chunks can matter, because within a session values rise.
"""

from __future__ import annotations

import enum
import heapq

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats
from pensieve.engine.cache.chunk import CachedSession, Chunk, Place
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cost.model import CostModel


class Reclaim(enum.IntEnum):
    """What an eviction takes from a chunk. Nothing is taken from pinned chunks and chunks with a copy in flight."""

    PAGE = 0
    """Its device slot at once: it has a clean host copy."""
    SAVED_PAGE = 1
    """Its device slot after a copy to the host (or at the price of recomputing it)."""
    HOST_COPY = 2
    """Its host slot, at the price of recomputing it: the device no longer has it."""


def can_reclaim(chunk: Chunk, reclaim: Reclaim) -> bool:
    """Whether a chunk is a candidate."""
    if chunk.pins or chunk.saving or chunk.loading:
        return False
    place = chunk.place
    if reclaim is Reclaim.PAGE:
        return place is Place.BOTH
    if reclaim is Reclaim.SAVED_PAGE:
        return place is Place.DEVICE
    return place is Place.HOST


SAMPLE_STRIDE = 64


def lowest(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Indices that include the ``count`` lowest values (all, when there are fewer), in no order.

    A sample gives a cut-off that most likely has ``count`` values below it, so that of a large array only a few are
    ever ranked; when it has fewer, the whole array is.
    """
    if count >= values.size:
        return np.arange(values.size)
    sample = values[::SAMPLE_STRIDE]
    rank = 2 * count // SAMPLE_STRIDE + 4
    if rank < sample.size:
        below = np.flatnonzero(values <= np.partition(sample, rank)[rank])
        if count <= below.size < values.size:
            return below[np.argpartition(values[below], count - 1)[:count]]
    return np.argpartition(values, count - 1)[:count]


class EvictionIndex:
    """Rows of all cached sessions. ``touch`` a session after any change to its chunks or its activity."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self._cost = cost
        self._chunk_costs = cost.chunk_costs(64)
        self._sessions: list[CachedSession | None] = []
        self._free_rows: list[int] = []
        self._dirty: dict[int, CachedSession] = {}
        self._first_cost = np.full((len(Reclaim), 64), np.inf)
        self._candidates = np.zeros((len(Reclaim), 64))
        self._last_active = np.zeros(64)
        self._kinds = np.full(64, UNKNOWN, np.int64)

    def add_row(self) -> int:
        """A row for a new session; ``attach`` it next."""
        if self._free_rows:
            return self._free_rows.pop()
        self._sessions.append(None)
        row = len(self._sessions) - 1
        if row >= self._last_active.size:
            grow = ((0, 0), (0, row))
            self._first_cost = np.pad(self._first_cost, grow, constant_values=np.inf)
            self._candidates = np.pad(self._candidates, grow)
            self._last_active = np.pad(self._last_active, grow[1])
            self._kinds = np.pad(self._kinds, grow[1])
        return row

    def attach(self, session: CachedSession) -> None:
        self._sessions[session.row] = session
        self.touch(session)

    def remove(self, session: CachedSession) -> None:
        """Forget a session; its row is given to another."""
        self._dirty.pop(session.row, None)
        self._sessions[session.row] = None
        self._first_cost[:, session.row] = np.inf
        self._candidates[:, session.row] = 0
        self._free_rows.append(session.row)

    def touch(self, session: CachedSession) -> None:
        self._dirty[session.row] = session

    def left(self, session: CachedSession, now: float) -> None:
        """The session's turn has ended; its tokens are those of the whole context."""
        session.kind = self.policy.left(session.key, session.new_tokens, len(session.tokens), now)
        self.touch(session)

    def came_back(self, session: CachedSession, new_tokens: int, now: float) -> None:
        """The session has a turn with so many new tokens; with none, it goes on with the one before."""
        session.new_tokens = new_tokens or session.new_tokens
        self.policy.came_back(session.key, now)
        self.touch(session)

    def suspended(self, session: CachedSession, now: float) -> None:
        """The session ``left`` in this moment, to go on soon: its recency, not its kind, is to keep it."""
        session.kind = UNKNOWN
        self.policy.came_back(session.key, now)

    def chunk_cost(self, index: int) -> float:
        """``Cost(l)`` of a session's chunk ``index``."""
        if index >= self._chunk_costs.size:
            self._chunk_costs = self._cost.chunk_costs(2 * index + 1)
        return float(self._chunk_costs[index])

    def value(self, session: CachedSession, chunk_index: int, candidates: int, now: float) -> float:
        """Retention value of one session's next victim."""
        values = self.policy.values(
            np.array([self.chunk_cost(chunk_index)]),
            np.array([float(candidates)]),
            np.array([now - session.last_active]),
            np.array([session.kind]),
        )
        return float(values[0])

    def round(self, reclaim: Reclaim, now: float, expected: int) -> EvictionRound:
        """Victims in ascending value, as the cache is now. ``expected``: how many will likely be taken."""
        self._refresh()
        used = len(self._sessions)
        first_cost = self._first_cost[reclaim, :used]
        idle = now - self._last_active[:used]
        values = self.policy.values(first_cost, self._candidates[reclaim, :used], idle, self._kinds[:used])
        values[np.isinf(first_cost)] = np.inf
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return EvictionRound(self, reclaim, now, rows.tolist(), values[rows].tolist())

    def session_at(self, row: int) -> CachedSession | None:
        """The session of a row; None when it was forgotten since the round began."""
        return self._sessions[row]

    def total(self, reclaim: Reclaim) -> int:
        """How many chunks could be reclaimed this way now."""
        self._refresh()
        return int(self._candidates[reclaim].sum())

    def _refresh(self) -> None:
        for row, session in self._dirty.items():
            self._last_active[row] = session.last_active
            self._kinds[row] = session.kind
            for reclaim in Reclaim:
                indices = [chunk.index for chunk in session.chunks if can_reclaim(chunk, reclaim)]
                self._candidates[reclaim, row] = len(indices)
                self._first_cost[reclaim, row] = self.chunk_cost(indices[0]) if indices else np.inf
        self._dirty.clear()

    def check(self) -> None:
        """Every row says what its session's chunks say."""
        self._refresh()
        for row, session in enumerate(self._sessions):
            if session is None:
                assert not np.isfinite(self._first_cost[:, row]).any(), f"row {row} outlived its session"
                continue
            assert self._kinds[row] == session.kind, f"{session.key}: kind is stale"
            for reclaim in Reclaim:
                count = sum(can_reclaim(chunk, reclaim) for chunk in session.chunks)
                assert self._candidates[reclaim, row] == count, (
                    f"{session.key}: {reclaim.name} count is stale"
                )


class EvictionRound:
    """Hands out groups of victims, lowest value first. Valid until the cache changes in another way."""

    def __init__(
        self, index: EvictionIndex, reclaim: Reclaim, now: float, rows: list[int], values: list[float]
    ) -> None:
        self._index = index
        self._reclaim = reclaim
        self._now = now
        self._heap = list(zip(values, rows, strict=True))
        heapq.heapify(self._heap)

    def peek(self) -> float:
        """Value of the next victim; infinity when there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def take(self) -> list[Chunk]:
        """The next group, in ascending position; empty when there is none. The caller evicts it, then ``put_back``s."""
        while self._heap:
            _, row = self._heap[0]
            session = self._index.session_at(row)
            if session is not None:
                indices = [chunk.index for chunk in session.chunks if can_reclaim(chunk, self._reclaim)]
                if indices:
                    return [session.chunks[i] for i in self._index.policy.group(indices)]
            heapq.heappop(self._heap)
        return []

    def put_back(self) -> None:
        """Re-rank the session whose group was just taken, with what it still has."""
        _, row = heapq.heappop(self._heap)
        session = self._index.session_at(row)
        if session is None:
            return
        indices = [chunk.index for chunk in session.chunks if can_reclaim(chunk, self._reclaim)]
        if indices:
            value = self._index.value(session, indices[0], len(indices), self._now)
            heapq.heappush(self._heap, (value, row))
