"""The eviction index of ``TurnCache``: a ``SessionIndex`` over sessions and runs whose chunks are a byte each.

A byte says where its chunk is: the places of ``engine.cache.chunk.Place``, and those of a chunk on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.claims import Rows
from pensieve.engine.cache.index import Reclaim, SessionIndex, VictimRound
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates.hints import NO_HINT, Hint, adjusted
from pensieve.engine.cost.model import CostModel

DROPPED: Final = 0
HOST: Final = 1
DEVICE: Final = 2
BOTH: Final = 3
CHOSEN: Final = 4
"""On the device, about to be evicted."""
HOST_SAVING: Final = 5
"""Evicted by the plan that is being made: a candidate again when that plan is complete."""
BOTH_SAVING: Final = 6
BOTH_LOADING: Final = 7
ELSEWHERE: Final = 8
"""Before the chunks that a session or run has of its own, those of others, so that each is where it is in contexts."""
SAVING: Final = frozenset((HOST_SAVING, BOTH_SAVING))
IN_TRANSIT: Final = SAVING | {BOTH_LOADING}
SETTLED: Final = bytes((DROPPED, HOST, DEVICE, BOTH, CHOSEN, HOST, BOTH, BOTH, *range(8, 256)))
"""Place after the plan is complete, for ``bytearray.translate``."""
RECLAIMED: Final = bytes((DROPPED, HOST, DEVICE, HOST, *range(4, 256)))
"""Place of an idle session's chunk after its device page was taken, if that costs nothing."""
ADMITTED: Final = bytes((DEVICE, BOTH_LOADING, *range(2, 256)))
"""Place of a chunk after it was placed on the device, if it was not there."""
_DROPPED: Final = bytes((DROPPED,))
_NOTHING: Final = bytearray()
RECLAIMS: Final = {Reclaim.PAGE: BOTH, Reclaim.SAVED_PAGE: DEVICE, Reclaim.HOST_COPY: HOST}
"""Which place makes a chunk of an idle session a candidate."""


@dataclass(slots=True, eq=False)
class Resident:
    """A session with cached chunks."""

    key: int
    row: int
    tokens: int = 0
    places: bytearray = field(default_factory=bytearray)
    """One of the places above per chunk.

    Rankings hold this array. So while the session is idle it is changed in place; when the session is admitted it gets
    another one, and all places in this one become DROPPED: no ranking takes a chunk of a session that has run since."""
    before: bytearray = field(default_factory=bytearray)
    """The array that the session had until it was admitted."""
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    """New tokens of its latest turn."""
    kind: int = UNKNOWN
    """See ``Policy.left``."""
    hint: Hint = NO_HINT
    """What was said of its next turn."""
    elsewhere: int = 0
    """Leading chunks that are another's."""

    @property
    def chunks(self) -> int:
        """How many it has."""
        return len(self.places) - self.elsewhere

    def context(self) -> bytearray:
        """The places of all of its chunks, those included that it shares."""
        return self.places

    def restore(self, history: int, total: int, size: int) -> Restore:
        """Where the history is that its next turn of ``total`` tokens finds: as ``CacheManager.admit`` would say it.

        ``size``: tokens of a chunk.
        """
        places = self.context()
        known = min(self.tokens, total - 1)  # something has to be computed to get a token
        missing: list[Range] = []
        lost = 0
        first = places.find(DROPPED)
        while first >= 0:
            last = len(places) - len(places[first:].lstrip(_DROPPED))
            low, high = first * size, min(last * size, known)
            missing.append((low, high))
            lost += high - low
            first = places.find(DROPPED, last)
        if missing and missing[-1][1] == known:
            missing[-1] = missing[-1][0], total
        else:
            missing.append((known, total))
        beyond = len(places) * size - known if places and places[-1] == HOST else 0
        host = places.count(HOST) * size - beyond
        device = known - lost - host
        # Of a first turn's input, which is no history, some may be present: others have computed it.
        return Restore(tuple(missing), device, host, max(history - device - host, 0))


@dataclass(slots=True, eq=False, repr=False)  # they refer to each other
class Sharer(Resident):
    """A session that may have a beginning in common with others."""

    addresses: tuple[int, ...] = ()
    """Of the leading chunks that it may share."""
    runs: list[Run] = field(default_factory=list)
    """Those that it shares, in order; its own chunks follow."""

    def context(self) -> bytearray:
        found = bytearray()
        for run in self.runs:
            found += run.places[run.elsewhere :]
        return found + self.places[self.elsewhere :]


@dataclass(slots=True, eq=False, repr=False)
class Run(Resident):
    """Chunks in a row that the same sessions own, two at least. It is ``running`` while an owner is."""

    addresses: tuple[int, ...] = ()
    """Of its chunks and those before, and some behind."""
    owners: dict[Sharer, None] = field(default_factory=dict)
    pins: int = 0
    """Owners that run."""


class PlacesIndex(SessionIndex[Resident, Resident]):
    """The rows of the sessions of a ``TurnCache``."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        super().__init__(policy, cost)
        self.one_by_one = list(policy.group([0, 1, 2, 3])) == [0]

    def value(self, session: Resident, chunk_index: int, candidates: int, now: float) -> float:
        if isinstance(session, Run):
            return self.run_value(session, chunk_index, candidates)
        return self.session_value(session, chunk_index, candidates, now)

    def residents(self, rows: Rows) -> list[Resident]:
        """The sessions of rows that have one."""
        sessions = self._sessions
        return [session for row in rows.tolist() if (session := sessions[row]) is not None]

    def counts(self, reclaim: Reclaim, rows: Rows) -> Ints:
        """How many candidates each of some rows has that are up to date."""
        counts: Ints = self._candidates[reclaim, rows].astype(np.int64)
        return counts

    def values_of(self, reclaim: Reclaim, rows: Rows, chunks: Rows, repeats: Ints, now: float) -> Floats:
        """Values of many chunks: of each row, which is up to date, the next ``repeats`` of ``chunks``."""
        costs, candidates = self._cost_table[chunks], self._candidates[reclaim, rows].repeat(repeats)
        idle = (now - self._last_active[rows]).repeat(repeats)
        values = self.policy.values(costs, candidates, idle, self._kinds[rows].repeat(repeats))
        if self._hinted:
            pauses, weights = self._pauses[rows].repeat(repeats), self._weights[rows].repeat(repeats)
            values = adjusted(values, costs, idle, pauses, weights)
        runs = self._claims.runs()
        if runs.size:
            shared = np.isin(rows, runs).repeat(repeats)
            claims = self._sums[rows].repeat(repeats)[shared]
            values[shared] = self.policy.shared_values(costs[shared], candidates[shared], claims)
        return values

    def _know_costs(self, chunks: int) -> None:
        super()._know_costs(chunks)
        self._cost_table = np.array(self._costs)

    def _context(self, session: Resident) -> int:
        return session.tokens

    def _fill(self, sessions: list[Resident]) -> None:
        """Column by column: row by row would be simpler, and take a tenth of a simulation's time."""
        places = [_NOTHING if session.running else session.places for session in sessions]
        longest = max(map(len, places))
        if longest >= len(self._costs):
            self._know_costs(2 * longest)
        rows = np.array([session.row for session in sessions])
        self._last_active[rows] = [session.last_active for session in sessions]
        self._kinds[rows] = [session.kind for session in sessions]
        if self._hinted:
            self._pauses[rows] = [session.hint.pause for session in sessions]
            self._weights[rows] = [session.hint.weight for session in sessions]
        for reclaim, place in RECLAIMS.items():
            # A session without candidates has its first at -1, where the table has infinity.
            firsts = list(map(bytearray.find, places, repeat(place)))
            self._first_cost[reclaim, rows] = self._cost_table[firsts]
            self._candidates[reclaim, rows] = list(map(bytearray.count, places, repeat(place)))


class PlacesRound(VictimRound[Resident, Resident]):
    """A round of a ``PlacesIndex``. A byte is found at once, so nothing is kept between two groups."""

    def __init__(self, index: PlacesIndex, reclaim: Reclaim, now: float, expected: int) -> None:
        super().__init__(index, reclaim, now, expected)
        self._place = RECLAIMS[reclaim]
        self._one_by_one, self._policy = index.one_by_one, index.policy

    def first_and_count(self, holder: Resident) -> tuple[int, int]:
        if holder.running:
            return -1, 0
        return holder.places.find(self._place), holder.places.count(self._place)

    def next_group(self, holder: Resident) -> Sequence[int]:
        first, count = self.first_and_count(holder)
        if self._one_by_one or not count:
            return (first,) if count else ()
        return self._policy.group([index for index, at in enumerate(holder.places) if at == self._place])
