"""Who gives way next, for many chunks at a time: the order of ``EvictionRound``, ranked in one go and used up slowly.

Under most policies neighbours in that order belong to different sessions, so a heap that re-ranks a session after each
chunk is what a simulation would spend its time in. Here all chunks of the sessions that can matter are valued at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.scenario.policies import Arc
from pensieve.simulate.turns.places import RECLAIMS, PlacesIndex, Resident

FRESH_S: Final = 8.0
"""For so many virtual seconds a ranking is used before it is made anew: sessions are idle for minutes."""


Victim = tuple[float, Resident, int]
"""(value, session, chunk)"""


class Victims(Protocol):
    """Chunks that can give one thing, lowest value first."""

    def peek(self) -> float:
        """Value of the next victim; infinity when there is none (left)."""
        ...

    def move(self, most: int, to: int, ceiling: float = np.inf) -> list[Victim]:
        """Give up to ``most`` victims of values up to ``ceiling`` another place, and return them in order.

        A group that its policy takes together is not cut.
        """
        ...


_FEW: Final = 8
"""Of the sessions that may have to give chunks a ranking looks at one in so many first."""


def can_rank(index: PlacesIndex) -> bool:
    """Whether chunks may be ranked in one go: not those that go in groups, and not by ``Arc``, which weighs its two
    lists anew whenever it is asked and so has to be asked about all sessions."""
    return index.one_by_one and not isinstance(index.policy, Arc)


class Ranking:
    """The next ``count`` victims under a policy that takes chunks one by one; true of the moment when it was made.

    Later on it leaves out what has changed since, and what has become a candidate since is not in it.
    """

    def __init__(self, index: PlacesIndex, cost: CostModel, reclaim: Reclaim, now: float, count: int) -> None:
        self._made = now
        self._all = True
        """Whether all candidates are in it."""
        self._index = index
        self._place = RECLAIMS[reclaim]
        self._next = 0
        self._victims: list[Victim] = []
        self._active: list[float] = []
        """When each victim's session was last active."""
        self._rank(index, cost, reclaim, now, count)

    def serves(self, now: float, count: int) -> bool:
        """Whether it is still good for ``count`` victims, or for as many as there are."""
        enough = self._all or len(self._victims) - self._next >= count
        return enough and now - self._made <= FRESH_S and self.peek() < np.inf

    def peek(self) -> float:
        while self._next < len(self._victims):
            if self._stands(self._next):
                return self._victims[self._next][0]
            self._next += 1
        return float("inf")

    def move(self, most: int, to: int, ceiling: float = np.inf) -> list[Victim]:
        moved: list[Victim] = []
        place, victims, active, position = self._place, self._victims, self._active, self._next
        end = len(victims)
        while len(moved) < most and position < end:
            victim = value, session, chunk = victims[position]
            if value > ceiling:
                break
            places = session.places
            if places[chunk] == place and not session.running and session.last_active == active[position]:
                places[chunk] = to
                moved.append(victim)
            position += 1
        self._next = position
        self._index.touch_all([session for _, session, _ in moved])
        return moved

    def _stands(self, position: int) -> bool:
        """Whether a victim is still what it was."""
        _, session, chunk = self._victims[position]
        unchanged = not session.running and session.last_active == self._active[position]
        return unchanged and session.places[chunk] == self._place

    def _rank(self, index: PlacesIndex, cost: CostModel, reclaim: Reclaim, now: float, count: int) -> None:
        """Chunks of the ``count`` sessions whose first chunks are lowest: no other session's can be among them.

        Of these sessions, again, only those matter whose first chunk is below the last victim that a few of them give.
        """
        firsts = sorted(index.round(reclaim, now, count)._heap)
        few = _Chunks(index, cost, self._place, now, [row for _, row in firsts[: count // _FEW + 1]])
        limit = few.value_of(count)
        rows = sorted(row for value, row in firsts if value <= limit)
        chunks = few if len(rows) == len(few.sessions) else _Chunks(index, cost, self._place, now, rows)
        self._all = chunks.values.size <= count
        self._victims = chunks.ranked(chunks.value_of(count))
        self._active = [session.last_active for _, session, _ in self._victims]


class _Chunks:
    """All chunks at one place of some sessions, given by row, with their values."""

    def __init__(
        self, index: PlacesIndex, cost: CostModel, place: int, now: float, rows: Sequence[int]
    ) -> None:
        self.sessions = [session for row in sorted(rows) if (session := index.resident_at(row)) is not None]
        lengths = np.array([len(session.places) for session in self.sessions], dtype=np.intp)
        places = np.frombuffer(b"".join([session.places for session in self.sessions]), np.uint8)
        at = np.flatnonzero(places == place)
        self._of = np.repeat(np.arange(len(self.sessions)), lengths)[at]
        self._chunk = at - (np.cumsum(lengths) - lengths)[self._of]
        idle = now - np.array([session.last_active for session in self.sessions])
        candidates = np.bincount(self._of, minlength=len(self.sessions)).astype(np.float64)
        costs = cost.chunk_costs(int(lengths.max(initial=0)))
        kinds = np.array([session.kind for session in self.sessions], dtype=np.int64)
        of = self._of
        self.values = index.policy.values(costs[self._chunk], candidates[of], idle[of], kinds[of])

    def value_of(self, count: int) -> float:
        """The value of the ``count``-th lowest; infinity when there are no more than that."""
        return float(np.partition(self.values, count - 1)[count - 1]) if self.values.size > count else np.inf

    def ranked(self, limit: float) -> list[Victim]:
        """Those of values up to ``limit``, lowest first; of equal ones those of lower rows, then the first."""
        kept = np.flatnonzero(self.values <= limit)
        kept = kept[np.lexsort((self._chunk[kept], self._of[kept], self.values[kept]))]
        owners = [self.sessions[number] for number in self._of[kept].tolist()]
        return list(zip(self.values[kept].tolist(), owners, self._chunk[kept].tolist(), strict=True))


class Round:
    """The victims of one ``PlacesRound``, as it gives them. Valid until the cache changes in another way."""

    def __init__(self, index: PlacesIndex, reclaim: Reclaim, now: float, count: int) -> None:
        self._round = index.round(reclaim, now, count)
        self._index = index
        self.peek = self._round.peek

    def move(self, most: int, to: int, ceiling: float = np.inf) -> list[Victim]:
        moved: list[Victim] = []
        while len(moved) < most and (group := self._round.take()):
            value, (session, chunks) = self.peek(), group
            if value > ceiling:
                break
            for chunk in chunks:
                session.places[chunk] = to
                moved.append((value, session, chunk))
            self._index.touch(session)
            self._round.put_back()
        return moved
