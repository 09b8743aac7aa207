"""The Gittins index of an idle session, and how it is looked up for 100,000 of them at a time.

To hold a chunk is to pay one page-second each second until its session returns, which saves its recomputation, or
until it is given up. How good that is from age T on is the best ratio of P(return) to E[seconds held] that any time of
giving up can have: the index of Gittins ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41,
1979). Where the hazard of a return falls with age the index is that hazard. Where it rises first, because people take
half a minute to read and type, the index sees the rise coming and the hazard does not. Holding what has the highest
index is optimal when pages are many and every session's share of them small (the relaxation of Whittle, 1988). LHD
(Beckmann, Chen and Cidon, NSDI 2018) ranks by such a ratio too, hits per space-time, learned by age and class.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cache.rates.log_bins import LogBins
from pensieve.engine.cache.rates.returns import BINS, PRIOR, WIDTHS

_TABLE: Final = LogBins(least_exponent=-10, octaves=30, bits=3)
"""Ages of a table of factors, finer than what was learned, so that interpolation leaves no steps."""
COLUMNS: Final = _TABLE.count
_EDGES: Final = _TABLE.edges()
YOUNGEST: Final = float(_EDGES[0])
OLDEST: Final = float(_EDGES[-1]) * (1 - 1e-9)
"""The least and the greatest age in a table, seconds: about a millisecond and twelve days."""


AGES: Final = np.diff(_EDGES) / np.log(_EDGES[1:] / _EDGES[:-1])
"""The middle of each column."""


def _interpolation() -> tuple[Ints, Floats]:
    """For each column the age bin whose middle is before the column's own, and the share of the bin after that one."""
    at = np.interp(np.log(AGES), -np.log(PRIOR), np.arange(BINS))
    before = np.minimum(at.astype(np.int64), BINS - 2)
    return before, at - before


_BEFORE, _SHARE = _interpolation()


def columns_of(ages: Floats) -> Ints:
    """Column of each age; ages are within ``YOUNGEST`` and ``OLDEST``."""
    return _TABLE.of(ages)


def column_of(age: float) -> int:
    """Column of one age."""
    return _TABLE.one(age)


def gittins_indices(hazards: Floats) -> Floats:
    """Gittins index of an idle session at the beginning of each age bin, returns per second, [n, BINS].

    The maximum, over all later bins, of P(return by the end of it) / E[seconds held until the return or then].
    """
    stays = np.exp(-hazards * WIDTHS)
    comes = -np.expm1(-hazards * WIDTHS)
    held = comes / hazards
    there = np.ones_like(hazards)
    came, seconds = comes.copy(), held.copy()
    best = came / seconds
    for ahead in range(1, BINS):
        last = BINS - ahead
        there = there[:, :last] * stays[:, ahead - 1 : -1]
        came = came[:, :last] + there * comes[:, ahead:]
        seconds = seconds[:, :last] + there * held[:, ahead:]
        np.maximum(best[:, :last], came / seconds, out=best[:, :last])
    return best


def factors(hazards: Floats) -> Floats:
    """Gittins index times T, [n, COLUMNS]: 1 where sessions come back as ``1 / T`` says, more where more often."""
    coarse = gittins_indices(hazards) / PRIOR
    return np.asarray(coarse[:, _BEFORE] * (1 - _SHARE) + coarse[:, _BEFORE + 1] * _SHARE, dtype=np.float64)
