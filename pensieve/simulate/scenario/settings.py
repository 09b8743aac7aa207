"""The settings of the simulated servers: one frozen value that crosses to worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pensieve.config import BATCH_LIMITS, CacheConfig
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.scenario.machine import Machine

Routing = Literal["affine", "random"]


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
    seed: int = 0
    hints: ClientHints | None = None
    """None: clients say nothing of their next turn."""
    slack: int = 0
    """See ``TurnCache``; only the ``turns`` engine has it."""

    def route(self, session: int, turn: int, *, lost: bool) -> int:
        """The replica of a turn: by session, or by a hash of session and turn. ``lost``: replica 0 takes none."""
        pick = session if self.routing == "affine" else _mix(session * 1_000_003 + turn * 7919 + self.seed)
        replica = pick % self.replicas
        return 1 + (pick // self.replicas) % (self.replicas - 1) if lost and replica == 0 else replica


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
