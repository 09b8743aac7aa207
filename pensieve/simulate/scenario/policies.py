"""The policies that can be compared: those of the engine, and three that exist only in simulation.

``ttl-lru``      sessions idle for longer than ``TTL_S`` first, their cheapest chunks first; then plain LRU
``arc``          Adaptive Replacement Cache with sessions as its objects, evicted chunk by chunk
``clairvoyant``  V = Cost(l) / time until the session returns: Belady's rule adapted to cost. It sees the future, so no
                 server can run it; it shows how much there is to gain. It is greedy: close to the optimum, but not
                 proven to reach it. ``RecomputeBound`` has the proven limit.

The engine's ``Policy`` knows past turns and how long a session has been idle. These policies know more, and
receive it through the time with which a session is released (``stamp``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Final

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cache.policy import POLICIES, SHORTEST_IDLE_S, Policy
from pensieve.engine.cost import CostModel

TTL_S: Final = 300.0
_NO_COST_S: Final = 1e-9
"""Smaller than any difference between costs."""
_FREQUENT: Final = 1e9
"""ARC: added to the stamp of a session that has returned. No simulation lasts that long."""

Stamp = Callable[[float, float, int], float]
"""(now, time of the next turn, turns so far) → the time with which to release a session."""


class MaxClaimPolicy(Policy):
    """A policy that values a shared chunk by the largest claim of its owners instead of their sum."""

    @abc.abstractmethod
    def claims(self, idle: Floats, kinds: Ints) -> Floats:
        """Claim of each session by itself, without costs."""

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        return self.values(first_cost, candidates, idle, kinds), self.claims(idle, kinds)

    @property
    def adds_up(self) -> bool:
        return False


class TtlLru(MaxClaimPolicy):
    """LRU within the time to live. Expired sessions go first: cheapest chunk first, then the longest idle."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        recency = 1.0 / np.maximum(idle, SHORTEST_IDLE_S)
        finite = np.where(np.isfinite(first_cost), first_cost, 0.0)
        return np.where(idle > TTL_S, finite / (1.0 + finite) + _NO_COST_S * recency, 1.0 + recency)

    def claims(self, idle: Floats, kinds: Ints) -> Floats:
        return self.values(np.zeros_like(idle), np.ones_like(idle), idle, kinds)

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        finite = np.where(np.isfinite(first_cost), first_cost, 0.0)
        return np.where(claims < 1.0, finite / (1.0 + finite) + claims, claims)


class Clairvoyant(Policy):
    """``idle`` is minus the time until the next turn; of a waiting turn, its waiting time: the longest is next."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return first_cost * np.where(
            idle < 0, 1.0 / np.maximum(-idle, SHORTEST_IDLE_S), 1.0 / SHORTEST_IDLE_S + idle
        )


class Arc(MaxClaimPolicy):
    """T1: sessions with one turn; T2: sessions that returned. ``share`` is T1's share of evictable chunks.

    A returning session that lost chunks is a hit in a ghost list: of T1 if it had one turn, else of T2.
    ``share`` moves towards that list in proportion to the lost part of its history. The ghosts are the
    sessions themselves.
    """

    def __init__(self) -> None:
        self.share = 0.5
        self._prefer_recent = True

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        frequent = idle < -_FREQUENT / 2
        if candidates.size > 1:  # a single row is one session that is ranked again during a round
            total = float(candidates.sum())
            recent = float(candidates[~frequent].sum())
            self._prefer_recent = recent > self.share * total
        return self.claims(idle, kinds)

    def claims(self, idle: Floats, kinds: Ints) -> Floats:
        frequent = idle < -_FREQUENT / 2
        age = np.where(frequent, idle + _FREQUENT, idle)
        first = ~frequent if self._prefer_recent else frequent
        return np.where(first, 0.0, 1e6) + 1.0 / np.maximum(age, SHORTEST_IDLE_S)

    def shared_values(self, first_cost: Floats, candidates: Floats, claims: Floats) -> Floats:
        return claims

    def on_history_lost(self, turn: int, history: int, recomputed: int) -> None:
        """Adapt ``share``: turn number ``turn`` of a session had to recompute ``recomputed`` tokens of its history."""
        if turn == 0 or not recomputed:
            return
        step = 0.05 * recomputed / history
        self.share = min(max(self.share + (step if turn == 1 else -step), 0.0), 1.0)


EXTRA_POLICIES: Final[dict[str, tuple[Callable[[], Policy], Stamp]]] = {
    "ttl-lru": (TtlLru, lambda now, due, turns: now),
    "arc": (Arc, lambda now, due, turns: now + _FREQUENT if turns > 1 else now),
    "clairvoyant": (Clairvoyant, lambda now, due, turns: due),
}
NAMES: Final = (*POLICIES, *EXTRA_POLICIES)


def make_policy(name: str) -> tuple[Policy, Stamp]:
    """Return a new policy and its stamp function. Raises KeyError."""
    if name in EXTRA_POLICIES:
        policy, stamp = EXTRA_POLICIES[name]
        return policy(), stamp
    engine = {str(key): value for key, value in POLICIES.items()}
    return engine[name](), lambda now, due, turns: now


_PER_DECADE = 200
_MIN_EXPONENT = -12


class RecomputeBound:
    """A lower bound on recomputation that no policy can beat; only space-time is limited.

    Keeping a chunk from one turn to the next saves its recomputation and takes one page of a tier for that
    time. The supply is pages times the length of the run. The bound is the remainder of a fractional
    knapsack, filled in order of seconds saved per page-second. Real policies stay above it: they must fit at
    every moment, may hold chunks twice, need pages for running turns and do not know the future. It is no
    bound where sessions share chunks.

    Idle periods are collected in bins of equal savings per page-second. Partly filled chunks are ignored.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._chunk_costs = cost.chunk_costs(256)
        bins = _PER_DECADE * 24
        self._saved = np.zeros(bins)
        self._page_seconds = np.zeros(bins)

    def add_idle_period(self, history: int, seconds: float) -> None:
        """Add an idle period: a session returned to ``history`` tokens after ``seconds``."""
        chunks = history // self._cost.chunk_tokens
        if chunks > self._chunk_costs.size:
            self._chunk_costs = self._cost.chunk_costs(2 * chunks)
        costs = self._chunk_costs[:chunks]
        seconds = max(seconds, 1e-6)
        bins = self._bins(costs / seconds)
        np.add.at(self._saved, bins, costs)
        np.add.at(self._page_seconds, bins, seconds)

    def least_recomputed(self, pages: int, seconds: float) -> float:
        """Least seconds of recomputation with ``pages`` pages, in all tiers together, for ``seconds``."""
        remaining, kept = pages * seconds, 0.0
        for saved, taken in zip(self._saved[::-1].tolist(), self._page_seconds[::-1].tolist(), strict=True):
            if taken > remaining:
                # The order within a bin is unknown: count what fits at the savings of its upper edge.
                kept += min(saved, saved * remaining / taken * 10 ** (1 / _PER_DECADE))
                break
            kept += saved
            remaining -= taken
        return max(float(self._saved.sum()) - kept, 0.0)

    @staticmethod
    def _bins(density: Floats) -> Ints:
        exponents = (np.log10(density) - _MIN_EXPONENT) * _PER_DECADE
        return np.clip(exponents.astype(np.int64), 0, _PER_DECADE * 24 - 1)
