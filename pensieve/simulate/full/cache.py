"""The engine's own cache with the policies of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pensieve.config import CacheConfig
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.chunk import Restore
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.sharing import Path
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.scenario import policies


@dataclass(frozen=True, slots=True)
class Coming:
    """What a simulation knows of a turn. Both functions are of the time of its end."""

    number: int
    """In its session, from 1."""
    due: Callable[[float], float]
    """When the turn after it comes."""
    hints: Callable[[float], Hints | None]
    """What its client says of that."""


class StampedCache(CacheManager):
    """``CacheManager`` whose policy may know more than the time of a release: see ``policies``."""

    def __init__(self, config: CacheConfig, cost: CostModel, policy: str) -> None:
        self.policy, self._stamp = policies.make(policy)
        super().__init__(config, cost, self.policy)
        self._coming: dict[SessionKey, Coming] = {}
        self._turns: dict[SessionKey, Coming] = {}
        self.restores: dict[SessionKey, Restore] = {}
        """How the turn of each session was first laid out, until that is taken."""

    def expect(self, key: SessionKey, turn: Coming) -> None:
        """The session's next turn."""
        self._coming[key] = turn

    def admit(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        now: float,
        path: Path | None = None,
        *,
        warm: bool = False,
        tenant: str = "",
    ) -> Restore:
        restore = super().admit(key, tokens, num_new, now, path, warm=warm, tenant=tenant)
        if key in self._coming:  # else a return from suspension
            self._turns[key] = self._coming.pop(key)
            self.restores[key] = restore
        return restore

    def release(
        self,
        key: SessionKey,
        now: float,
        tokens: TokenArray | None = None,
        *,
        forget: bool = False,
        hints: Hints | None = None,
    ) -> None:
        turn = self._turns[key]
        stamp = self._stamp(now, turn.due(now), turn.number)
        super().release(key, stamp, tokens, forget=forget, hints=turn.hints(now))
