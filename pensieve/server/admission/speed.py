"""How fast the queue drains, measured while there is one."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""Time constant of forgetting, in seconds of loaded time: idle hours do not age what was measured before them."""
ENOUGH_S: Final = 0.3
"""Loaded time before the first figure is believed."""


class DrainSpeed:
    """Work that left the queue to be computed, per second in which the engine had more than it could begin.

    Work is counted in the units of whoever says what waits, so an error in those units (answers that turn out shorter
    than expected, say) cancels out of "work that waits / speed". Nothing is learned while the engine takes whatever
    comes: it would be the speed of the load and not of the engine.
    """

    def __init__(self, now: float) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._at = now

    def passed(self, now: float, *, loaded: bool) -> None:
        """Time has gone by, and in it the engine was loaded or not."""
        elapsed, self._at = max(now - self._at, 0.0), max(now, self._at)
        if loaded:
            kept = math.exp(-elapsed / MEMORY_S)
            self._work *= kept
            self._seconds = self._seconds * kept + elapsed

    def began(self, work: float) -> None:
        """So much of what waited is being computed now. Called while the engine is loaded."""
        self._work += work

    @property
    def per_s(self) -> float | None:
        """Work per second; None as long as nothing is known."""
        if self._seconds < ENOUGH_S or not self._work:
            return None
        return self._work / self._seconds
