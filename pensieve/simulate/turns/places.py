"""The eviction index of ``TurnCache``: as ``pensieve.engine.cache.index``, over sessions whose chunks are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pensieve.engine.cache.index import Reclaim, Rows, SessionIndex
from pensieve.engine.cache.log_bins import Floats, Ints
from pensieve.engine.cache.policy import UNKNOWN, Policy
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
SETTLED: Final = bytes((DROPPED, HOST, DEVICE, BOTH, CHOSEN, HOST, BOTH, BOTH, *range(8, 256)))
"""Place after the plan is complete, for ``bytearray.translate``."""
RECLAIMED: Final = bytes((DROPPED, HOST, DEVICE, HOST, *range(4, 256)))
"""Place of a chunk of an idle session that gave up its device slot if it could do so for nothing."""
ADMITTED: Final = bytes((DEVICE, BOTH_LOADING, *range(2, 256)))
"""Place of a chunk that was given a device slot if it had none."""
RECLAIMS: Final = {Reclaim.PAGE: BOTH, Reclaim.SAVED_PAGE: DEVICE, Reclaim.HOST_COPY: HOST}
"""Which place makes a chunk of an idle session a candidate."""


@dataclass(slots=True, eq=False)
class Resident:
    """A session with cached chunks."""

    key: int
    row: int
    tokens: int = 0
    places: bytearray = field(default_factory=bytearray)
    """One of the places above per chunk. While the session is idle it stays the same object, changed in place: rankings
    hold it. When the session is admitted it gets another one, and this one is emptied, so they hold nothing."""
    before: bytearray = field(default_factory=bytearray)
    """Of a running session, ``places`` as rankings hold it."""
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    """Of its latest turn."""
    kind: int = UNKNOWN
    """See ``Policy.left``."""


class PlacesIndex(SessionIndex[Resident]):
    """The rows of the sessions of a ``TurnCache``."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        super().__init__(policy, cost)
        self.one_by_one = list(policy.group([0, 1, 2, 3])) == [0]

    def first_and_count(self, session: Resident, reclaim: Reclaim) -> tuple[int, int]:
        if session.running:
            return -1, 0
        place = RECLAIMS[reclaim]
        return session.places.find(place), session.places.count(place)

    def next_group(self, session: Resident, reclaim: Reclaim) -> Sequence[int]:
        first, count = self.first_and_count(session, reclaim)
        if self.one_by_one or not count:
            return (first,) if count else ()
        place = RECLAIMS[reclaim]
        return self.policy.group([index for index, at in enumerate(session.places) if at == place])

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
        return self.policy.values(
            self._cost_table[chunks],
            self._candidates[reclaim, rows].repeat(repeats),
            (now - self._last_active[rows]).repeat(repeats),
            self._kinds[rows].repeat(repeats),
        )

    def _know_costs(self, chunks: int) -> None:
        super()._know_costs(chunks)
        self._cost_table = np.array(self._costs)

    def _context(self, session: Resident) -> int:
        return session.tokens

    def _fill(self, sessions: list[Resident]) -> None:
        """By columns: row by row would be simpler, and a tenth of a simulation's time."""
        places = [b"" if session.running else session.places for session in sessions]
        longest = max(map(len, places))
        if longest >= len(self._costs):
            self._know_costs(2 * longest)
        rows = np.array([session.row for session in sessions])
        self._last_active[rows] = [session.last_active for session in sessions]
        self._kinds[rows] = [session.kind for session in sessions]
        for reclaim, place in RECLAIMS.items():
            # A session without candidates has none at -1, where the table has infinity.
            self._first_cost[reclaim, rows] = self._cost_table[[at.find(place) for at in places]]
            self._candidates[reclaim, rows] = [at.count(place) for at in places]
