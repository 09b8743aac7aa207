"""Eviction policies: which session gives way first, and which of its chunks. Pure; lowest value goes first.

``retention``      V = Cost(l) / T                          EuroSys §4.3.1 (the default)
``lru``            V = 1 / T, leading chunk first           least recently active session
``trailing-half``  V = 1 / (tokens cached × T), half a session's candidates at a time, the trailing ones
                                                            first draft, arXiv 2312.05516v1 §4.3
``whole-session``  V = 1 / T, all candidates at once        the coarse granularity that §3.2 argues against

T is the time since the session was last active. A policy answers for many sessions at once so that one eviction round
stays cheap with 100,000 of them: with ``retention`` and ``lru`` only a session's first candidate can be the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pensieve.config import PolicyName

Floats = npt.NDArray[np.float64]

SHORTEST_IDLE_S = 1e-3
"""T never gets smaller: the value of a session that is active right now stays finite, so costs still order it."""


class Policy(Protocol):
    """One eviction policy."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats) -> Floats:
        """Retention value of each session's next victim.

        first_cost: Cost of its first candidate chunk; candidates: how many chunks it could give; idle: T in seconds.
        """
        ...

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        """Which of a session's candidate chunks (ascending indices) go together with the next victim."""
        ...


class Retention:
    """The paper's: cheap to recompute and long idle goes first."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats) -> Floats:
        return first_cost / np.maximum(idle, SHORTEST_IDLE_S)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates[:1]


class LeastRecentlyUsed:
    """Recency only, chunk by chunk from the front."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats) -> Floats:
        return 1.0 / np.maximum(idle, SHORTEST_IDLE_S)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates[:1]


class TrailingHalf:
    """The draft's: large and long idle goes first, its trailing half at a time."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats) -> Floats:
        return 1.0 / (np.maximum(candidates, 1.0) * np.maximum(idle, SHORTEST_IDLE_S))

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates[len(candidates) // 2 :]


class WholeSession:
    """Recency only, a session at a time."""

    def values(self, first_cost: Floats, candidates: Floats, idle: Floats) -> Floats:
        return 1.0 / np.maximum(idle, SHORTEST_IDLE_S)

    def group(self, candidates: Sequence[int]) -> Sequence[int]:
        return candidates


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "retention": Retention,
    "lru": LeastRecentlyUsed,
    "trailing-half": TrailingHalf,
    "whole-session": WholeSession,
}
