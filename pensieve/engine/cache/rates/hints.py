"""What a client said of its session's next turn, as a rate of return beside the assumed or learned one. Pure.

Where a value is Cost × rate (``Policy.uses_hints``), a hint changes the rate and nothing else: no chunk is kept for
it that would not be given up for one worth more. A session that is to come back d seconds after its turn is taken, with
probability ``TRUST``, for one whose time of return has mean d and is lognormal with ``SPREAD``, and otherwise for one
like any other. Of the first the rate is the Gittins index G_d(T), which sees the return coming and so holds on through
a pause, at a price that a long pause makes low. The longer such a session stays away, the less the first is believed:

    belief(T) = TRUST S_d(T) / (TRUST S_d(T) + 1 - TRUST),      S_d: chance that one who will come at d is not back by T
    V' = weight × (belief × G_d(T) × Cost + (1 - belief) × V)

So after some two or three d without a return V counts again, as if nothing had been said. ``weight`` is the importance,
clipped here whatever the caller did, and next to nothing for a session that is finished: it goes before all others, and
stays while there is room. What the server learns of returns (``returns``) is counted from returns, never from hints.
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
"""Standard deviation of the logarithm of a time of return that a client has told."""
LEAST_IMPORTANCE: Final = 1 / 16
MOST_IMPORTANCE: Final = 16.0
FINISHED: Final = 2.0**-20
"""Weight of a finished session: less than any ratio of costs and idle times that two sessions could have."""

_BLOCK: Final = 16384
"""Rows that are adjusted at a time, which stay in a core's cache from one operation to the next."""
_PAUSES: Final = LogBins(least_exponent=-2, octaves=18, bits=2)
"""Pauses that are told apart: from 1/4 s to 2^16 s; shorter and longer ones count as these."""


class Hint(NamedTuple):
    """One session's hints as the columns of an index have them."""

    pause: int
    """Where the row of its expected pause begins in the tables; 0: it has none."""
    weight: float


NO_HINT: Final = Hint(0, 1.0)


def hint_from(hints: Hints | None) -> Hint:
    """What to make of a turn's hints."""
    if hints is None:
        return NO_HINT
    weight = min(max(hints.importance, LEAST_IMPORTANCE), MOST_IMPORTANCE)
    if hints.finished:
        return Hint(0, FINISHED * weight)
    return Hint(0 if hints.next_turn_s is None else pause_row(hints.next_turn_s), weight)


def pause_row(seconds: float) -> int:
    """``Hint.pause`` of an expected pause."""
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
    """Values with hints taken into account, for columns of sessions; ``values`` is written to.

    ``costs``: what the values are multiples of; ``pauses`` and ``weights``: the fields of ``Hint``. What has no hint
    keeps its value to the last bit. ``claims``: values at a cost of 1, which are adjusted in the same way and written
    to as well; looking up what the hints say takes most of the time, so it is done once for both.
    """
    for start in range(0, values.size, _BLOCK):
        rows = slice(start, start + _BLOCK)
        at = columns_of(np.clip(idle[rows], YOUNGEST, OLDEST))
        at += pauses[rows]
        otherwise, told = _OTHERWISE.take(at), _TOLD.take(at)
        if claims is not None:
            part = claims[rows]
            part *= otherwise
            part += told
            part *= weights[rows]
        part = values[rows]
        part *= otherwise
        told *= costs[rows]
        part += told
        part *= weights[rows]
    return values


def apply_hint(value: float, cost: float, idle: float, hint: Hint) -> float:
    """``adjusted`` for one session."""
    at = hint.pause + column_of(min(max(idle, YOUNGEST), OLDEST))
    return hint.weight * (value * float(_OTHERWISE[at]) + cost * float(_TOLD[at]))


def _survival(times: Floats, pauses: Floats) -> Floats:
    """Chance that one who was said to come back after each of ``pauses`` is not back at ``times``, [pauses, times]."""
    logs = np.log(times) - (np.log(pauses) - SPREAD**2 / 2)[:, None]
    return np.asarray(np.vectorize(math.erfc)(logs / (SPREAD * math.sqrt(2))) / 2, dtype=np.float64)


def _tables() -> tuple[Floats, Floats]:
    """1 - belief, and belief × G, for each pause (the first row: none) and column of ages; flat."""
    pauses = np.sqrt(_PAUSE_EDGES[:-1] * _PAUSE_EDGES[1:])
    # Far behind the pause nobody is left: from there on there is a hazard, but no belief.
    left = np.maximum(_survival(np.maximum(EDGES, EDGES[1] / 16), pauses), 1e-250)
    hazards = np.maximum((np.log(left[:, :-1]) - np.log(left[:, 1:])) / WIDTHS, 1e-9)
    trusted = TRUST * _survival(AGES, pauses)
    belief = trusted / (trusted + 1 - TRUST)
    # Of a session without a pause the second part is too small to change its value, and no 0: costs may be infinite.
    otherwise, told = np.ones((1 + len(pauses), COLUMNS)), np.full((1 + len(pauses), COLUMNS), 1e-300)
    otherwise[1:] = 1 - belief
    told[1:] = np.maximum(belief * factors(hazards) / AGES, 1e-300)
    return otherwise.ravel(), told.ravel()


_PAUSE_EDGES: Final = _PAUSES.edges()
_OTHERWISE, _TOLD = _tables()
