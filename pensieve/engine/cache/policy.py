"""Eviction policies: which session gives way first, and which of its chunks. Pure; lowest value goes first.

``gittins``        V = Cost(l) × G(T), the rate at which sessions like this one come back, learned while serving
``retention``      V = Cost(l) / T                          EuroSys §4.3.1
``lru``            V = 1 / T, leading chunk first           least recently active session
``trailing-half``  V = 1 / (tokens cached × T), half a session's candidates at a time, the trailing ones
                                                            first draft, arXiv 2312.05516v1 §4.3
``whole-session``  V = 1 / T, all candidates at once        the coarse granularity that §3.2 argues against

T is the time since the session was last active. Of a chunk that several sessions own, what stands for 1 / T or G(T) is
the sum over its owners, as each of them may come back for it; where only recency counts, it is that of the latest.
The first two hear what clients say of their next turn: ``engine.cache.rates.hints`` says what becomes of a value then.

A policy answers for many sessions at once so that one eviction round
stays cheap with 100,000 of them: with all but ``trailing-half`` and ``whole-session`` only a session's first candidate
can be the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Protocol

import numpy as np

from pensieve.config import PolicyName
from pensieve.core import Floats, Ints
from pensieve.engine.cache.rates.returns import (
    CELLS,
    COLUMNS,
    OLDEST,
    YOUNGEST,
    ReturnRates,
    cell_of,
    columns_of,
    factors,
)

SHORTEST_IDLE_S = 1e-3
"""T never gets smaller: the value of a session that is active right now stays finite, so costs still order it."""
UNKNOWN: Final = 0
"""Kind of a session that its policy was told nothing of."""
_FIRST_LESSON: Final = 64
_LESSONS_APART: Final = 1024
"""Idle periods between two times that ``Gittins`` learns: at first, and at most."""


class Policy(Protocol):
    """One eviction policy. Most do not care for the history, and rank one chunk at a time."""

    def on_turn_end(self, key: Hashable, new_tokens: int, context_tokens: int, now: float) -> int:
        """A session's turn has ended: it had so many new tokens and leaves such a context.

        Returns the session's *kind*, which ``values`` gets back. Kinds mean something to their policy only.
        """
        return UNKNOWN

    def on_return(self, key: Hashable, now: float) -> None:
        """A session has its next turn; or it goes on, where it ``left`` in the same moment."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        """Retention value of each session's next victim.

        first_cost: Cost of its first candidate chunk; candidates: how many chunks it could give; idle: T in seconds.
        """
        ...

    @property
    def uses_hints(self) -> bool:
        """Whether values are Cost × rate of return, which ``rates.hints`` can adjust; else hints are ignored."""
        return False

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        """``values``, and what each session alone would count for in the value of a chunk that it owns with others."""
        one = np.ones_like(idle)
        return self.values(first_cost, candidates, idle, kinds), self.values(one, one, idle, kinds)

    @property
    def adds_up(self) -> bool:
        """Whether the claims of a chunk's owners add up; else the largest counts."""
        return True

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        """``values`` of chunks with several owners, from what their claims come to."""
        return first_cost * claims

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        """Which of a session's candidate chunks (ascending indices) go together with the next victim: a slice."""
        return candidates[:1]


class _Recency(Policy):
    """What the policies that do not know costs have in common."""

    @property
    def adds_up(self) -> bool:
        return False

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        return claims


class _Rated(Policy):
    """What the policies have in common whose values are Cost × rate of return."""

    @property
    def uses_hints(self) -> bool:
        return True


class Retention(_Rated):
    """The paper's: cheap to recompute and long idle goes first."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return first_cost / np.maximum(idle, SHORTEST_IDLE_S)

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        idle = np.maximum(idle, SHORTEST_IDLE_S)
        return (
            first_cost / idle,
            1.0 / idle,
        )  # values to the last bit as above: they are compared with each other


class Gittins(_Rated):
    """Chunks stay that are likely to be needed soon, weighed by what they cost to recompute.

    See ``engine.cache.rates.returns``.
    V = Cost(l) / T × a factor by kind of session and by T. All factors are 1 until something was learned, which makes
    this ``retention``. Each start of the server begins with nothing learned. The factors are computed anew, which takes
    2 ms, after every 64 idle periods, and later when an eighth as many have come as there were, at least every 1024.
    """

    def __init__(self) -> None:
        self._rates = ReturnRates()
        self._factors = np.ones((1 + CELLS, COLUMNS))
        """A row for each kind of session; row 0 is that of ``UNKNOWN``."""
        self._learn_at = _FIRST_LESSON

    def on_turn_end(self, key: Hashable, new_tokens: int, context_tokens: int, now: float) -> int:
        cell = cell_of(new_tokens, context_tokens)
        self._rates.on_idle(key, cell, now)
        periods = self._rates.periods
        if periods >= self._learn_at:
            self._learn_at = periods + min(max(periods // 8, _FIRST_LESSON), _LESSONS_APART)
            self._factors[1:] = factors(self._rates.hazards(now))
        return (1 + cell) * COLUMNS

    def on_return(self, key: Hashable, now: float) -> None:
        self._rates.on_return(key, now)

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        values = self._rates_of(idle, kinds)
        values *= first_cost
        return values

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        rates = self._rates_of(idle, kinds)
        return rates * first_cost, rates

    def _rates_of(self, idle: Floats, kinds: Ints) -> Floats:
        ages = np.minimum(np.maximum(idle, YOUNGEST), OLDEST)  # np.clip is slow for single sessions
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
    """The draft's: large and long idle goes first, its trailing half at a time."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return 1.0 / (np.maximum(candidates, 1.0) * np.maximum(idle, SHORTEST_IDLE_S))

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        return claims / np.maximum(candidates, 1.0)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates[len(candidates) // 2 :]


class WholeSession(_Recency):
    """Recency only, a session at a time."""

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
