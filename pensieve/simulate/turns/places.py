"""The eviction index of ``TurnCache``: the table of values over sessions and runs whose chunks are a byte each.

A byte says where its chunk is: the places of ``engine.cache.chunk.Place``, and those of a chunk on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import numpy as np

from pensieve.core import Floats, Hints, Ints
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.claims import Rows
from pensieve.engine.cache.index import Reclaim, ValueTable
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates.hints import NO_HINT, Hint, apply_hints, hint_from
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
CANDIDATE_PLACES: Final = {Reclaim.PAGE: BOTH, Reclaim.SAVED_PAGE: DEVICE, Reclaim.HOST_COPY: HOST}
"""Which place makes a chunk of an idle session a candidate."""


@dataclass(slots=True, eq=False)
class ChunkHolder:
    """A session with cached chunks."""

    key: int
    row: int
    tokens: int = 0
    places: bytearray = field(default_factory=bytearray)
    """One of the places above per chunk.

    Rankings hold this array. So while the session is idle it is changed in place; when the session is admitted it gets
    another one, and all places in this one become DROPPED: no ranking takes a chunk of a session that has run since."""
    places_before: bytearray = field(default_factory=bytearray)
    """The array that the session had until it was admitted."""
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    """New tokens of its latest turn."""
    kind: int = UNKNOWN
    """See ``Policy.on_turn_end``."""
    hint: Hint = NO_HINT
    """What was said of its next turn."""
    own_start: int = 0
    """Leading chunks that are another's."""

    @property
    def num_chunks(self) -> int:
        """How many it has."""
        return len(self.places) - self.own_start

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
class SharingSession(ChunkHolder):
    """A session that may have a beginning in common with others."""

    addresses: tuple[int, ...] = ()
    """Of the leading chunks that it may share."""
    runs: list[SharedRun] = field(default_factory=list)
    """Those that it shares, in order; its own chunks follow."""

    def context(self) -> bytearray:
        found = bytearray()
        for run in self.runs:
            found += run.places[run.own_start :]
        return found + self.places[self.own_start :]


@dataclass(slots=True, eq=False, repr=False)
class SharedRun(ChunkHolder):
    """Chunks in a row that the same sessions own, two at least. It is ``running`` while an owner is."""

    addresses: tuple[int, ...] = ()
    """Of its chunks and those before, and some behind."""
    owners: dict[SharingSession, None] = field(default_factory=dict)
    pins: int = 0
    """Owners that run."""


class PlacesIndex:
    """The rows of the sessions and runs of a ``TurnCache``. ``touch`` one after any change to it."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.table = ValueTable(policy, cost)
        self.policy = policy
        self.one_by_one = list(policy.group([0, 1, 2, 3])) == [0]
        self._residents: list[ChunkHolder | None] = []
        """By row."""
        self._dirty: dict[ChunkHolder, None] = {}

    def add_row(self) -> int:
        """A row for a new session or run; ``attach`` it next."""
        row = self.table.add_row()
        if row == len(self._residents):
            self._residents.append(None)
        return row

    def attach(self, resident: ChunkHolder) -> None:
        self._residents[resident.row] = resident
        self.touch(resident)

    def remove(self, resident: ChunkHolder) -> None:
        self._dirty.pop(resident, None)
        self._residents[resident.row] = None
        self.table.remove_row(resident.row)

    def touch(self, resident: ChunkHolder) -> None:
        self._dirty[resident] = None

    def touch_all(self, residents: Iterable[ChunkHolder]) -> None:
        self._dirty.update(dict.fromkeys(residents))

    def on_turn_end(self, session: ChunkHolder, now: float, hints: Hints | None) -> None:
        """As ``EvictionIndex.on_turn_end``."""
        session.kind = self.policy.on_turn_end(session.key, session.new_tokens, session.tokens, now)
        if hints is not None and self.policy.uses_hints:
            session.hint, self.table.hinted = hint_from(hints), True

    def on_turn_start(self, session: ChunkHolder, new_tokens: int, now: float) -> None:
        """As ``EvictionIndex.on_turn_start``."""
        session.new_tokens = new_tokens or session.new_tokens
        session.hint = NO_HINT
        self.policy.on_return(session.key, now)

    def on_suspend(self, session: ChunkHolder, now: float) -> None:
        """As ``EvictionIndex.on_suspend``."""
        session.kind, session.hint = UNKNOWN, NO_HINT
        self.policy.on_return(session.key, now)

    def lowest_rows(self, reclaim: Reclaim, now: float, expected: int) -> tuple[Rows, Floats]:
        """As ``ValueTable.lowest_rows``, with the cache as it is now."""
        self._refresh()
        return self.table.lowest_rows(reclaim, now, expected)

    def total(self, reclaim: Reclaim) -> int:
        """How many chunks could be reclaimed this way now."""
        self._refresh()
        return int(self.table.candidates[reclaim].sum())

    def holder_at(self, row: int) -> ChunkHolder | None:
        """The row's session or run; None when it was forgotten since the round began."""
        return self._residents[row]

    def holders(self, rows: Rows) -> list[ChunkHolder]:
        """The sessions of rows that have one."""
        return [resident for row in rows.tolist() if (resident := self._residents[row]) is not None]

    def counts(self, reclaim: Reclaim, rows: Rows) -> Ints:
        """How many candidates each of some rows has that are up to date."""
        counts: Ints = self.table.candidates[reclaim, rows].astype(np.int64)
        return counts

    def value(self, resident: ChunkHolder, chunk_index: int, candidates: int, now: float) -> float:
        """Value of a session's or run's next victim, in a round that began at ``now``."""
        if isinstance(resident, SharedRun):
            return self.table.run_value(resident.row, chunk_index, candidates)
        idle = now - resident.last_active
        return self.table.session_value(chunk_index, candidates, idle, resident.kind, resident.hint)

    def values_of(self, reclaim: Reclaim, rows: Rows, chunks: Rows, repeats: Ints, now: float) -> Floats:
        """Values of many chunks: of each row, which is up to date, the next ``repeats`` of ``chunks``."""
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
        """Column by column: row by row would be simpler, and take a tenth of a simulation's time."""
        if not self._dirty:
            return
        residents, table = list(self._dirty), self.table
        self._dirty.clear()
        places = [_NOTHING if resident.running else resident.places for resident in residents]
        costs = table.chunk_costs(max(map(len, places)))
        rows = np.array([resident.row for resident in residents])
        table.last_active[rows] = [resident.last_active for resident in residents]
        table.kinds[rows] = [resident.kind for resident in residents]
        if table.hinted:
            table.pauses[rows] = [resident.hint.pause for resident in residents]
            table.weights[rows] = [resident.hint.weight for resident in residents]
        for reclaim, place in CANDIDATE_PLACES.items():
            # A session without candidates has its first at -1, where the costs have infinity.
            firsts = list(map(bytearray.find, places, repeat(place)))
            table.first_cost[reclaim, rows] = costs[firsts]
            table.candidates[reclaim, rows] = list(map(bytearray.count, places, repeat(place)))
