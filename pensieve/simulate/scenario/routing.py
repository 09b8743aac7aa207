"""Which replica takes a turn: what a router in front of several servers does.

``affine``   by session, as evenly as it can be: what a hash would give that is fair to the last session
``hash``     by a consistent hash of the session: each replica has many points on a ring, a session belongs to the next
             one after its own (HAProxy ``hash-type consistent``, Envoy ``RING_HASH``)
``bounded``  the same, but a replica with more than its share of the turns under way is passed over (Mirrokni, Thorup,
             Zadimoghaddam: Consistent Hashing with Bounded Loads, 2016; HAProxy ``hash-balance-factor 125``)
``random``   each turn to any
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from typing import Final

from pensieve.simulate.scenario.settings import Settings

_SHARE: Final = 1.25
"""``bounded``: a replica may have so many times the mean number of turns under way."""
_STEP: Final = 1_000_003
_POINT_STEP: Final = 0x9E3779B97F4A7C15
"""Odd constants: what is hashed differs in more than its last bits."""


class Router:
    """Routes the turns of one simulation. ``load``: turns under way at a replica; only ``bounded`` asks."""

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
    def apart(self) -> bool:
        """Whether what one replica does can never change what another one gets."""
        return self._settings.routing in ("affine", "hash")

    def route(self, session: int, turn: int, *, lost: bool) -> int:
        """The replica of a turn that comes now. ``lost``: replica 0 takes none."""
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
        most = self._most(lost=lost) if self._settings.routing == "bounded" else None
        passed: set[int] = set()
        for place in range(first, first + len(self._owners)):
            owner = self._owners[place % len(self._owners)]
            if owner in passed or (lost and owner == 0):
                continue
            if most is None or self._load(owner) < most:
                return owner
            passed.add(owner)
        raise AssertionError("somebody has no more than the mean")

    def _most(self, *, lost: bool) -> int:
        """How many turns a replica may have, counting the one that comes; both roundings are HAProxy's."""
        live = range(int(lost), self._settings.replicas)
        return math.ceil(math.ceil(_SHARE * (1 + sum(map(self._load, live)))) / len(live))


def _mix(value: int) -> int:
    """A hash of 64 bits: the end of splitmix64."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
