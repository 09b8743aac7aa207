"""Settings of the simulated servers: one frozen value that is pickled to worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pensieve.config import BATCH_LIMITS, CacheConfig
from pensieve.engine.cost import CostModel
from pensieve.simulate.scenario.machine import Machine

Routing = Literal["affine", "hash", "bounded", "random"]


LEASE_S: Final = 10.0
"""The default of `pensieve serve`."""
RING_POINTS: Final = 1600
Change = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class ClientHints:
    """The announcements of clients about their next turn; see ``scenario.load.hints_of``."""

    noise: float = 0.0
    """Sigma of the lognormal error of announced pauses."""
    pauses: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    machine: Machine
    cache: CacheConfig
    cost: CostModel
    context_limit: int
    max_batch_tokens: int = BATCH_LIMITS["cuda"][0]
    max_running: int = BATCH_LIMITS["cuda"][1]
    replicas: int = 1
    routing: Routing = "affine"
    lose_replica_at: float | None = None
    """Virtual time at which replica 0 fails and loses its cache and running turns."""
    replica_returns_at: float | None = None
    """Virtual time at which replica 0 returns, with an empty cache and untrained policy; None: never."""
    lease_s: float = LEASE_S
    """Seconds after which turns of the lost replica restart elsewhere: when their leases have lapsed."""
    ring_points: int = RING_POINTS
    """Points of each replica on the ring of ``hash`` and ``bounded``; HAProxy has 16 per unit of weight."""
    seed: int = 0
    hints: ClientHints | None = None
    slack: int = 0
    """See ``TurnCache``; only the ``turns`` engine uses it."""

    def replica_changes(self, lose: Change, bring_back: Change) -> list[tuple[float, Change]]:
        """The events of replica 0 in order, as (time, callback)."""
        events = ((self.lose_replica_at, lose), (self.replica_returns_at, bring_back))
        return [(at, change) for at, change in events if at is not None]
