"""Clients' hints about a session's next turn, as a rate of return besides the assumed or learned one. Pure.

Where a value is Cost × rate (``Policy.uses_hints``), a hint changes the rate and nothing else: it pins no
chunk. Suppose a session is expected d seconds after its turn. With probability ``TRUST`` its time of return
is lognormal with mean d and spread ``SPREAD``; otherwise it behaves like any other session. The rate of the
first case is the Gittins index G_d(T). It sees the return coming and so keeps chunks through a pause, at a
price that a long pause makes low. The longer the session stays away, the less the first case is believed:

    belief(T) = TRUST S_d(T) / (TRUST S_d(T) + 1 - TRUST),      S_d: chance that a session due at d is not back by T
    V' = weight × (belief × G_d(T) × Cost + (1 - belief) × V)

After two or three d without a return V counts again, as if there had been no hint. ``weight`` is the importance,
clipped here whatever the caller did. The weight of a finished session is close to 0: its chunks go before all others
and stay only while there is room. Learned rates (``returns``) are counted from returns, never from hints.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from pensieve.core import Floats, Hints, Ints
from pensieve.engine.cache.rates.returns import (
    AGES,
    COLUMNS,
    EDGES,
    OLDEST,
    WIDTHS,
    YOUNGEST,
    LogBins,
    column_of,
    columns_of,
    factors,
)

TRUST: Final = 0.9
SPREAD: Final = 0.5
"""Standard deviation of the logarithm of a hinted time of return."""
LEAST_IMPORTANCE: Final = 1 / 16
MOST_IMPORTANCE: Final = 16.0
FINISHED: Final = 2.0**-20
"""Weight of a finished session: less than any ratio of costs and idle times of two sessions."""

_BLOCK: Final = 16384
"""Rows per block: a block stays in a core's cache from one operation to the next."""
_PAUSES: Final = LogBins(least_exponent=-2, octaves=18, bits=2)
"""Bins of pauses, from 1/4 s to 2^16 s. Shorter and longer pauses count as these."""


class Hint(NamedTuple):
    """A session's hints in the form of the index's columns."""

    pause: int
    """Start of the row of its expected pause in the tables; 0: no pause expected."""
    weight: float


NO_HINT: Final = Hint(0, 1.0)


def hint_from(hints: Hints | None) -> Hint:
    """Return the ``Hint`` for a turn's hints."""
    if hints is None:
        return NO_HINT
    weight = min(max(hints.importance, LEAST_IMPORTANCE), MOST_IMPORTANCE)
    if hints.finished:
        return Hint(0, FINISHED * weight)
    return Hint(0 if hints.next_turn_s is None else pause_row(hints.next_turn_s), weight)


def pause_row(seconds: float) -> int:
    """Return ``Hint.pause`` for an expected pause."""
    least, most = float(_PAUSE_EDGES[0]), float(_PAUSE_EDGES[-1]) * (1 - 1e-9)
    return (1 + _PAUSES.one(min(max(seconds, least), most))) * COLUMNS


def apply_hints(
    values: Floats,
    costs: Floats,
    idle: Floats,
    pauses: Ints,
    weights: Floats,
    claims: Floats | None = None,
) -> Floats:
    """Apply hints to the values of columns of sessions, in place; return ``values``.

    ``costs``: the costs that the values are multiples of. ``pauses``, ``weights``: the fields of ``Hint``.
    Values without a hint stay bit-identical. ``claims``: values at a cost of 1, adjusted in place in the same
    way. The table look-up takes most of the time, so one look-up serves both.
    """
    for start in range(0, values.size, _BLOCK):
        rows = slice(start, start + _BLOCK)
        at = columns_of(np.clip(idle[rows], YOUNGEST, OLDEST))
        at += pauses[rows]
        unhinted, hinted = _UNHINTED.take(at), _HINTED.take(at)
        if claims is not None:
            part = claims[rows]
            part *= unhinted
            part += hinted
            part *= weights[rows]
        part = values[rows]
        part *= unhinted
        hinted *= costs[rows]
        part += hinted
        part *= weights[rows]
    return values


def apply_hint(value: float, cost: float, idle: float, hint: Hint) -> float:
    """``apply_hints`` for one session."""
    at = hint.pause + column_of(min(max(idle, YOUNGEST), OLDEST))
    return hint.weight * (value * float(_UNHINTED[at]) + cost * float(_HINTED[at]))


def _survival(times: Floats, pauses: Floats) -> Floats:
    """Return the chance that a session due after each of ``pauses`` is not back at ``times``, [pauses, times]."""
    logs = np.log(times) - (np.log(pauses) - SPREAD**2 / 2)[:, None]
    return np.asarray(np.vectorize(math.erfc)(logs / (SPREAD * math.sqrt(2))) / 2, dtype=np.float64)


def _tables() -> tuple[Floats, Floats]:
    """Return 1 - belief and belief × G for each pause (first row: no pause) and column of ages; flat."""
    pauses = np.sqrt(_PAUSE_EDGES[:-1] * _PAUSE_EDGES[1:])
    # Long after the pause the chance underflows. The hazard stays above 0 there, but the belief is 0.
    survival = np.maximum(_survival(np.maximum(EDGES, EDGES[1] / 16), pauses), 1e-250)
    hazards = np.maximum((np.log(survival[:, :-1]) - np.log(survival[:, 1:])) / WIDTHS, 1e-9)
    trusted = TRUST * _survival(AGES, pauses)
    belief = trusted / (trusted + 1 - TRUST)
    # Without a pause the second part is too small to change a value. It is not 0, because costs may be infinite.
    unhinted, hinted = np.ones((1 + len(pauses), COLUMNS)), np.full((1 + len(pauses), COLUMNS), 1e-300)
    unhinted[1:] = 1 - belief
    hinted[1:] = np.maximum(belief * factors(hazards) / AGES, 1e-300)
    return unhinted.ravel(), hinted.ravel()


_PAUSE_EDGES: Final = _PAUSES.edges()
_UNHINTED, _HINTED = _tables()
