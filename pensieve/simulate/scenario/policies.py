"""The policies that can be compared: those of the engine, and three that only a simulation needs.

``ttl-lru``      sessions idle for longer than ``TTL_S`` first, their cheapest chunks first; then plain LRU
``arc``          Adaptive Replacement Cache with sessions as its objects, evicted chunk by chunk
``clairvoyant``  V = Cost(l) / time until the session comes back: Belady's rule adapted to cost. It sees the future, so
                 nobody can run it; it says how much there is to gain. Greedy, so close to the optimum but not proven
                 to be one: ``RecomputeBound`` has the proven limit.

The engine's ``Policy`` is told of past turns and how long ago a session was last active. What these know beyond that
travels in the time that a session is released with (``stamp``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Final

import numpy as np

from pensieve.core import Floats, Ints
from pensieve.engine.cache.policy import POLICIES, SHORTEST_IDLE_S, Policy
from pensieve.engine.cost.model import CostModel

TTL_S: Final = 300.0
_NO_COST_S: Final = 1e-9
"""Less than any difference between costs."""
_FREQUENT: Final = 1e9
"""ARC: added to the stamp of a session that has come back; no simulation lasts so long."""

Stamp = Callable[[float, float, int], float]
"""(now, time of the next turn, turns so far) → the time to release a session with."""


class MaxClaimPolicy(Policy):
    """Of a chunk's several owners the one that keeps it longest counts: claims do not add up."""

    @abc.abstractmethod
    def claims(self, idle: Floats, kinds: Ints) -> Floats:
        """What each session alone would count for, cost aside."""

    def values_and_claims(
        self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints
    ) -> tuple[Floats, Floats]:
        return self.values(first_cost, candidates, idle, kinds), self.claims(idle, kinds)

    @property
    def adds_up(self) -> bool:
        return False


class TtlLru(MaxClaimPolicy):
    """Recency within the time to live; what has outlived it goes before, cheapest first, of equals the longest idle."""

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
    """``idle`` is minus the time until the next turn; of a turn that waits already, how long it does: the longest waits
    at the head of the queue."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        return first_cost * np.where(
            idle < 0, 1.0 / np.maximum(-idle, SHORTEST_IDLE_S), 1.0 / SHORTEST_IDLE_S + idle
        )


class Arc(MaxClaimPolicy):
    """T1: sessions with one turn, T2: those that came back. ``share`` is how much of what can be evicted T1 may be.

    A returning session that lost chunks is a hit in a ghost list: of T1 if it had had one turn, else of T2; ``share``
    moves towards that list by the part of its history that was lost. The ghosts are the sessions themselves, so their
    lists are as long as sessions live.
    """

    def __init__(self) -> None:
        self.share = 0.5
        self._prefer_recent = True

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats, kinds: Ints) -> Floats:
        frequent = idle < -_FREQUENT / 2
        if candidates.size > 1:  # a single row is one session ranked anew in the middle of a round
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
        """A session's turn number ``turn`` found its history with so many tokens lost."""
        if turn == 0 or not recomputed:
            return
        step = 0.05 * recomputed / history
        self.share = min(max(self.share + (step if turn == 1 else -step), 0.0), 1.0)


def _now(now: float, due: float, turns: int) -> float:
    return now


def _due(now: float, due: float, turns: int) -> float:
    return due


def _frequent(now: float, due: float, turns: int) -> float:
    return now + _FREQUENT if turns > 1 else now


EXTRA: Final[dict[str, tuple[Callable[[], Policy], Stamp]]] = {
    "ttl-lru": (TtlLru, _now),
    "arc": (Arc, _frequent),
    "clairvoyant": (Clairvoyant, _due),
}
NAMES: Final = (*POLICIES, *EXTRA)


def make_policy(name: str) -> tuple[Policy, Stamp]:
    """A fresh policy, and how to stamp what it releases. Raises KeyError."""
    if name in EXTRA:
        policy, stamp = EXTRA[name]
        return policy(), stamp
    engine = {str(key): value for key, value in POLICIES.items()}
    return engine[name](), _now


_PER_DECADE = 200
_LEAST_EXPONENT = -12


class RecomputeBound:
    """A limit that no policy can beat: how little has to be recomputed when space-time is all that is short.

    Keeping a chunk from one turn to the next saves its recomputation and takes one page of a tier for that time. Pages
    times the length of the run is all there is, so the least that must be given up is what a fractional knapsack leaves
    out, filled in order of seconds saved per page-second. Real policies must also fit at every single moment, may hold
    chunks twice, need pages for running turns and do not know the future: they stay above. Where sessions share chunks
    it is no bound: one page then serves them all.

    Idle periods are collected in bins of equal savings per page-second; partly filled chunks count as nothing.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._chunk_costs = cost.chunk_costs(256)
        bins = _PER_DECADE * 24
        self._saved = np.zeros(bins)
        self._page_seconds = np.zeros(bins)

    def add_idle_period(self, history: int, seconds: float) -> None:
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
