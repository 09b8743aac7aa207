"""Retention values of all holders of chunks, in columns. One evaluation ranks 100,000 holders in under a millisecond.

Retention values change with every tick of the clock and not in proportion, so no ordered structure over them
stays valid. Instead each holder has one row (cost of its first candidate chunk, number of candidates, time of
last activity, kind) in flat arrays. An eviction round evaluates the policy over whole columns once and merges
from there. To find the n lowest chunks only the n holders with the lowest first chunks matter, because values
rise within a holder.

A shared run has a row of its own. Its value comes from the claims of its owners, which each round sums up
again over a table of (run, owner) pairs.

The table knows rows only. ``eviction`` fills them from the engine's cache, ``pensieve.simulate.turns.victims``
from a simulation's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats, Ints
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cache.rates import NO_HINT, Hint, apply_hint, apply_hints
from pensieve.engine.cost import CostModel

Rows = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


class Claims:
    """The owners of shared runs: pairs (row of a run, row of an owner), and sums over them.

    Pairs come and go with every turn, and each round reads all of them. So they are stored in two dense columns:
    the last pair replaces one that is removed.
    """

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._runs = np.zeros(64, np.intp)
        self._owners = np.zeros(64, np.intp)
        self._distinct: Rows | None = None

    def add(self, run: int, owner: int) -> None:
        at = len(self._pairs)
        assert (run, owner) not in self._at, f"row {owner} owns run {run} already"
        if at == self._runs.size:
            self._runs = np.pad(self._runs, (0, at))
            self._owners = np.pad(self._owners, (0, at))
        self._at[run, owner] = at
        self._pairs.append((run, owner))
        self._runs[at], self._owners[at] = run, owner
        self._distinct = None

    def remove(self, run: int, owner: int) -> None:
        at = self._at.pop((run, owner))
        last = self._pairs.pop()
        if at < len(self._pairs):
            self._pairs[at] = last
            self._at[last] = at
            self._runs[at], self._owners[at] = last
        self._distinct = None

    def pairs(self) -> Iterable[tuple[int, int]]:
        """All (run row, owner row) pairs."""
        return self._pairs

    def runs(self) -> Rows:
        """Distinct rows of all runs."""
        if self._distinct is None:
            self._distinct = np.flatnonzero(np.bincount(self._runs[: len(self._pairs)]))
        return self._distinct

    def combined(self, claims: Floats, *, add: bool) -> Floats:
        """Return the sum of the claims on each run (or their maximum), float64 [rows]; 0 in rows that are no run.

        ``claims``: claim of the session in each row, float64 [rows].
        """
        runs = self._runs[: len(self._pairs)]
        made = claims.take(self._owners[: len(self._pairs)])
        if add:
            return np.asarray(np.bincount(runs, made, claims.size), dtype=np.float64)
        found = np.zeros(claims.size)
        np.maximum.at(found, runs, made)
        return found


class Reclaim(enum.IntEnum):
    """The page that an eviction takes from a chunk. Pinned chunks and chunks with a copy in flight give none."""

    PAGE = 0
    """The device page, at once: the chunk has a clean host copy."""
    SAVED_PAGE = 1
    """The device page, after a copy to the host or at the price of recomputing the chunk."""
    HOST_COPY = 2
    """The host page, at the price of recomputing the chunk: it has no device page."""


SAMPLE_STRIDE: Final = 64
_FIRST_ROWS: Final = 64


def lowest(values: Floats, count: int) -> Rows:
    """Return indices that include the ``count`` lowest values (all, when there are fewer), in no order.

    A sample gives a cut-off, so that usually only a few values of a large array are ranked.
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
    """Columns with one entry per row, filled by the caller, and the policy that evaluates them."""

    def __init__(self, policy: Policy, cost: CostModel) -> None:
        self.policy = policy
        self.rows = 0
        """Number of rows ever added; the columns are longer."""
        self.first_cost = np.full((len(Reclaim), _FIRST_ROWS), np.inf)
        """Cost of the first candidate chunk, [reclaim, row]; infinity without candidates. Where a holder loses all
        that it has left instead (``eviction.Victims``), the cost of that for each page of the first group."""
        self.candidates = np.zeros((len(Reclaim), _FIRST_ROWS))
        """Number of candidate chunks, [reclaim, row]."""
        self.tails = np.zeros((len(Reclaim), _FIRST_ROWS))
        """Number of candidate slices of the second group, [reclaim, row]; all 0 in a model with one group."""
        self.last_active = np.zeros(_FIRST_ROWS)
        self.kinds: Ints = np.full(_FIRST_ROWS, UNKNOWN, np.int64)
        self.tenants: Ints = np.zeros(_FIRST_ROWS, np.int64)
        """Tenant number of each holder. Values do not depend on it."""
        self.hinted = False
        """Whether any session ever had a hint. Until then, ``pauses`` and ``weights`` are neither written nor read."""
        self.pauses: Ints = np.full(_FIRST_ROWS, NO_HINT.pause, np.int64)
        self.weights = np.full(_FIRST_ROWS, NO_HINT.weight)
        self.claims = Claims()
        self._cost = cost
        self._free_rows: list[int] = []
        self.sums: Floats = np.zeros(0)
        """Combined claims on the run in each row, as of the latest round."""
        self._know_costs(_FIRST_ROWS)

    def add_row(self) -> int:
        """Allocate a row. It has no candidates yet."""
        if self._free_rows:
            return self._free_rows.pop()
        row = self.rows
        self.rows += 1
        if row >= self.last_active.size:
            grow = ((0, 0), (0, row))
            self.first_cost = np.pad(self.first_cost, grow, constant_values=np.inf)
            self.candidates = np.pad(self.candidates, grow)
            self.tails = np.pad(self.tails, grow)
            self.last_active = np.pad(self.last_active, grow[1])
            self.kinds = np.pad(self.kinds, grow[1])
            self.tenants = np.pad(self.tenants, grow[1])
            self.pauses = np.pad(self.pauses, grow[1], constant_values=NO_HINT.pause)
            self.weights = np.pad(self.weights, grow[1], constant_values=NO_HINT.weight)
        return row

    def remove_row(self, row: int) -> None:
        self.first_cost[:, row] = np.inf
        self.candidates[:, row] = self.tails[:, row] = 0
        self._free_rows.append(row)

    # -- costs -------------------------------------------------------------------------------------------------------

    def chunk_cost(self, index: int) -> float:
        """Return ``Cost(l)`` of chunk ``index``; infinity for -1 (no chunk)."""
        if index + 1 >= len(self._costs):
            self._know_costs(2 * index + 1)
        return self._costs[index]

    def chunk_costs(self, chunks: int) -> Floats:
        """Return ``chunk_cost`` of at least ``chunks`` chunks as an array. Its last element, index -1, is infinity."""
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
        """Return rows that include the ``expected`` next victims, in no order, and the values of their first
        candidates.

        ``barred``: rows that may give nothing, bool [rows].
        """
        first_cost = self.first_cost[reclaim, : self.rows]
        values = self._values(first_cost, self.candidates[reclaim, : self.rows], now)
        if not self.policy.uses_hints:  # else a value is a multiple of the cost: infinite as well, or NaN
            values[np.isinf(first_cost)] = np.inf
        if barred is not None:
            np.putmask(values, barred, np.inf)
        rows = lowest(values, expected)
        rows = rows[np.isfinite(values[rows])]
        return rows, values[rows]

    def _values(self, first_cost: Floats, candidates: Floats, now: float) -> Floats:
        """Return the values of the first candidates of all rows, runs included."""
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
        """Apply the hints to ``values``, which are multiples of ``costs``; apply them to ``claims`` in place."""
        return apply_hints(values, costs, idle, self.pauses[: self.rows], self.weights[: self.rows], claims)

    def session_value(self, first_cost: float, candidates: int, idle: float, kind: int, hint: Hint) -> float:
        value = self.policy.value(first_cost, candidates, idle, kind)
        return value if hint is NO_HINT else apply_hint(value, first_cost, idle, hint)

    def run_value(self, row: int, first_cost: float, candidates: int) -> float:
        """Return the value of a run's next victim, with the claims of the latest round."""
        cost, count = np.array([first_cost]), np.array([float(candidates)])
        return float(self.policy.shared_values(cost, count, self.sums[row : row + 1])[0])
