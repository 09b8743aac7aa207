"""The size of an elastic device tier: how much memory it should hold now, and why. No torch.

Three things set the size, in bytes over all ranks for people and of one rank inside:

* the operator, with ``SetMemory``. The tier follows to that size at once, and it stays the upper bound until the next
  command. At first it is the ceiling;
* load: while turns run, the tier grows before chunks would be evicted, if memory is free;
* neighbours: when less than ``slack`` bytes are free, the tier shrinks until twice that is free. It grows only while
  more than twice that is free, so the two do not chase each other. And after ``idle_release_s`` seconds without a
  turn, it shrinks to its floor.

``ElasticTier`` is the only writer of the wanted size, and the tier's ``Resizer`` follows it plan by plan. When memory
cannot be allocated, the tier goes on with what it has. It tries again after ``RETRY_S``, with half as much at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.resizing import Ends
from pensieve.engine.cache.tiers import Pages

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""Pause after memory could not be allocated."""
MEASURE_S: Final = 0.5
"""Free memory is measured this often. It is old once the tier has given memory back."""
GROWTH_SHARE: Final = 16
"""One plan grows the tier by at most this part of its ceiling."""
HEADROOM_SHARE: Final = 32
"""While turns run, the tier grows when less than this part of its size is free: one step needs no more."""
ONE_SIZE: Final = (
    "the device tier has one size: start the server with --device-cache FLOOR..CEILING to change it"
)


@dataclass(frozen=True, slots=True)
class Need:
    """Needs that the plan being made leaves unserved."""

    active: bool
    """Whether any turn runs or waits."""
    pages: Pages = (0, 0)
    """Pages of each group that the next waiting request needs pinned, besides those that are."""
    num_bytes: int = 0
    """Bytes of the pages that it needs on the device, besides those that it has there."""


class ElasticTier:
    """Decides the size of an elastic device tier. The engine's thread owns it."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        ranks: int = 1,
        slack_bytes: int = 0,
        idle_release_s: float = 0.0,
        free_memory: Callable[[], int] | None = None,
    ) -> None:
        """``slack_bytes``, and what ``free_memory`` returns: bytes of one rank's device."""
        config, resizer = cache.config, cache.resizer
        if config.device_floor_bytes is None or config.device_bytes is None or resizer is None:
            raise ValueError("the cache's device tier has one size")
        self._resizer, self._ranks = resizer, ranks
        self._floor, self._ceiling = config.device_floor_bytes, config.device_bytes
        self._slack = slack_bytes if free_memory is not None else 0
        self._idle_release = idle_release_s
        self._free_memory = free_memory
        self._free: int | None = None
        """Free bytes of the device when last measured; None: not known yet."""
        self._measured_at = -math.inf
        self._wanted_total = self._ceiling * ranks
        self._wanted = self._ceiling
        """The operator's upper bound."""
        self._target = self._floor
        """The size that the tier is to have now."""
        self._most_growth = max(self._ceiling // GROWTH_SHARE, resizer.unit_bytes)
        """Bytes by which the next growth may grow the tier."""
        self._retry_at = -math.inf
        self._last_turn: float | None = None

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes that memory backs now, over all ranks; also in the next three."""
        return self._resizer.held * self._ranks

    @property
    def wanted(self) -> int:
        return self._wanted_total

    @property
    def floor(self) -> int:
        return self._floor * self._ranks

    @property
    def ceiling(self) -> int:
        return self._ceiling * self._ranks

    def is_due(self, now: float) -> bool:
        """Whether a plan would change the tier's size, although no request runs."""
        self._observe(now)
        size = self._resizer.size
        return size > self._target or (size < self._target and self._possible_growth(now) > 0)

    def defers(self, num_bytes: int, now: float) -> bool:
        """Whether a request that needs this much of the device should wait, because the tier grows first."""
        if num_bytes <= self._resizer.free_bytes or self._resizer.size > self._target:
            return False
        return self._resizer.is_waiting or self._possible_growth(now) > 0

    def is_settled(self, now: float) -> bool:
        """Whether the tier neither shrinks nor could grow. Otherwise no chunk need be copied out ahead of time."""
        return self._resizer.size <= self._target and self._possible_growth(now) == 0

    # -- changes -----------------------------------------------------------------------------------------------------

    def set_wanted(self, wanted: int, now: float) -> str:
        """Set the size that the operator wants, in bytes over all ranks; return why it is refused, or ""."""
        if wanted < self.floor:
            return f"{_size(wanted)} is less than the floor of the device tier, {_size(self.floor)}"
        if wanted > self.ceiling:
            return f"{_size(wanted)} is more than the ceiling of the device tier, {_size(self.ceiling)}"
        self._wanted_total, self._wanted = wanted, wanted // self._ranks
        self._target = self._wanted
        self._last_turn, self._retry_at = now, -math.inf
        log.info("device tier: %s wanted, %s held", _size(wanted), _size(self.held))
        return ""

    def plan(self, need: Need, now: float, most: int) -> Ends | None:
        """Return ``Plan.memory`` of the plan being made. ``most``: pages of each group that it may save, and move."""
        if need.active or self._last_turn is None:
            self._last_turn = now
        self._observe(now)
        if need.active:
            self._grow_for(need.num_bytes, now)
        growth = self._possible_growth(now)
        return self._resizer.plan(self._target, growth, need.pages, now, most)

    def on_result(self, backed: Ends | None, now: float) -> None:
        """Take in the result of a plan with ``memory``."""
        before = self._resizer.held
        missing = self._resizer.on_result(backed)
        if missing:
            self._retry_at = now + RETRY_S
            self._most_growth = max(self._most_growth // 2, self._resizer.unit_bytes)
            log.warning(
                "device tier: %s could not be allocated; it goes on with %s and tries again in %.0f s",
                _size(missing * self._ranks),
                _size(self.held),
                RETRY_S,
            )
        elif self._resizer.held > before:
            self._most_growth = max(self._ceiling // GROWTH_SHARE, self._resizer.unit_bytes)
        if self._resizer.held < before:
            self._free, self._measured_at = None, now  # measured again once this has had its effect
        elif self._free is not None:
            self._free -= self._resizer.held - before

    def _observe(self, now: float) -> None:
        """Lower the target if the device has too little free memory, or if no turn has come for long."""
        if self._idle_release and self._last_turn is not None and now - self._last_turn >= self._idle_release:
            self._lower(self._floor, "no turn has come")
        if not self._slack:
            return
        assert self._free_memory is not None
        if now - self._measured_at >= MEASURE_S:
            self._free, self._measured_at = self._free_memory(), now
        size = self._resizer.size
        if self._free is not None and self._free < self._slack and size <= self._target:
            self._lower(max(size - (2 * self._slack - self._free), self._floor), "little memory is free")

    def _lower(self, target: int, why: str) -> None:
        if target < self._target:
            log.info(
                "device tier: shrinks from %s to %s: %s",
                _size(self.held),
                _size(target * self._ranks),
                why,
            )
            self._target = target

    def _grow_for(self, num_bytes: int, now: float) -> None:
        """Raise the target if the pages of a waiting request, and of the next steps, would need evictions."""
        size = self._resizer.size
        headroom = max(size // HEADROOM_SHARE, self._resizer.unit_bytes)
        lack = num_bytes + headroom - self._resizer.free_bytes
        if lack > 0 and size <= self._target and not self._resizer.is_waiting and self._room(now) > 0:
            self._target = max(min(size + lack, self._wanted), self._target)

    def _possible_growth(self, now: float) -> int:
        """Return the bytes by which the next plan may grow the tier."""
        room = self._room(now)
        return max(min(room, self._most_growth), min(room, self._floor - self._resizer.size))

    def _room(self, now: float) -> int:
        """Return the bytes by which the tier may grow, as far as is known; the floor is always allowed."""
        size = self._resizer.size
        if now < self._retry_at:
            return 0
        room = self._wanted - size
        if self._slack:
            room = min(room, 0 if self._free is None else self._free - 2 * self._slack)
        return max(room, self._floor - size, 0)


def _size(num_bytes: int) -> str:
    """Return a size as people write it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
