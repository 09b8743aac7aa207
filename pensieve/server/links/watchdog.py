"""Finds an engine that makes no progress, by what its steps have taken so far.

Each step is announced with its number of tokens. A step of a size that was seen before is foreseen to take at most what
the slowest of its kind took lately, in proportion to its tokens; beyond a multiple of that the engine counts as
stalled, and beyond a larger one it is given up. A step that is larger than any before, the first of all included, may
have to compile first: only ``limit_s`` ends the patience with it. A process that the system says is stopped needs no
estimate.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pensieve.engine.messages import Stats
from pensieve.server.child import SilenceTimer

STALLED_FACTOR: Final = 8.0
"""Times what a step should take, until health says so."""
STALLED_FLOOR_S: Final = 3.0
"""The least time for that. With the interval of health it is below 5 s."""
HUNG_FACTOR: Final = 24.0
"""Times what a step should take, until the engine is replaced: its turns are lost then, so patience is longer."""
HUNG_FLOOR_S: Final = 20.0
_KEPT_STEPS: Final = 16


class StepTimes:
    """What steps took lately, by size: the slowest of the latest few in each power of two of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` took ``seconds``."""
        if tokens > 0:
            recent = self._seconds.setdefault(tokens.bit_length(), deque(maxlen=_KEPT_STEPS))
            recent.append(seconds)

    def expected(self, tokens: int) -> float | None:
        """Seconds that a step of ``tokens`` takes at most, as it seems; None for one larger than any before.

        A step has a fixed cost and one per token, so the time of a smaller one, scaled by tokens, is an upper bound,
        and the time of a larger one is too. The least of all bounds is taken.
        """
        if not self._seconds or tokens.bit_length() > max(self._seconds):
            return None
        return min(
            max(recent) * max(1.0, tokens / (1 << (size - 1))) for size, recent in self._seconds.items()
        )


class Watchdog:
    """Progress is a finished step, or having nothing to do; heartbeats show only that idle engines live."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: the patience with a step of which nothing is foreseen; the other limits' floors are below it."""
        self.limit_s = limit_s
        self.tick_s = min(0.25, limit_s / 8)
        self._silence = SilenceTimer(self.tick_s)
        self.reset()

    def reset(self) -> None:
        """Another engine: what the one before took says nothing of it."""
        self._times = StepTimes()
        self._steps = -1
        self._tokens: int | None = None
        self._busy = self._has_work = False
        self._without_step_s = self._frozen_s = 0.0
        self._silence.reset()

    @property
    def stalled(self) -> bool:
        """No progress for longer than can be explained."""
        return self._is_late(STALLED_FLOOR_S, STALLED_FACTOR)

    @property
    def hung(self) -> bool:
        """No progress for so long that none is to be hoped for."""
        return self._is_late(HUNG_FLOOR_S, HUNG_FACTOR)

    @property
    def frozen(self) -> bool:
        """The process is stopped from outside: nothing that the engine does is to blame."""
        return self._frozen_s > 0

    @property
    def quiet_s(self) -> float:
        """Seconds since the latest report."""
        return self._silence.seconds

    def on_step_begin(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        self._silence.reset()
        self._tokens, self._busy = tokens, True

    def on_report(self, stats: Stats) -> None:
        """An iteration of the engine's loop has ended."""
        self._silence.reset()
        self._busy = stats.running + stats.queued > 0
        if stats.steps_total != self._steps:
            self._times.observe(stats.last_batch_tokens, stats.last_step_seconds)
            self._steps = stats.steps_total
            self._without_step_s = 0.0

    def tick(self, elapsed_s: float, *, work_waits: bool, frozen: bool = False) -> None:
        """Time has passed. ``frozen``: the system says that the engine's process is stopped."""
        elapsed = self._silence.advance(elapsed_s)
        # An engine may be inside a step whose requests were all cancelled meanwhile.
        self._has_work = work_waits or self._busy
        self._without_step_s = self._without_step_s + elapsed if work_waits else 0.0
        self._frozen_s = self._frozen_s + elapsed if frozen else 0.0

    def _is_late(self, floor_s: float, factor: float) -> bool:
        floor = min(floor_s, self.limit_s)
        if self._frozen_s > floor:
            return True
        quiet = max(self._without_step_s, self._silence.seconds)
        if not self._has_work:
            return quiet > floor  # it had nothing to do, and does not even say so
        expected = None if self._tokens is None else self._times.expected(self._tokens)
        return quiet > (self.limit_s if expected is None else max(floor, factor * expected))
