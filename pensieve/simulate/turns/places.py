"""The eviction index of ``TurnCache``: the table of values over sessions and runs, with one byte per chunk.

The byte is a place of ``engine.cache.chunk.Place``, or the place of a chunk in transit.
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
