"""The eviction index of ``TurnCache``, and the choice of victims, many at a time.

The index is the table of values over sessions and runs, with one byte per chunk: a place of
``engine.cache.chunk.Place``, or the place of a chunk in transit.

Victims come in the order of ``EvictionRound``, ranked at once and used up slowly. Under most policies neighbours in
that order belong to different sessions, so a heap that re-ranks a session after each chunk would dominate a
simulation's time. Here all chunks of the sessions that can matter are valued at once, and victims are parallel lists
instead of objects, so that C code can process them. The real cache takes only a few victims at a time and needs
neither.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import getitem, setitem
from typing import Final, Protocol

import numpy as np

from pensieve.core import Floats, Hints, Ints
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.index import Reclaim, Rows, ValueTable
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates import NO_HINT, Hint, apply_hints, hint_from
from pensieve.engine.cost import CostModel
from pensieve.simulate.scenario.policies import Arc

DROPPED: Final = 0
HOST: Final = 1
DEVICE: Final = 2
BOTH: Final = 3
CHOSEN: Final = 4
HOST_SAVING: Final = 5
"""Evicted by the current plan; a candidate again when that plan is complete."""
BOTH_SAVING: Final = 6
BOTH_LOADING: Final = 7
ELSEWHERE: Final = 8
"""Filler in front of a holder's own chunks for those of others, so that indices are positions in the context."""
SAVING: Final = frozenset((HOST_SAVING, BOTH_SAVING))
IN_TRANSIT: Final = SAVING | {BOTH_LOADING}
SETTLED: Final = bytes((DROPPED, HOST, DEVICE, BOTH, CHOSEN, HOST, BOTH, BOTH, *range(8, 256)))
"""Place after the plan is complete, for ``bytearray.translate``."""
RECLAIMED: Final = bytes((DROPPED, HOST, DEVICE, HOST, *range(4, 256)))
"""Place of an idle chunk after its device page was reclaimed at no cost."""
ADMITTED: Final = bytes((DEVICE, BOTH_LOADING, *range(2, 256)))
"""Place of a chunk after it was put on the device."""
_DROPPED: Final = bytes((DROPPED,))
_NOTHING: Final = bytearray()
CANDIDATE_PLACES: Final = {Reclaim.PAGE: BOTH, Reclaim.SAVED_PAGE: DEVICE, Reclaim.HOST_COPY: HOST}
"""Place in which an idle chunk is a candidate for each way to reclaim."""


@dataclass(slots=True, eq=False)
class ChunkHolder:
    key: int
    row: int
    tokens: int = 0
    places: bytearray = field(default_factory=bytearray)
    """One place per chunk. Rankings hold this array, so it is changed in place while the session is idle.

    On admission the session gets another array and all places in this one become DROPPED: no ranking may take
    its chunks.
    """
    places_before: bytearray = field(default_factory=bytearray)
    """The array that the session had until its admission."""
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    kind: int = UNKNOWN
    hint: Hint = NO_HINT
    own_start: int = 0
    """Number of leading chunks that other holders own: index of the first own chunk."""

    @property
    def num_chunks(self) -> int:
        return len(self.places) - self.own_start

    def context(self) -> bytearray:
        """Places of all chunks of the context, including shared ones."""
        return self.places

    def restore(self, history: int, total: int, size: int) -> Restore:
        """State of the history for a next turn with ``total`` tokens of context, as ``CacheManager.admit``
        returns it."""
        places = self.context()
        cached = min(self.tokens, total - 1)  # at least one token must be computed to sample the next
        missing: list[Range] = []
        recomputed = 0
        first = places.find(DROPPED)
        while first >= 0:
            last = len(places) - len(places[first:].lstrip(_DROPPED))
            low, high = first * size, min(last * size, cached)
            missing.append((low, high))
            recomputed += high - low
            first = places.find(DROPPED, last)
        if missing and missing[-1][1] == cached:
            missing[-1] = missing[-1][0], total
        else:
            missing.append((cached, total))
        padding = len(places) * size - cached if places and places[-1] == HOST else 0
        host = places.count(HOST) * size - padding
        device = cached - recomputed - host
        # Part of a first turn's input, which is no history, may be present: others computed it.
        return Restore(tuple(missing), device, host, max(history - device - host, 0))


@dataclass(slots=True, eq=False, repr=False)  # they refer to each other
class SharingSession(ChunkHolder):
    """A session that may share its beginning with others."""

    addresses: tuple[int, ...] = ()
    """Addresses of the leading chunks that it may share."""
    runs: list[SharedHolder] = field(default_factory=list)
    """Shared runs in order; the session's own chunks follow."""

    def context(self) -> bytearray:
        found = bytearray()
        for run in self.runs:
            found += run.places[run.own_start :]
        return found + self.places[self.own_start :]


@dataclass(slots=True, eq=False, repr=False)
class SharedHolder(ChunkHolder):
    """Two or more consecutive chunks with the same owners. ``running`` while an owner runs."""

    addresses: tuple[int, ...] = ()
    """Addresses of its chunks, those before, and some behind."""
    owners: dict[SharingSession, None] = field(default_factory=dict)
    pins: int = 0
    """Number of running owners."""


class PlacesIndex:
    """The table rows of the holders of a ``TurnCache``. Call ``touch`` after any change of a holder."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.table = ValueTable(policy, cost)
        self.policy = policy
        self.one_by_one = list(policy.group([0, 1, 2, 3])) == [0]
        self._holders: list[ChunkHolder | None] = []
        self._dirty: dict[ChunkHolder, None] = {}

    def add_row(self) -> int:
        """Add a row for a new holder; call ``attach`` next."""
        row = self.table.add_row()
        if row == len(self._holders):
            self._holders.append(None)
        return row

    def attach(self, holder: ChunkHolder) -> None:
        self._holders[holder.row] = holder
        self.touch(holder)

    def remove(self, holder: ChunkHolder) -> None:
        self._dirty.pop(holder, None)
        self._holders[holder.row] = None
        self.table.remove_row(holder.row)

    def touch(self, holder: ChunkHolder) -> None:
        self._dirty[holder] = None

    def touch_all(self, holders: Iterable[ChunkHolder]) -> None:
        self._dirty.update(dict.fromkeys(holders))

    def on_turn_end(self, session: ChunkHolder, now: float, hints: Hints | None) -> None:
        session.kind = self.policy.on_turn_end(session.key, session.new_tokens, session.tokens, now)
        if hints is not None and self.policy.uses_hints:
            session.hint, self.table.hinted = hint_from(hints), True

    def on_turn_start(self, session: ChunkHolder, new_tokens: int, now: float) -> None:
        session.new_tokens = new_tokens or session.new_tokens
        session.hint = NO_HINT
        self.policy.on_return(session.key, now)

    def on_suspend(self, session: ChunkHolder, now: float) -> None:
        session.kind, session.hint = UNKNOWN, NO_HINT
        self.policy.on_return(session.key, now)

    def lowest_rows(self, reclaim: Reclaim, now: float, expected: int) -> tuple[Rows, Floats]:
        """As ``ValueTable.lowest_rows``, after a refresh."""
        self._refresh()
        return self.table.lowest_rows(reclaim, now, expected)

    def total(self, reclaim: Reclaim) -> int:
        """Number of chunks that can be reclaimed this way now."""
        self._refresh()
        return int(self.table.candidates[reclaim].sum())

    def holder_at(self, row: int) -> ChunkHolder | None:
        return self._holders[row]

    def holders(self, rows: Rows) -> list[ChunkHolder]:
        return [holder for row in rows.tolist() if (holder := self._holders[row]) is not None]

    def counts(self, reclaim: Reclaim, rows: Rows) -> Ints:
        counts: Ints = self.table.candidates[reclaim, rows].astype(np.int64)
        return counts

    def value(self, holder: ChunkHolder, chunk_index: int, candidates: int, now: float) -> float:
        """Value of a holder's next victim, in a round that began at ``now``."""
        if isinstance(holder, SharedHolder):
            return self.table.run_value(holder.row, self.table.chunk_cost(chunk_index), candidates)
        idle = now - holder.last_active
        return self.table.session_value(
            self.table.chunk_cost(chunk_index), candidates, idle, holder.kind, holder.hint
        )

    def values_of(self, reclaim: Reclaim, rows: Rows, chunks: Rows, repeats: Ints, now: float) -> Floats:
        """Values of many chunks: for each row, which must be up to date, the next ``repeats`` of ``chunks``."""
        table = self.table
        costs, candidates = table.chunk_costs(0)[chunks], table.candidates[reclaim, rows].repeat(repeats)
        idle = (now - table.last_active[rows]).repeat(repeats)
        values = self.policy.values(costs, candidates, idle, table.kinds[rows].repeat(repeats))
        if table.hinted:
            pauses, weights = table.pauses[rows].repeat(repeats), table.weights[rows].repeat(repeats)
            values = apply_hints(values, costs, idle, pauses, weights)
        runs = table.claims.runs()
        if runs.size:
            shared = np.isin(rows, runs).repeat(repeats)
            claims = table.sums[rows].repeat(repeats)[shared]
            values[shared] = self.policy.shared_values(costs[shared], candidates[shared], claims)
        return values

    def _refresh(self) -> None:
        """Update the rows of touched holders by columns; by rows it would take a tenth of a simulation's time."""
        if not self._dirty:
            return
        touched, table = list(self._dirty), self.table
        self._dirty.clear()
        places = [_NOTHING if holder.running else holder.places for holder in touched]
        costs = table.chunk_costs(max(map(len, places)))
        rows = np.array([holder.row for holder in touched])
        table.last_active[rows] = [holder.last_active for holder in touched]
        table.kinds[rows] = [holder.kind for holder in touched]
        if table.hinted:
            table.pauses[rows] = [holder.hint.pause for holder in touched]
            table.weights[rows] = [holder.hint.weight for holder in touched]
        for reclaim, place in CANDIDATE_PLACES.items():
            # A holder without candidates has its first at -1, where the costs have infinity.
            firsts = list(map(bytearray.find, places, repeat(place)))
            table.first_cost[reclaim, rows] = costs[firsts]
            table.candidates[reclaim, rows] = list(map(bytearray.count, places, repeat(place)))


FRESH_S: Final = 8.0
"""Virtual seconds after which a ranking is renewed; sessions are idle for minutes."""
_NEVER: Final = float("inf")
_SAMPLE_ONE_IN: Final = 8
_SAMPLE_MARGIN: Final = 2
"""A ranking first values one in ``_SAMPLE_ONE_IN`` of the sessions that may lose chunks, or fewer if these have
``_SAMPLE_MARGIN`` times as many chunks as it needs."""


@dataclass(slots=True)
class Victims:
    """Victims, lowest value first: four lists of the same length, one entry per chunk."""

    values: list[float] = field(default_factory=list)
    sessions: list[ChunkHolder] = field(default_factory=list)
    places: list[bytearray] = field(default_factory=list)
    """``ChunkHolder.places`` at the time of the ranking."""
    chunks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.chunks)

    def part(self, start: int, end: int | None = None) -> Victims:
        bounds = slice(start, end)
        return Victims(self.values[bounds], self.sessions[bounds], self.places[bounds], self.chunks[bounds])

    def set_place(self, place: int) -> None:
        deque(map(setitem, self.places, self.chunks, repeat(place)), maxlen=0)

    def select_place(self, place: int, found: bytes) -> Victims:
        """Return the victims that are in ``place``; ``found`` has the place of each."""
        selected = [at == place for at in found]
        return Victims(
            list(compress(self.values, selected)),
            list(compress(self.sessions, selected)),
            list(compress(self.places, selected)),
            list(compress(self.chunks, selected)),
        )

    def extended_by(self, more: Victims) -> Victims:
        if not self.chunks:
            return more
        return Victims(
            self.values + more.values,
            self.sessions + more.sessions,
            self.places + more.places,
            self.chunks + more.chunks,
        )


class VictimOrder(Protocol):
    """Candidates for one way to reclaim, lowest value first."""

    def peek(self) -> float: ...

    def move(self, most: int, to: int, ceiling: float = np.inf) -> Victims:
        """Set the place of up to ``most`` victims with values up to ``ceiling``; return them in order.

        A group that its policy takes together is not split.
        """
        ...


def can_rank(index: PlacesIndex) -> bool:
    """Whether chunks may be ranked at once: not in groups, and not under ``Arc``, which must see all sessions."""
    return index.one_by_one and not isinstance(index.policy, Arc)


class Ranking:
    """The next ``count`` victims of a policy that takes single chunks, in order at the time of ranking.

    Entries that are no longer candidates are skipped; new candidates are missing.
    """

    def __init__(self, index: PlacesIndex, reclaim: Reclaim, now: float, count: int) -> None:
        self._made = now
        self._index = index
        self._place = CANDIDATE_PLACES[reclaim]
        self._next = 0
        self._victims, self._all = _rank(index, reclaim, now, count)
        self._count = len(self._victims)

    def is_usable(self, now: float, count: int) -> bool:
        """Whether it still has ``count`` victims, or all that exist, and is not too old."""
        enough = self._all or self._count - self._next >= count
        return enough and now - self._made <= FRESH_S and self.peek() < _NEVER

    def peek(self) -> float:
        places, chunks, place = self._victims.places, self._victims.chunks, self._place
        position, end = self._next, self._count
        # A session that has run since has another array of places; the ranked one has no candidates.
        while position < end and places[position][chunks[position]] != place:
            position += 1
        self._next = position
        return self._victims.values[position] if position < end else _NEVER

    def move(self, most: int, to: int, ceiling: float = np.inf) -> Victims:
        # Usually all entries are still candidates, and this is one pass of C code over each list.
        last = bisect_right(self._victims.values, ceiling, self._next)
        moved = self._take_valid(min(self._next + most, last))
        while len(moved.chunks) < most and self._next < last:  # some were skipped
            more = self._take_valid(min(self._next + most - len(moved.chunks), last))
            moved = moved.extended_by(more)
        moved.set_place(to)
        self._index.touch_all(moved.sessions)
        return moved

    def _take_valid(self, end: int) -> Victims:
        """Return the next victims up to position ``end``, without entries that are no longer candidates."""
        part = self._victims.part(self._next, end)
        self._next = end
        found = bytes(map(getitem, part.places, part.chunks))
        return part if found.count(self._place) == len(found) else part.select_place(self._place, found)


def _rank(index: PlacesIndex, reclaim: Reclaim, now: float, count: int) -> tuple[Victims, bool]:
    """Return the next ``count`` victims, and whether these are all that exist.

    Values rise within a session. So the victims are among the ``count`` sessions whose first chunks are
    lowest, and the ``count``-th lowest chunk of any subset is no lower than the last victim: only sessions
    whose first chunk is below that value matter.
    """
    rows, values = index.lowest_rows(reclaim, now, count)
    by_row = rows.argsort()
    rows, values = rows[by_row], values[by_row]
    lowest = rows[values.argsort(kind="stable")[: count // _SAMPLE_ONE_IN + 1]]  # ties: the lower rows
    enough = int(index.counts(reclaim, lowest).cumsum().searchsorted(_SAMPLE_MARGIN * count)) + 1
    sampled = _Chunks(index, reclaim, now, np.sort(lowest[:enough]))
    rows = rows[values <= sampled.value_of(count)]
    chunks = sampled if rows.size == sampled.rows else _Chunks(index, reclaim, now, rows)
    return chunks.ranked(chunks.value_of(count)), chunks.values.size <= count


class _Chunks:
    """All candidate chunks of the given rows, in ascending order of rows, with their values."""

    def __init__(self, index: PlacesIndex, reclaim: Reclaim, now: float, rows: Rows) -> None:
        self.rows = rows.size
        self._sessions = index.holders(rows)
        self._places = [session.places for session in self._sessions]
        lengths = np.array(list(map(len, self._places)), dtype=np.intp)
        begins = lengths.cumsum() - lengths
        (at,) = (np.frombuffer(b"".join(self._places), np.uint8) == CANDIDATE_PLACES[reclaim]).nonzero()
        counts = index.counts(reclaim, rows)
        self._row_index = np.arange(rows.size).repeat(counts)
        self._chunk = at - begins.repeat(counts)
        self.values = index.values_of(reclaim, rows, self._chunk, counts, now)

    def value_of(self, count: int) -> float:
        """The ``count``-th lowest value; infinity if there are no more chunks than that."""
        return float(np.partition(self.values, count - 1)[count - 1]) if self.values.size > count else np.inf

    def ranked(self, limit: float) -> Victims:
        """Victims with values up to ``limit``, lowest first. Ties: lower rows, then earlier chunks."""
        (kept,) = (self.values <= limit).nonzero()
        values = self.values[kept]
        order = values.argsort(kind="stable")  # already ordered by row and chunk
        kept = kept[order]
        row_indices = self._row_index[kept].tolist()
        return Victims(
            values[order].tolist(),
            list(map(self._sessions.__getitem__, row_indices)),
            list(map(self._places.__getitem__, row_indices)),
            self._chunk[kept].tolist(),
        )


class Round:
    """The next victims, group by group: ``EvictionRound`` on places. Valid until another change of the cache."""

    def __init__(self, index: PlacesIndex, reclaim: Reclaim, now: float, count: int) -> None:
        self._index = index
        self._place = CANDIDATE_PLACES[reclaim]
        self._now = now
        rows, values = index.lowest_rows(reclaim, now, count)
        self._heap = list(zip(values.tolist(), rows.tolist(), strict=True))
        heapq.heapify(self._heap)

    def peek(self) -> float:
        return self._heap[0][0] if self._heap else _NEVER

    def move(self, most: int, to: int, ceiling: float = np.inf) -> Victims:
        moved = Victims()
        while len(moved) < most and self._heap:
            value, row = self._heap[0]
            session = self._index.holder_at(row)
            group = self._group(session) if session is not None else ()
            if session is None or not group:
                heapq.heappop(self._heap)
                continue
            if value > ceiling:
                break
            for chunk in group:
                session.places[chunk] = to
                moved.values.append(value)
                moved.sessions.append(session)
                moved.places.append(session.places)
                moved.chunks.append(chunk)
            self._index.touch(session)
            if count := session.places.count(self._place):
                first = session.places.find(self._place)
                heapq.heapreplace(self._heap, (self._index.value(session, first, count, self._now), row))
            else:
                heapq.heappop(self._heap)
        return moved

    def _group(self, session: ChunkHolder) -> Sequence[int]:
        """The candidate chunks of a session that go together next, ascending; empty if it has no candidates."""
        first = -1 if session.running else session.places.find(self._place)
        if first < 0 or self._index.one_by_one:
            return (first,) if first >= 0 else ()
        return self._index.policy.group(
            [index for index, at in enumerate(session.places) if at == self._place]
        )
