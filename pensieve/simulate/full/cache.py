"""The engine's own cache with the policies of a simulation."""

from __future__ import annotations

from collections.abc import Callable

from pensieve.config import CacheConfig
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import Restore
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.scenario import policies


class StampedCache(CacheManager):
    """``CacheManager`` whose policy may know more than the time of a release: see ``policies``."""

    def __init__(self, config: CacheConfig, cost: CostModel, policy: str) -> None:
        self.policy, self._stamp = policies.make(policy)
        super().__init__(config, cost, self.policy)
        self._coming: dict[SessionKey, tuple[int, Callable[[float], float]]] = {}
        self._turns: dict[SessionKey, tuple[int, Callable[[float], float]]] = {}
        self.restores: dict[SessionKey, Restore] = {}
        """How the turn of each session was first laid out, until that is taken."""

    def expect(self, key: SessionKey, turns: int, due: Callable[[float], float]) -> None:
        """The next turn is number ``turns`` of its session (from 1); ``due``: end of it → the one after."""
        self._coming[key] = turns, due

    def admit(self, key: SessionKey, tokens: TokenArray, num_new: int, now: float) -> Restore:
        restore = super().admit(key, tokens, num_new, now)
        if key in self._coming:  # else a return from suspension
            self._turns[key] = self._coming.pop(key)
            self.restores[key] = restore
        return restore

    def release(
        self, key: SessionKey, now: float, tokens: TokenArray | None = None, *, forget: bool = False
    ) -> None:
        turns, due = self._turns[key]
        super().release(key, self._stamp(now, due(now), turns), tokens, forget=forget)
