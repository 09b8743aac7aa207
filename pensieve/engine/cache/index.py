"""Retention values of all holders of chunks, in columns: one evaluation ranks 100,000 of them in under a millisecond.

Retention values change with every tick of the clock and not in proportion, so no ordered structure over them stays
valid. Instead each holder has one row (cost of its first candidate chunk, number of candidates, time of last activity,
kind) in flat arrays; an eviction round evaluates the policy over whole columns once and merges from there: to find the
n lowest chunks only the n holders with the lowest first chunks can matter, because within a holder values rise.

Chunks in a row that several sessions own are a run, with a row of its own. A run's value comes from the claims of its
owners, which are summed up anew in each round, over a table of pairs of rows, one for each owner of each run.

The table knows rows only. ``eviction`` says what the rows of the engine's cache are, and fills them; a simulation has
rows of its own kind (``pensieve.simulate.turns.places``).
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cache.claims import Bools, Claims, Rows
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates.hints import NO_HINT, Hint, apply_hint, apply_hints
from pensieve.engine.cost.model import CostModel


class Reclaim(enum.IntEnum):
    """What an eviction takes from a chunk. Nothing is taken from pinned chunks and chunks with a copy in flight."""

    PAGE = 0
    """Its device slot at once: it has a clean host copy."""
    SAVED_PAGE = 1
    """Its device slot after a copy to the host (or at the price of recomputing it)."""
    HOST_COPY = 2
    """Its host slot, at the price of recomputing it: the device no longer has it."""


SAMPLE_STRIDE: Final = 64
_FIRST_ROWS: Final = 64


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


class ValueTable:
    """Columns with one entry per row, and the policy over them. The caller writes the columns of rows it has added."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self.rows = 0
        """Rows that were ever added; columns are longer."""
        self.first_cost = np.full((len(Reclaim), _FIRST_ROWS), np.inf)
        """Cost of the first candidate chunk; infinity without one. [reclaim, row]"""
        self.candidates = np.zeros((len(Reclaim), _FIRST_ROWS))
        """Number of candidate chunks. [reclaim, row]"""
        self.last_active = np.zeros(_FIRST_ROWS)
        self.kinds: Ints = np.full(_FIRST_ROWS, UNKNOWN, np.int64)
        self.tenants: Ints = np.zeros(_FIRST_ROWS, np.int64)
        """Number of the holder's tenant; no value depends on it."""
        self.hinted = False
        """Whether any session ever had a hint. Without one, the next two columns are neither written nor read."""
        self.pauses: Ints = np.full(_FIRST_ROWS, NO_HINT.pause, np.int64)
        self.weights = np.full(_FIRST_ROWS, NO_HINT.weight)
        self.claims = Claims()
        self._cost = cost
        self._free_rows: list[int] = []
        self._one: tuple[Floats, Floats, Floats, Ints] = (
            np.zeros(1),
            np.zeros(1),
            np.zeros(1),
            np.zeros(1, np.int64),
        )
        """Columns of one session, used again and again by ``session_value``."""
        self.sums: Floats = np.zeros(0)
        """Sum of the claims on the run in each row, at the time of the latest round."""
        self._know_costs(_FIRST_ROWS)

    def add_row(self) -> int:
        """A row that no other holder has. It has no candidates yet."""
        if self._free_rows:
            return self._free_rows.pop()
        row = self.rows
        self.rows += 1
        if row >= self.last_active.size:
            grow = ((0, 0), (0, row))
            self.first_cost = np.pad(self.first_cost, grow, constant_values=np.inf)
            self.candidates = np.pad(self.candidates, grow)
            self.last_active = np.pad(self.last_active, grow[1])
            self.kinds = np.pad(self.kinds, grow[1])
            self.tenants = np.pad(self.tenants, grow[1])
            self.pauses = np.pad(self.pauses, grow[1], constant_values=NO_HINT.pause)
            self.weights = np.pad(self.weights, grow[1], constant_values=NO_HINT.weight)
        return row

    def remove_row(self, row: int) -> None:
        """The row's holder is gone; the row is given to another."""
        self.first_cost[:, row] = np.inf
        self.candidates[:, row] = 0
        self._free_rows.append(row)

    # -- costs -------------------------------------------------------------------------------------------------------

    def chunk_cost(self, index: int) -> float:
        """``Cost(l)`` of a session's chunk ``index``; infinity for -1, which stands for no chunk."""
        if index + 1 >= len(self._costs):
            self._know_costs(2 * index + 1)
        return self._costs[index]

    def chunk_costs(self, chunks: int) -> Floats:
        """``chunk_cost`` as an array of at least ``chunks`` chunks, and infinity at its end, which is index -1."""
        if chunks >= len(self._costs):
            self._know_costs(2 * chunks)
        return self._cost_array

    def _know_costs(self, chunks: int) -> None:
        self._cost_array = np.append(self._cost.chunk_costs(chunks), np.inf)
        self._costs: list[float] = self._cost_array.tolist()

    # -- values ------------------------------------------------------------------------------------------------------

    def lowest_rows(
        self, reclaim: Reclaim, now: float, expected: int, barred: Bools | None = None
    ) -> tuple[Rows, Floats]:
        """Rows in no order that include those of the ``expected`` next victims; values of their first candidates.

        ``barred``: rows that give nothing, bool [rows]; None: none.
        """
        first_cost = self.first_cost[reclaim, : self.rows]
        values = self._values(first_cost, self.candidates[reclaim, : self.rows], now)
        values[np.isinf(first_cost)] = np.inf
        if barred is not None:
            np.putmask(values, barred, np.inf)
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return rows, values[rows]

    def _values(self, first_cost: Floats, candidates: Floats, now: float) -> Floats:
        """Values of the first candidates of all rows, those of runs included."""
        idle, kinds = now - self.last_active[: self.rows], self.kinds[: self.rows]
        runs = self.claims.runs()
        if not runs.size:
            values = self.policy.values(first_cost, candidates, idle, kinds)
            return self._with_hints(values, first_cost, idle) if self.hinted else values
        values, claims = self.policy.values_and_claims(first_cost, candidates, idle, kinds)
        if self.hinted:
            values = self._with_hints(values, first_cost, idle, claims)
        self.sums = self.claims.combined(claims, add=self.policy.adds_up)
        values[runs] = self.policy.shared_values(first_cost[runs], candidates[runs], self.sums[runs])
        return values

    def _with_hints(
        self, values: Floats, costs: Floats, idle: Floats, claims: Floats | None = None
    ) -> Floats:
        """Adjust the values of all rows, which are multiples of ``costs``, to the hints; and ``claims`` in place."""
        return apply_hints(values, costs, idle, self.pauses[: self.rows], self.weights[: self.rows], claims)

    def session_value(self, chunk_index: int, candidates: int, idle: float, kind: int, hint: Hint) -> float:
        """Retention value of one session's next victim."""
        cost, count, seconds, kinds = self._one
        cost[0], count[0], seconds[0], kinds[0] = self.chunk_cost(chunk_index), candidates, idle, kind
        value = float(self.policy.values(cost, count, seconds, kinds)[0])
        return value if hint is NO_HINT else apply_hint(value, float(cost[0]), idle, hint)

    def run_value(self, row: int, chunk_index: int, candidates: int) -> float:
        """Value of a run's next victim, in the latest round."""
        cost, count = np.array([self.chunk_cost(chunk_index)]), np.array([float(candidates)])
        return float(self.policy.shared_values(cost, count, self.sums[row : row + 1])[0])
