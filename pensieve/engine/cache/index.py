"""Who gives way next: an index over all cached sessions that answers in well under a millisecond for 100,000 of them.

Retention values change with every tick of the clock and not in proportion, so no ordered structure over them stays
valid. Instead each session keeps one row (cost of its first candidate chunk, number of candidates, time of last
activity, kind) in flat arrays; a round evaluates the policy over whole columns once and merges from there: to find the
n lowest chunks only the n sessions with the lowest first chunks can matter, because within a session values rise.
"""

from __future__ import annotations

import enum
import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats, Ints
from pensieve.engine.cache.chunk import CachedSession, Chunk, Place
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cost.model import CostModel

Rows = npt.NDArray[np.intp]


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


def lowest(values: Floats, count: int) -> Rows:
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


class IndexedSession(Protocol):
    """The fields of a session that an index reads and writes."""

    row: int
    last_active: float
    new_tokens: int
    kind: int

    @property
    def key(self) -> Hashable: ...


S = TypeVar("S", bound=IndexedSession)


class SessionIndex(ABC, Generic[S]):
    """Rows of all cached sessions. ``touch`` a session after any change to its chunks or its activity.

    What a session's chunks are is left to two kinds of index: the engine's, below, and that of a simulation
    (``pensieve.simulate.turns.places``).
    """

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self._cost = cost
        self._sessions: list[S | None] = []
        """The session of each row."""
        self._free_rows: list[int] = []
        self._dirty: dict[S, None] = {}
        """Sessions whose rows are not up to date."""
        self._first_cost = np.full((len(Reclaim), 64), np.inf)
        self._candidates = np.zeros((len(Reclaim), 64))
        self._last_active = np.zeros(64)
        self._kinds = np.full(64, UNKNOWN, np.int64)
        self._one: tuple[Floats, Floats, Floats, Ints] = (
            np.zeros(1),
            np.zeros(1),
            np.zeros(1),
            np.zeros(1, np.int64),
        )
        """Columns of one session, used again and again: see ``value``."""
        self._know_costs(64)

    @abstractmethod
    def _context(self, session: S) -> int:
        """How many tokens a session has."""

    @abstractmethod
    def _fill(self, sessions: list[S]) -> None:
        """Bring the rows of these sessions up to date."""

    @abstractmethod
    def first_and_count(self, session: S, reclaim: Reclaim) -> tuple[int, int]:
        """The first of a session's candidate chunks, -1 if it has none, and how many it has."""

    @abstractmethod
    def next_group(self, session: S, reclaim: Reclaim) -> Sequence[int]:
        """The candidate chunks of a session that go together next, ascending; none if it has no candidates."""

    # -- rows --------------------------------------------------------------------------------------------------------

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

    def attach(self, session: S) -> None:
        self._sessions[session.row] = session
        self.touch(session)

    def remove(self, session: S) -> None:
        """Forget a session; its row is given to another."""
        self._dirty.pop(session, None)
        self._sessions[session.row] = None
        self._first_cost[:, session.row] = np.inf
        self._candidates[:, session.row] = 0
        self._free_rows.append(session.row)

    def touch(self, session: S) -> None:
        self._dirty[session] = None

    def touch_all(self, sessions: Iterable[S]) -> None:
        self._dirty.update(dict.fromkeys(sessions))

    def left(self, session: S, now: float) -> None:
        """The session's turn has ended; its tokens are those of the whole context."""
        session.kind = self.policy.left(session.key, session.new_tokens, self._context(session), now)
        self.touch(session)

    def came_back(self, session: S, new_tokens: int, now: float) -> None:
        """The session has a turn with so many new tokens; with none, it goes on with the one before."""
        session.new_tokens = new_tokens or session.new_tokens
        self.policy.came_back(session.key, now)
        self.touch(session)

    def suspended(self, session: S, now: float) -> None:
        """The session ``left`` in this moment, to go on soon: its recency, not its kind, is to keep it."""
        session.kind = UNKNOWN
        self.policy.came_back(session.key, now)

    # -- questions ---------------------------------------------------------------------------------------------------

    def chunk_cost(self, index: int) -> float:
        """``Cost(l)`` of a session's chunk ``index``."""
        if index + 1 >= len(self._costs):
            self._know_costs(2 * index + 1)
        return self._costs[index]

    def _know_costs(self, chunks: int) -> None:
        self._costs: list[float] = [*self._cost.chunk_costs(chunks).tolist(), np.inf]
        """``Cost(l)`` of chunks 0, 1, …; at the end, which is index -1, infinity: a session without candidates."""

    def value(self, session: S, chunk_index: int, candidates: int, now: float) -> float:
        """Retention value of one session's next victim."""
        cost, count, idle, kind = self._one
        cost[0], count[0], idle[0] = self.chunk_cost(chunk_index), candidates, now - session.last_active
        kind[0] = session.kind
        return float(self.policy.values(cost, count, idle, kind)[0])

    def lowest_rows(self, reclaim: Reclaim, now: float, expected: int) -> tuple[Rows, Floats]:
        """Rows in no order that include those of the ``expected`` next victims; values of their first candidates."""
        self._refresh()
        used = len(self._sessions)
        first_cost = self._first_cost[reclaim, :used]
        idle = now - self._last_active[:used]
        values = self.policy.values(first_cost, self._candidates[reclaim, :used], idle, self._kinds[:used])
        values[np.isinf(first_cost)] = np.inf
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return rows, values[rows]

    def session_at(self, row: int) -> S | None:
        """The session of a row; None when it was forgotten since the round began."""
        return self._sessions[row]

    def total(self, reclaim: Reclaim) -> int:
        """How many chunks could be reclaimed this way now."""
        self._refresh()
        return int(self._candidates[reclaim].sum())

    def _refresh(self) -> None:
        if self._dirty:
            self._fill(list(self._dirty))
            self._dirty.clear()


class VictimRound(Generic[S]):
    """Hands out groups of victims, lowest value first. Valid until the cache changes in another way."""

    def __init__(self, index: SessionIndex[S], reclaim: Reclaim, now: float, expected: int) -> None:
        self._index = index
        self._reclaim = reclaim
        self._now = now
        rows, values = index.lowest_rows(reclaim, now, expected)
        self._heap = list(zip(values.tolist(), rows.tolist(), strict=True))
        heapq.heapify(self._heap)

    def peek(self) -> float:
        """Value of the next victim; infinity when there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def take_group(self) -> tuple[S, Sequence[int]] | None:
        """The next session and which of its chunks, ascending; None when there is none.

        The caller evicts them, then calls ``put_back``.
        """
        while self._heap:
            session = self._index.session_at(self._heap[0][1])
            if session is not None and (group := self._index.next_group(session, self._reclaim)):
                return session, group
            heapq.heappop(self._heap)
        return None

    def put_back(self) -> None:
        """Re-rank the session whose group was just taken, with what it still has."""
        row = self._heap[0][1]
        session = self._index.session_at(row)
        if session is not None:
            first, count = self._index.first_and_count(session, self._reclaim)
            if count:
                value = self._index.value(session, first, count, self._now)
                heapq.heapreplace(self._heap, (value, row))
                return
        heapq.heappop(self._heap)


class EvictionIndex(SessionIndex[CachedSession]):
    """The index of ``CacheManager``."""

    def round(self, reclaim: Reclaim, now: float, expected: int) -> EvictionRound:
        """Victims in ascending value, as the cache is now. ``expected``: how many will likely be taken."""
        return EvictionRound(self, reclaim, now, expected)

    def first_and_count(self, session: CachedSession, reclaim: Reclaim) -> tuple[int, int]:
        indices = _candidates(session, reclaim)
        return (indices[0], len(indices)) if indices else (-1, 0)

    def next_group(self, session: CachedSession, reclaim: Reclaim) -> Sequence[int]:
        indices = _candidates(session, reclaim)
        return self.policy.group(indices) if indices else ()

    def _context(self, session: CachedSession) -> int:
        return len(session.tokens)

    def _fill(self, sessions: list[CachedSession]) -> None:
        for session in sessions:
            row = session.row
            self._last_active[row] = session.last_active
            self._kinds[row] = session.kind
            for reclaim in Reclaim:
                first, count = self.first_and_count(session, reclaim)
                self._candidates[reclaim, row] = count
                self._first_cost[reclaim, row] = self.chunk_cost(first)

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


class EvictionRound(VictimRound[CachedSession]):
    """A round of the engine's index, in chunks."""

    def take(self) -> list[Chunk]:
        """The next group, in ascending position; empty when there is none. The caller evicts it, then ``put_back``s."""
        found = self.take_group()
        if found is None:
            return []
        session, group = found
        return [session.chunks[index] for index in group]


def _candidates(session: CachedSession, reclaim: Reclaim) -> list[int]:
    return [chunk.index for chunk in session.chunks if can_reclaim(chunk, reclaim)]
