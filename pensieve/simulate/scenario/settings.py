"""Settings of the simulated servers, one frozen value that is pickled to worker processes; and the router before them.

``affine``   by session number, as evenly as possible: an ideally fair hash
``hash``     by a consistent hash of the session: each replica has many points on a ring, and a session belongs to the
             next point after its own (HAProxy ``hash-type consistent``, Envoy ``RING_HASH``)
``bounded``  the same, but replicas with more than their share of active turns are skipped (Mirrokni, Thorup,
             Zadimoghaddam: Consistent Hashing with Bounded Loads, 2016; HAProxy ``hash-balance-factor 125``)
``random``   each turn to a random replica
"""

from __future__ import annotations

import math
from bisect import bisect
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


_LOAD_FACTOR: Final = 1.25
"""``bounded``: maximum active turns of a replica, as a multiple of the mean."""
_STEP: Final = 1_000_003
_POINT_STEP: Final = 0x9E3779B97F4A7C15
"""Odd constants that spread consecutive numbers over more than the last bits of the hash input."""


class Router:
    """Routes the turns of one simulation. ``load`` returns a replica's active turns; only ``bounded`` calls it."""

    def __init__(self, settings: Settings, load: Callable[[int], int]) -> None:
        self._settings = settings
        self._load = load
        self._points: list[int] = []
        self._owners: list[int] = []
        if settings.routing in ("hash", "bounded"):
            ring = sorted(
                (_mix(replica * _POINT_STEP + point * _STEP + settings.seed + 1), replica)
                for replica in range(settings.replicas)
                for point in range(settings.ring_points)
            )
            self._points, self._owners = [point for point, _ in ring], [owner for _, owner in ring]

    @property
    def independent(self) -> bool:
        """Whether the replicas are independent: the state of one never changes the routing to another."""
        return self._settings.routing in ("affine", "hash")

    def route(self, session: int, turn: int, *, lost: bool) -> int:
        """Return the replica of a turn that arrives now. ``lost``: replica 0 takes no turns."""
        settings = self._settings
        if self._points:
            return self._on_ring(session, lost=lost)
        affine = settings.routing == "affine"
        pick = session if affine else _mix(session * _STEP + turn * 7919 + settings.seed)
        replica = pick % settings.replicas
        if lost and replica == 0:
            return 1 + (pick // settings.replicas) % (settings.replicas - 1)
        return replica

    def _on_ring(self, session: int, *, lost: bool) -> int:
        first = bisect(self._points, _mix(session * _STEP + self._settings.seed))
        limit = self._turn_limit(lost=lost) if self._settings.routing == "bounded" else None
        skipped: set[int] = set()
        for place in range(first, first + len(self._owners)):
            owner = self._owners[place % len(self._owners)]
            if owner in skipped or (lost and owner == 0):
                continue
            if limit is None or self._load(owner) < limit:
                return owner
            skipped.add(owner)
        raise AssertionError("one replica has at most the mean load")

    def _turn_limit(self, *, lost: bool) -> int:
        """Maximum active turns of a replica, including the arriving one; rounded twice, as in HAProxy."""
        live = range(int(lost), self._settings.replicas)
        return math.ceil(math.ceil(_LOAD_FACTOR * (1 + sum(map(self._load, live)))) / len(live))


def _mix(value: int) -> int:
    """64-bit hash: the finalizer of splitmix64."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
