"""How soon sessions return, learned from the server's own history or hinted by clients. Pure; no clock of its own.

An idle period ends with a return or is still open. By age (the time since it began, in bins that widen with
it) we count the returns and the seconds that sessions were at risk of one. Their quotient is the hazard.
Sessions that never return count through their time at risk, even after their chunks are gone or they were
deleted; so the periods are kept here and not with the cache. When too many periods are open, every second one
in the fullest octave of ages is closed as it stands. Such censoring does not depend on the future. So it
costs precision and adds no bias, and it keeps as many periods of hours as of seconds.

Idle periods are grouped into *cells* by the new tokens of the turn before and by the context that it left,
both in powers of two. There are never enough returns to learn each cell on its own. So hazards are built up
in steps. Each multiplies the hazard before by (returns + k) / (expected returns + k), the mean of a Poisson
rate with a gamma prior:

1. ``1 / T``, which retention values assume (Cost(l) / T);
2. all cells together: a factor per octave of age, then one per bin;
3. a factor per context length and a factor per new input, fitted in turns (iterative proportional fitting);
   then a factor per cell;
4. again factors per context length and per new input for each two octaves of age, since sessions that return
   less often may also return later; then a factor per cell and octave.

The value of keeping an idle session's chunks is its Gittins index, looked up for 100,000 sessions at a time. Keeping
a chunk costs one page-second per second until its session returns, which saves the recomputation, or until the chunk
is evicted. The index at age T is the best ratio of P(return) to E[seconds kept] over all times of giving up
(Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979). Where the hazard falls
with age, the index equals the hazard. Where the hazard first rises, because people take half a minute to read and
type, the index sees the rise coming and the hazard does not. Keeping the chunks with the highest index is optimal
when there are many pages and every session's share of them is small (the relaxation of Whittle, 1988). LHD
(Beckmann, Chen and Cidon, NSDI 2018) ranks by a similar ratio, hits per space-time, learned by age and class.

A client's hint about a session's next turn is a rate of return besides the assumed or learned one. Where a value is
Cost × rate (``Policy.uses_hints``), a hint changes the rate and nothing else: it pins no chunk. Suppose a session is
expected d seconds after its turn. With probability ``TRUST`` its time of return is lognormal with mean d and spread
``SPREAD``; otherwise it behaves like any other session. The rate of the first case is the Gittins index G_d(T). It
sees the return coming and so keeps chunks through a pause, at a price that a long pause makes low. The longer the
session stays away, the less the first case is believed:

    belief(T) = TRUST S_d(T) / (TRUST S_d(T) + 1 - TRUST),      S_d: chance that a session due at d is not back by T
    V' = weight × (belief × G_d(T) × Cost + (1 - belief) × V)

After two or three d without a return V counts again, as if there had been no hint. ``weight`` is the importance,
clipped here whatever the caller did. The weight of a finished session is close to 0: its chunks go before all others
and stay only while there is room. Learned rates are counted from returns, never from hints.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats, Hints, Ints

_MANTISSA_BITS = 52
_BIAS = 1023


@dataclass(frozen=True, slots=True)
class LogBins:
    """Bins from ``2 ** least_exponent`` over ``octaves`` octaves, each divided into ``2 ** bits`` bins of equal width.

    The exponent and the leading mantissa bits of a float64, read as an integer, are the bin up to a constant.
    """

    least_exponent: int
    octaves: int
    bits: int

    @property
    def count(self) -> int:
        return self.octaves << self.bits

    def edges(self) -> Floats:
        """Return the edges of the bins, float64 [count + 1]."""
        steps = 1 << self.bits
        octave, step = np.divmod(np.arange(self.count + 1), steps)
        return np.asarray(2.0 ** (self.least_exponent + octave) * (1 + step / steps), dtype=np.float64)

    def bins_of(self, values: Floats) -> Ints:
        """Return the bin of each value in a new array; outside the bins, below 0 or above ``count - 1``."""
        found = values.view(np.int64) >> (_MANTISSA_BITS - self.bits)
        found -= (_BIAS + self.least_exponent) << self.bits
        return found

    def one(self, value: float) -> int:
        """``bins_of`` for one value above zero."""
        mantissa, exponent = math.frexp(value)
        return ((exponent - 1 - self.least_exponent) << self.bits) + int(
            (2 * mantissa - 1) * (1 << self.bits)
        )


LEAST_EXPONENT: Final = -4
_BITS: Final = 2
_OCTAVE: Final = 1 << _BITS
"""Bins per octave of age."""
_AGES: Final = LogBins(LEAST_EXPONENT, octaves=20, bits=_BITS)
BINS: Final = _AGES.count
"""From 1/16 s to 2^16 s; ages beyond either end fall into the last bin there."""
EDGES: Final = np.append(0.0, _AGES.edges()[1:])
"""Edges of the bins in seconds, float64 [BINS + 1]."""
_EDGES: Final[list[float]] = EDGES.tolist()
WIDTHS: Final = np.diff(EDGES)
PRIOR: Final = np.log(EDGES[1:] / np.maximum(EDGES[:-1], EDGES[1] / np.e)) / WIDTHS
"""Mean of 1 / T over each bin, per second."""

CONTEXTS: Final = 12
INPUTS: Final = 9
CELLS: Final = CONTEXTS * INPUTS

MOST_OPEN: Final = 16384
"""Most idle periods kept open at a time."""
POOL_K: Final = 128.0
CELL_K: Final = 4.0
AGE_K: Final = 16.0
"""``k`` of the steps: the number of returns at which a correction is half believed. The hazard common to all cells
is known from many returns. With a small ``k`` it would wander at ages that few sessions reach, and its shape decides
between young and old sessions. A factor for a whole cell needs few returns, one for a part of its ages more."""
HALF_LIFE: Final = 50_000
"""Idle periods after which counts weigh half: loads change from hour to hour."""
_FADE_EVERY: Final = 1024
_SWEEPS: Final = 3


def bins_of(ages: Floats) -> Ints:
    found = _AGES.bins_of(ages)
    np.maximum(found, 0, out=found)
    return np.minimum(found, BINS - 1, out=found)


def cell_of(new_tokens: int, context_tokens: int) -> int:
    """Return the cell of an idle period after a turn with this much input that left this context.

    Contexts by powers of two (up to 64, up to 128, …, beyond 64 Ki); inputs by powers of four.
    """
    context = min(max(context_tokens.bit_length() - 6, 0), CONTEXTS - 1)
    return context * INPUTS + min((max(new_tokens, 1).bit_length() - 1) // 2, INPUTS - 1)


class IdlePeriods:
    """Open idle periods, in arrays of a fixed size."""

    def __init__(self, most: int) -> None:
        self._rows: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None] * most
        self._free = list(range(most))[::-1]
        self._since = np.zeros(most)
        self._cells = np.zeros(most, np.int64)
        self._open = np.zeros(most, np.bool_)

    @property
    def full(self) -> bool:
        return not self._free

    def begin(self, key: Hashable, cell: int, now: float) -> None:
        """Begin a period; it replaces any open period of the session."""
        row = self._rows[key] if key in self._rows else self._free.pop()
        self._rows[key], self._keys[row] = row, key
        self._since[row], self._cells[row], self._open[row] = now, cell, True

    def end(self, key: Hashable) -> tuple[int, float] | None:
        """End a session's period; return (cell, time it began), or None if there is none."""
        row = self._rows.pop(key, None)
        if row is None:
            return None
        self._close(row)
        return int(self._cells[row]), float(self._since[row])

    def at_risk(self, start: float, end: float) -> Floats:
        """Return the seconds that the open periods spent in each age bin from ``start`` to ``end``, [CELLS, BINS]."""
        return self._between(np.flatnonzero(self._open), start, end)

    def thin(self, start: float, end: float) -> Floats:
        """Close every second period in the fullest octave of ages; return ``at_risk`` of the closed ones."""
        rows = np.flatnonzero(self._open)
        octaves = bins_of(np.maximum(end - self._since[rows], 0.0)) >> _BITS
        fullest = rows[octaves == np.bincount(octaves).argmax()]
        closed = fullest[np.argsort(self._since[fullest], kind="stable")][::2]
        for row in closed.tolist():
            del self._rows[self._keys[row]]
            self._close(row)
        return self._between(closed, start, end)

    def _close(self, row: int) -> None:
        self._open[row] = False
        self._free.append(row)

    def _between(self, rows: npt.NDArray[np.intp], start: float, end: float) -> Floats:
        return self._seconds(rows, end) - self._seconds(rows, start)

    def _seconds(self, rows: npt.NDArray[np.intp], now: float) -> Floats:
        ages = np.maximum(now - self._since[rows], 0.0)
        bins = bins_of(ages)
        flat = self._cells[rows] * BINS + bins
        count = np.bincount(flat, minlength=CELLS * BINS).reshape(CELLS, BINS)
        part = np.bincount(flat, ages - EDGES[bins], minlength=CELLS * BINS).reshape(CELLS, BINS)
        beyond = count[:, ::-1].cumsum(axis=1)[:, ::-1] - count
        return np.asarray(beyond * WIDTHS + part, dtype=np.float64)


class ReturnRates:
    """Hazards of a return by cell and age. Deterministic for a given history."""

    def __init__(self) -> None:
        self._idle = IdlePeriods(MOST_OPEN)
        self._returns = np.zeros((CELLS, BINS))
        self._at_risk = np.zeros((CELLS, BINS))
        """Seconds. Includes open periods up to ``_counted_to`` and closed ones as a whole."""
        self._counted_to = 0.0
        self.periods = 0

    def on_idle(self, key: Hashable, cell: int, now: float) -> None:
        if self._idle.full:
            self._at_risk += self._idle.thin(self._counted_to, now)
        self._idle.begin(key, cell, now)
        self.periods += 1
        if self.periods % _FADE_EVERY == 0:
            self._fade(now)

    def on_return(self, key: Hashable, now: float) -> None:
        """End a session's idle period. A period of no length was a suspension and does not count."""
        period = self._idle.end(key)
        if period is None or period[1] >= now:
            return
        cell, since = period
        self._returns[cell, self._count(cell, now - since, 1.0)] += 1
        if self._counted_to > since:
            self._count(cell, self._counted_to - since, -1.0)

    def hazards(self, now: float) -> Floats:
        """Return the returns per second of idle sessions, [CELLS, BINS]; all above zero."""
        returns, at_risk = self._returns, self._at_risk + self._idle.at_risk(self._counted_to, now)
        came, seconds = returns.sum(axis=0, keepdims=True), at_risk.sum(axis=0, keepdims=True)
        common = _corrected(PRIOR[None], came, seconds, _OCTAVE, POOL_K)
        common = _corrected(common, came, seconds, 1, POOL_K)
        hazards = _by_context_and_input(np.tile(common, (CELLS, 1)), returns, at_risk, BINS, CELL_K)
        hazards = _corrected(hazards, returns, at_risk, BINS, CELL_K)
        hazards = _by_context_and_input(hazards, returns, at_risk, 2 * _OCTAVE, AGE_K)
        return _corrected(hazards, returns, at_risk, _OCTAVE, AGE_K)

    def _count(self, cell: int, age: float, sign: float) -> int:
        """Add the time at risk up to an age, or subtract it; return the age's bin."""
        bin_ = min(bisect_right(_EDGES, age), BINS) - 1  # same as ``bins_of``, without arrays
        self._at_risk[cell, :bin_] += sign * WIDTHS[:bin_]
        self._at_risk[cell, bin_] += sign * (age - EDGES[bin_])
        return bin_

    def _fade(self, now: float) -> None:
        """Decay all counts, after adding the open periods' time at risk so far."""
        self._at_risk += self._idle.at_risk(self._counted_to, now)
        self._counted_to = now
        self._returns *= 0.5 ** (_FADE_EVERY / HALF_LIFE)
        self._at_risk *= 0.5 ** (_FADE_EVERY / HALF_LIFE)


def _grouped(counts: Floats, width: int) -> Floats:
    """Return sums over each ``width`` bins, [n, BINS / width]."""
    return np.asarray(counts.reshape(len(counts), -1, width).sum(axis=2), dtype=np.float64)


def _corrected(hazards: Floats, returns: Floats, at_risk: Floats, width: int, k: float) -> Floats:
    """Multiply hazards [n, BINS] by a factor per row and ``width`` bins: (returns + k) / (expected returns + k)."""
    factors = (_grouped(returns, width) + k) / (_grouped(at_risk * hazards, width) + k)
    return np.asarray(hazards * np.repeat(factors, width, axis=1), dtype=np.float64)


def _by_context_and_input(hazards: Floats, returns: Floats, at_risk: Floats, width: int, k: float) -> Floats:
    """``_corrected`` with a factor per context length times one per input, for each ``width`` bins, [CELLS, BINS]."""
    came = _grouped(returns, width).reshape(CONTEXTS, INPUTS, -1)
    expected = _grouped(at_risk * hazards, width).reshape(CONTEXTS, INPUTS, -1)
    new = np.ones((1, *came.shape[1:]))
    for _ in range(_SWEEPS):
        context = (came.sum(axis=1, keepdims=True) + k) / ((expected * new).sum(axis=1, keepdims=True) + k)
        new = (came.sum(axis=0, keepdims=True) + k) / ((expected * context).sum(axis=0, keepdims=True) + k)
    factors = (context * new).reshape(CELLS, -1)
    return np.asarray(hazards * np.repeat(factors, width, axis=1), dtype=np.float64)


# -- the Gittins index ---------------------------------------------------------------------------------------------

_TABLE: Final = LogBins(least_exponent=-10, octaves=30, bits=3)
"""Ages in the tables of factors, finer than the learned bins, so that interpolation leaves no steps."""
COLUMNS: Final = _TABLE.count
_COLUMN_EDGES: Final = _TABLE.edges()
YOUNGEST: Final = float(_COLUMN_EDGES[0])
OLDEST: Final = float(_COLUMN_EDGES[-1]) * (1 - 1e-9)
"""Least and greatest age in a table, in seconds: about a millisecond and twelve days."""


AGES: Final = np.diff(_COLUMN_EDGES) / np.log(_COLUMN_EDGES[1:] / _COLUMN_EDGES[:-1])
"""Middle of each column."""


def _interpolation() -> tuple[Ints, Floats]:
    """Return, for each column, the age bin whose middle precedes the column's, and the weight of the bin after it."""
    at = np.interp(np.log(AGES), -np.log(PRIOR), np.arange(BINS))
    before = np.minimum(at.astype(np.int64), BINS - 2)
    return before, at - before


_BEFORE, _SHARE = _interpolation()


def columns_of(ages: Floats) -> Ints:
    """Return the column of each age; ages lie within ``YOUNGEST`` and ``OLDEST``."""
    return _TABLE.bins_of(ages)


def column_of(age: float) -> int:
    return _TABLE.one(age)


def gittins_indices(hazards: Floats) -> Floats:
    """Return an idle session's Gittins index at the start of each age bin, returns per second, [n, BINS].

    It is the maximum of P(return by then) / E[seconds kept until the return or then] over the ends of later bins.
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
    """Return the Gittins index times T, [n, COLUMNS]: 1 for sessions that return at the rate ``1 / T``."""
    coarse = gittins_indices(hazards) / PRIOR
    return np.asarray(coarse[:, _BEFORE] * (1 - _SHARE) + coarse[:, _BEFORE + 1] * _SHARE, dtype=np.float64)


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
