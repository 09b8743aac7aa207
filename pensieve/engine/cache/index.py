"""Who gives way next: an index over all cached sessions that answers in well under a millisecond for 100,000 of them.

Retention values change with every tick of the clock and not in proportion, so no ordered structure over them stays
valid. Instead each session keeps one row (cost of its first candidate chunk, number of candidates, time of last
activity, kind) in flat arrays; a round evaluates the policy over whole columns once and merges from there: to find the
n lowest chunks only the n sessions with the lowest first chunks can matter, because within a session values rise.

Chunks in a row that several sessions own are a run, with a row of its own. What its owners count for is summed up anew
in each round, over a table of pairs of rows, one for each owner of each run.
"""

from __future__ import annotations

import enum
import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from pensieve.core import Floats, Hints, Ints
from pensieve.engine.cache.claims import Bools, Claims, Rows
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates.hints import NO_HINT, Hint, adjusted, adjusted_one, heard
from pensieve.engine.cost.model import CostModel


class Reclaim(enum.IntEnum):
    """What an eviction takes from a chunk. Nothing is taken from pinned chunks and chunks with a copy in flight."""

    PAGE = 0
    """Its device slot at once: it has a clean host copy."""
    SAVED_PAGE = 1
    """Its device slot after a copy to the host (or at the price of recomputing it)."""
    HOST_COPY = 2
    """Its host slot, at the price of recomputing it: the device no longer has it."""


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


class IndexedHolder(Protocol):
    """Whoever has a row."""

    row: int


class IndexedSession(IndexedHolder, Protocol):
    """The fields of a session that an index reads and writes."""

    last_active: float
    new_tokens: int
    kind: int
    hint: Hint

    @property
    def key(self) -> Hashable: ...


S = TypeVar("S", bound=IndexedSession)
H = TypeVar("H", bound=IndexedHolder)


class SessionIndex(ABC, Generic[S, H]):
    """Rows of all cached sessions S, or of holders H where not only sessions hold chunks.

    ``touch`` one after any change to its chunks or its activity.

    What a holder's chunks are is left to two kinds of index: the engine's (``eviction``) and that of a simulation
    (``pensieve.simulate.turns.places``).
    """

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self._cost = cost
        self._sessions: list[H | None] = []
        """Whose row each is."""
        self._free_rows: list[int] = []
        self._dirty: dict[H, None] = {}
        """Those whose rows are not up to date."""
        self._first_cost = np.full((len(Reclaim), 64), np.inf)
        self._candidates = np.zeros((len(Reclaim), 64))
        self._last_active = np.zeros(64)
        self._kinds = np.full(64, UNKNOWN, np.int64)
        self._hinted = False
        """Whether any session ever had a hint: without, nobody pays for the two columns below."""
        self._pauses = np.full(64, NO_HINT.pause, np.int64)
        self._weights = np.full(64, NO_HINT.weight)
        self._one: tuple[Floats, Floats, Floats, Ints] = (
            np.zeros(1),
            np.zeros(1),
            np.zeros(1),
            np.zeros(1, np.int64),
        )
        """Columns of one session, used again and again: see ``value``."""
        self._claims = Claims()
        self._sums: Floats = np.zeros(0)
        """What the owners of the run in each row count for, at the time of the latest round."""
        self._know_costs(64)

    @abstractmethod
    def _context(self, session: S) -> int:
        """How many tokens a session has."""

    @abstractmethod
    def _fill(self, holders: list[H]) -> None:
        """Bring the rows of these up to date."""

    @abstractmethod
    def value(self, holder: H, chunk_index: int, candidates: int, now: float) -> float:
        """Value of one's next victim, in a round that began at ``now``."""

    # -- rows --------------------------------------------------------------------------------------------------------

    def add_row(self) -> int:
        """A row for a new holder; ``attach`` it next."""
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
            self._pauses = np.pad(self._pauses, grow[1], constant_values=NO_HINT.pause)
            self._weights = np.pad(self._weights, grow[1], constant_values=NO_HINT.weight)
        return row

    def attach(self, holder: H) -> None:
        self._sessions[holder.row] = holder
        self.touch(holder)

    def remove(self, holder: H) -> None:
        """Forget one; its row is given to another."""
        self._dirty.pop(holder, None)
        self._sessions[holder.row] = None
        self._first_cost[:, holder.row] = np.inf
        self._candidates[:, holder.row] = 0
        self._free_rows.append(holder.row)

    def touch(self, holder: H) -> None:
        self._dirty[holder] = None

    def touch_all(self, holders: Iterable[H]) -> None:
        self._dirty.update(dict.fromkeys(holders))

    def join(self, run: H, owner: S) -> None:
        """A session is one more owner of a run."""
        self._claims.add(run.row, owner.row)

    def part(self, run: H, owner: S) -> None:
        """A session owns a run no more."""
        self._claims.remove(run.row, owner.row)

    def left(self, session: S, now: float, hints: Hints | None = None) -> None:
        """The session's turn has ended; its tokens are those of the whole context. ``touch`` it next."""
        session.kind = self.policy.left(session.key, session.new_tokens, self._context(session), now)
        self.told(session, hints)

    def told(self, session: S, hints: Hints | None) -> None:
        """What to expect of the session, from its ``last_active`` on and until its next turn. ``touch`` it next."""
        if hints is not None and self.policy.hears_hints:
            session.hint, self._hinted = heard(hints), True

    def came_back(self, session: S, new_tokens: int, now: float) -> None:
        """The session has a turn with so many new tokens; none: it goes on with the one before. ``touch`` it next."""
        session.new_tokens = new_tokens or session.new_tokens
        session.hint = NO_HINT
        self.policy.came_back(session.key, now)

    def suspended(self, session: S, now: float) -> None:
        """The session ``left`` in this moment, to go on soon: its recency, not its kind, is to keep it."""
        session.kind, session.hint = UNKNOWN, NO_HINT
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

    def session_value(self, session: S, chunk_index: int, candidates: int, now: float) -> float:
        """Retention value of one session's next victim."""
        cost, count, idle, kind = self._one
        cost[0], count[0], idle[0] = self.chunk_cost(chunk_index), candidates, now - session.last_active
        kind[0] = session.kind
        value = float(self.policy.values(cost, count, idle, kind)[0])
        if session.hint is NO_HINT:
            return value
        return adjusted_one(value, float(cost[0]), now - session.last_active, session.hint)

    def lowest_rows(
        self, reclaim: Reclaim, now: float, expected: int, barred: Bools | None = None
    ) -> tuple[Rows, Floats]:
        """Rows in no order that include those of the ``expected`` next victims; values of their first candidates.

        ``barred``: rows that give nothing, bool [rows]; None: none.
        """
        self._refresh()
        used = len(self._sessions)
        first_cost = self._first_cost[reclaim, :used]
        idle = now - self._last_active[:used]
        values = self._values(first_cost, self._candidates[reclaim, :used], idle, self._kinds[:used])
        values[np.isinf(first_cost)] = np.inf
        if barred is not None:
            np.putmask(values, barred, np.inf)
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return rows, values[rows]

    def _values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        """Values of the first candidates of all rows, those of runs included."""
        runs = self._claims.runs()
        if not runs.size:
            values = self.policy.values(first_cost, candidates, idle, kinds)
            return self._with_hints(values, first_cost, idle) if self._hinted else values
        values, claims = self.policy.values_and_claims(first_cost, candidates, idle, kinds)
        if self._hinted:
            values = self._with_hints(values, first_cost, idle, claims)
        self._sums = self._claims.combined(claims, add=self.policy.adds_up)
        values[runs] = self.policy.shared_values(first_cost[runs], candidates[runs], self._sums[runs])
        return values

    def _with_hints(
        self, values: Floats, costs: Floats, idle: Floats, claims: Floats | None = None
    ) -> Floats:
        """Values of all rows, which are multiples of ``costs``, with the sessions' hints taken into account; and in
        place what the sessions' claims are."""
        return adjusted(values, costs, idle, self._pauses[: idle.size], self._weights[: idle.size], claims)

    def run_value(self, run: H, chunk_index: int, candidates: int) -> float:
        """Value of a run's next victim, in the latest round."""
        cost, count = np.array([self.chunk_cost(chunk_index)]), np.array([float(candidates)])
        return float(self.policy.shared_values(cost, count, self._sums[run.row : run.row + 1])[0])

    def holder_at(self, row: int) -> H | None:
        """Whose row it is; None when that was forgotten since the round began."""
        return self._sessions[row]

    def total(self, reclaim: Reclaim) -> int:
        """How many chunks could be reclaimed this way now."""
        self._refresh()
        return int(self._candidates[reclaim].sum())

    def _refresh(self) -> None:
        if self._dirty:
            self._fill(list(self._dirty))
            self._dirty.clear()


class VictimRound(ABC, Generic[S, H]):
    """Hands out groups of victims, lowest value first. Valid until the cache changes in another way."""

    def __init__(
        self,
        index: SessionIndex[S, H],
        reclaim: Reclaim,
        now: float,
        expected: int,
        barred: Bools | None = None,
    ) -> None:
        self._index = index
        self._reclaim = reclaim
        self._now = now
        rows, values = index.lowest_rows(reclaim, now, expected, barred)
        self._heap = list(zip(values.tolist(), rows.tolist(), strict=True))
        heapq.heapify(self._heap)

    @abstractmethod
    def first_and_count(self, holder: H) -> tuple[int, int]:
        """The first candidate chunk that one still holds, -1 if there is none, and how many there are."""

    @abstractmethod
    def next_group(self, holder: H) -> Sequence[int]:
        """The candidate chunks of one that go together next, ascending; none if it has no candidates."""

    def peek(self) -> float:
        """Value of the next victim; infinity when there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def take_group(self) -> tuple[H, Sequence[int]] | None:
        """The next holder and which of its chunks, ascending; None when there is none.

        The caller evicts them, then calls ``put_back``.
        """
        while self._heap:
            holder = self._index.holder_at(self._heap[0][1])
            if holder is not None and (group := self.next_group(holder)):
                return holder, group
            heapq.heappop(self._heap)
        return None

    def put_back(self) -> None:
        """Re-rank the one whose group was just taken, with what it still has."""
        row = self._heap[0][1]
        holder = self._index.holder_at(row)
        if holder is not None:
            first, count = self.first_and_count(holder)
            if count:
                value = self._index.value(holder, first, count, self._now)
                heapq.heapreplace(self._heap, (value, row))
                return
        heapq.heappop(self._heap)
