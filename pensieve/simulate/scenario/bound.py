"""A limit that no policy can beat: how little has to be recomputed when space-time is all that is short.

Keeping a chunk from one turn to the next saves its recomputation and takes one page of a tier for that time. Pages
times the length of the run is all there is, so the least that must be given up is what a fractional knapsack leaves
out, filled in order of seconds saved per page-second. Real policies must also fit at every single moment, may hold
chunks twice, need pages for running turns and do not know the future: they stay above. Where sessions share chunks it
is no bound: one page then serves them all.
"""

from __future__ import annotations

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cost.model import CostModel

_PER_DECADE = 200
_LEAST_EXPONENT = -12


class Bound:
    """Collects idle periods in bins of equal savings per page-second; partly filled chunks count as nothing."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._chunk_costs = cost.chunk_costs(256)
        bins = _PER_DECADE * 24
        self._saved = np.zeros(bins)
        self._page_seconds = np.zeros(bins)

    def idle(self, history: int, seconds: float) -> None:
        """A session came back to ``history`` tokens after so many seconds."""
        chunks = history // self._cost.chunk_tokens
        if chunks > self._chunk_costs.size:
            self._chunk_costs = self._cost.chunk_costs(2 * chunks)
        costs = self._chunk_costs[:chunks]
        seconds = max(seconds, 1e-6)
        bins = self._bins(costs / seconds)
        np.add.at(self._saved, bins, costs)
        np.add.at(self._page_seconds, bins, seconds)

    def least_recomputed(self, pages: int, seconds: float) -> float:
        """Seconds of recomputation that remain with so many pages, in all tiers, for so long."""
        left, kept = pages * seconds, 0.0
        for saved, taken in zip(self._saved[::-1].tolist(), self._page_seconds[::-1].tolist(), strict=True):
            if taken > left:
                # Within the bin the best are not known: as if all of what fits were as good as its upper edge.
                kept += min(saved, saved * left / taken * 10 ** (1 / _PER_DECADE))
                break
            kept += saved
            left -= taken
        return max(float(self._saved.sum()) - kept, 0.0)

    @staticmethod
    def _bins(density: Floats) -> Ints:
        exponents = (np.log10(density) - _LEAST_EXPONENT) * _PER_DECADE
        return np.clip(exponents.astype(np.int64), 0, _PER_DECADE * 24 - 1)
