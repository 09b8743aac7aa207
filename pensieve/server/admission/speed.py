"""How fast the queue drains, measured while there is one."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""Time constant of forgetting, in seconds of loaded time: idle hours do not age what was measured before them."""
RECENT_S: Final = 1.5
"""Time constant of the figure that notices a machine that has become slower."""
ENOUGH_S: Final = 0.3
"""Loaded time before the first figure is believed."""


class _Window:
    """Sums over loaded time that forget with a time constant."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self.work = 0.0
        self.seconds = 0.0

    def passed(self, elapsed_s: float) -> None:
        kept = math.exp(-elapsed_s / self._memory_s)
        self.work *= kept
        self.seconds = self.seconds * kept + elapsed_s

    @property
    def per_s(self) -> float | None:
        if self.seconds < ENOUGH_S or not self.work:
            return None
        return self.work / self.seconds


class DrainSpeed:
    """Work that left the queue to be computed, per second in which the engine had more than it could begin.

    Work is counted in the units of whoever says what waits, so an error in those units (answers that turn out shorter
    than expected, say) cancels out of "work that waits / speed". Nothing is learned while the engine takes whatever
    comes: it would be the speed of the load and not of the engine.

    Of a long and a short memory the slower counts. A machine that slows down is believed at once, one that speeds up
    only in a while: a wait that was promised too long costs less than one that was promised too short.
    """

    def __init__(self, now: float) -> None:
        self._windows = _Window(MEMORY_S), _Window(RECENT_S)
        self._at = now

    def passed(self, now: float, *, loaded: bool) -> None:
        """Time has gone by, and in it the engine was loaded or not."""
        elapsed, self._at = max(now - self._at, 0.0), max(now, self._at)
        if loaded:
            for window in self._windows:
                window.passed(elapsed)

    def began(self, work: float) -> None:
        """So much of what waited is being computed now. Called while the engine is loaded."""
        for window in self._windows:
            window.work += work

    @property
    def per_s(self) -> float | None:
        """Work per second; None as long as nothing is known."""
        return min((window.per_s for window in self._windows if window.per_s is not None), default=None)
