"""Chooses victims, many at a time: the order of ``EvictionRound``, ranked at once and used up slowly.

Under most policies neighbours in that order belong to different sessions, so a heap that re-ranks a session
after each chunk would dominate a simulation's time. Here all chunks of the sessions that can matter are
valued at once, and victims are parallel lists instead of objects, so that C code can process them. The real
cache takes only a few victims at a time and needs neither.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import getitem, setitem
from typing import Final, Protocol

import numpy as np

from pensieve.engine.cache.claims import Rows
from pensieve.engine.cache.index import Reclaim
from pensieve.simulate.scenario.policies import Arc
from pensieve.simulate.turns.places import CANDIDATE_PLACES, ChunkHolder, PlacesIndex

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
