"""The owners of shared runs: pairs (row of a run, row of an owner), summed per run in each eviction round.

Pairs come and go with every turn, and each round reads all of them. So they are stored in two dense columns:
the last pair replaces one that is removed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats

Rows = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


class Claims:
    """The pairs, and sums over them."""

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
