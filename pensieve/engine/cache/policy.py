"""Eviction policies: which session's chunks are evicted first, and which of them. Pure; the lowest value goes first.

``gittins``        V = Cost(l) × G(T), the rate at which sessions like this one come back, learned while serving
``retention``      V = Cost(l) / T                          EuroSys §4.3.1
``lru``            V = 1 / T, leading chunk first           least recently active session
``trailing-half``  V = 1 / (tokens cached × T), half a session's candidates at a time, the trailing ones
                                                            first draft, arXiv 2312.05516v1 §4.3
``whole-session``  V = 1 / T, all candidates at once        the coarse granularity that §3.2 argues against

T is the time since the session was last active. For a shared chunk, 1 / T or G(T) is the sum over its owners,
since each of them may return for it. Policies that use recency alone take the maximum. ``gittins`` and
``retention`` use clients' hints: see ``engine.cache.rates``.

A policy evaluates many sessions at once, so that one eviction round stays cheap with 100,000 of them. Except
with ``trailing-half`` and ``whole-session``, only a session's first candidate can be the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Protocol

import numpy as np

from pensieve.config import PolicyName
from pensieve.core import Floats, Ints
from pensieve.engine.cache.rates import (
    CELLS,
    COLUMNS,
    OLDEST,
    YOUNGEST,
    ReturnRates,
    cell_of,
    column_of,
    columns_of,
    factors,
)

SHORTEST_IDLE_S = 1e-3
"""Lower bound of T, so that the value of a session that is active right now stays finite and costs still order it."""
UNKNOWN: Final = 0
"""Kind of a session that the policy knows nothing about."""
_FIRST_UPDATE: Final = 64
_MAX_UPDATE_INTERVAL: Final = 1024
"""Idle periods between two updates of ``Gittins``' factors: at first, and at most."""


class Policy(Protocol):
    """An eviction policy. The defaults ignore history and evict one chunk at a time."""

    def on_turn_end(self, key: Hashable, new_tokens: int, context_tokens: int, now: float) -> int:
        """Record the end of a session's turn with this much new input and this context.

        Returns the session's *kind*, which is passed back to ``values``. Only the policy itself interprets kinds.
        """
        return UNKNOWN

    def on_return(self, key: Hashable, now: float) -> None:
        """Record that a session starts its next turn, or resumes one suspended at ``now``."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        """Return the retention value of each session's next victim.

        first_cost: cost of its first candidate chunk; candidates: number of its candidate chunks; idle: T in seconds.
        """
        ...

    def value(self, first_cost: float, candidates: int, idle: float, kind: int) -> float:
        """Return ``values`` of one session, the same bits. A policy that ranks many victims overrides this: arrays of
        one element take numpy several microseconds."""
        one = np.array([kind], np.int64)
        return float(
            self.values(np.array([first_cost]), np.array([float(candidates)]), np.array([idle]), one)[0]
        )

    @property
    def uses_hints(self) -> bool:
        """Whether values are Cost × rate of return, as ``rates.apply_hints`` needs; else hints are ignored."""
        return False

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        """Return ``values``, and each session's claim: what it adds to the value of a chunk that it shares."""
        one = np.ones_like(idle)
        return self.values(first_cost, candidates, idle, kinds), self.values(one, one, idle, kinds)

    @property
    def adds_up(self) -> bool:
        """Whether the claims of a chunk's owners are summed; else the largest counts."""
        return True

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        """Return the values of shared chunks, given the combined claims of their owners."""
        return first_cost * claims

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        """Return the slice of ``candidates``, ascending chunk indices, that is evicted with the next victim."""
        return candidates[:1]


class _Recency(Policy):
    """Base of the policies that ignore costs."""

    @property
    def adds_up(self) -> bool:
        return False

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        return claims


class _Rated(Policy):
    """Base of the policies whose values are Cost × rate of return."""

    @property
    def uses_hints(self) -> bool:
        return True


class Retention(_Rated):
    """The paper's policy: chunks that are cheap to recompute and long idle go first."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return first_cost / np.maximum(idle, SHORTEST_IDLE_S)

    def value(self, first_cost: float, candidates: int, idle: float, kind: int) -> float:
        return first_cost / max(idle, SHORTEST_IDLE_S)

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        idle = np.maximum(idle, SHORTEST_IDLE_S)
        return (
            first_cost / idle,
            1.0 / idle,
        )  # bit-identical to ``values``: the two are compared


class Gittins(_Rated):
    """Keeps chunks that are likely to be needed soon, weighed by their cost of recomputation.

    V = Cost(l) / T × a factor by kind of session and by T: see ``engine.cache.rates``. All factors
    are 1 until something was learned, which makes this ``retention``. Each server starts with nothing
    learned. Computing the factors takes 2 ms. It happens after every 64 idle periods at first, later when
    their number has grown by an eighth, and at least every 1024.
    """

    def __init__(self) -> None:
        self._rates = ReturnRates()
        self._factors = np.ones((1 + CELLS, COLUMNS))
        """One row per kind of session; row 0 is for ``UNKNOWN``."""
        self._update_at = _FIRST_UPDATE

    def on_turn_end(self, key: Hashable, new_tokens: int, context_tokens: int, now: float) -> int:
        cell = cell_of(new_tokens, context_tokens)
        self._rates.on_idle(key, cell, now)
        periods = self._rates.periods
        if periods >= self._update_at:
            self._update_at = periods + min(max(periods // 8, _FIRST_UPDATE), _MAX_UPDATE_INTERVAL)
            self._factors[1:] = factors(self._rates.hazards(now))
        return (1 + cell) * COLUMNS

    def on_return(self, key: Hashable, now: float) -> None:
        self._rates.on_return(key, now)

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        values = self._rates_of(idle, kinds)
        values *= first_cost
        return values

    def value(self, first_cost: float, candidates: int, idle: float, kind: int) -> float:
        age = min(max(idle, YOUNGEST), OLDEST)
        return self._factors.item(kind + column_of(age)) / age * first_cost

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        rates = self._rates_of(idle, kinds)
        return rates * first_cost, rates

    def _rates_of(self, idle: Floats, kinds: Ints) -> Floats:
        ages = np.maximum(idle, YOUNGEST)
        np.minimum(ages, OLDEST, out=ages)
        at = columns_of(ages)
        at += kinds
        rates = self._factors.take(at)
        rates /= ages
        return rates


class LeastRecentlyUsed(_Recency):
    """Recency only, chunk by chunk from the front."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return 1.0 / np.maximum(idle, SHORTEST_IDLE_S)


class TrailingHalf(_Recency):
    """The first draft's policy: large and long idle sessions go first, their trailing half at a time."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return 1.0 / (np.maximum(candidates, 1.0) * np.maximum(idle, SHORTEST_IDLE_S))

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        return claims / np.maximum(candidates, 1.0)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates[len(candidates) // 2 :]


class WholeSession(_Recency):
    """Recency only, a whole session at a time."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return 1.0 / np.maximum(idle, SHORTEST_IDLE_S)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "gittins": Gittins,
    "retention": Retention,
    "lru": LeastRecentlyUsed,
    "trailing-half": TrailingHalf,
    "whole-session": WholeSession,
}
