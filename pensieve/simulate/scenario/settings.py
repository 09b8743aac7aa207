"""The settings of the simulated servers: one frozen value that crosses to worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pensieve.config import BATCH_LIMITS, CacheConfig
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.scenario.machine import Machine

Routing = Literal["affine", "hash", "bounded", "random"]
"""See ``scenario.routing``."""


LEASE_S: Final = 10.0
"""As of `pensieve serve`."""
RING_POINTS: Final = 1600
Change = Callable[[float], None]
"""Told of the virtual time."""


@dataclass(frozen=True, slots=True)
class ClientHints:
    """What clients say of their next turn: see ``scenario.hints``."""

    noise: float = 0.0
    """Sigma of the lognormal error of the pauses."""
    pauses: bool = True
    """They say when the next turn comes."""
    ends: bool = True
    """They say which turn is the last."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of each replica, and how turns are spread over them. All replicas are the same."""

    machine: Machine
    cache: CacheConfig
    cost: CostModel
    context_limit: int
    max_batch_tokens: int = BATCH_LIMITS["cuda"][0]
    max_running: int = BATCH_LIMITS["cuda"][1]
    replicas: int = 1
    routing: Routing = "affine"
    lose_replica_at: float | None = None
    """Virtual seconds after which replica 0 is gone, with its cache and its running turns."""
    replica_returns_at: float | None = None
    """Virtual seconds after which it is there again, with nothing cached and nothing learned; None: never."""
    lease_s: float = LEASE_S
    """A turn that was under way at the lost replica begins again elsewhere so long after: when its lease has lapsed."""
    ring_points: int = RING_POINTS
    """Points of each replica on the ring of ``hash`` and ``bounded``: 16 times a server's weight in HAProxy."""
    seed: int = 0
    hints: ClientHints | None = None
    """None: clients say nothing of their next turn."""
    slack: int = 0
    """See ``TurnCache``; only the ``turns`` engine has it."""

    def replica_changes(self, lose: Change, bring_back: Change) -> list[tuple[float, Change]]:
        """What happens to the replicas, in order: (when, what to call then)."""
        told = ((self.lose_replica_at, lose), (self.replica_returns_at, bring_back))
        return [(at, change) for at, change in told if at is not None]
