"""Detects an engine that makes no progress, by comparing its current step with earlier ones.

A step's expected time is the slowest recent step of similar size, scaled by tokens. Beyond one multiple of
that the engine counts as stalled, beyond a larger one as hung. A step larger than any before, such as the
first, may have to compile: only ``limit_s`` bounds it. A process that the system reports as stopped needs no
estimate.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pensieve.engine.messages import Stats
from pensieve.server.child import SilenceTimer

STALLED_FACTOR: Final = 8.0
"""Multiple of a step's expected time after which health reports a stall."""
STALLED_FLOOR_S: Final = 3.0
"""The least time for that. With the interval of health checks it is below 5 s."""
HUNG_FACTOR: Final = 24.0
"""Multiple after which the engine is replaced. That loses its turns, so the limit is longer."""
HUNG_FLOOR_S: Final = 20.0
_KEPT_STEPS: Final = 16


class StepTimes:
    """Recent step times: the slowest of the latest few in each power of two of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            recent = self._seconds.setdefault(tokens.bit_length(), deque(maxlen=_KEPT_STEPS))
            recent.append(seconds)

    def expected(self, tokens: int) -> float | None:
        """Upper estimate of the seconds for a step of ``tokens``; None for one larger than any before. A step
        has a fixed cost and a cost per token. So a smaller step, scaled by tokens, gives an upper bound, and
        so does a larger one."""
        if not self._seconds or tokens.bit_length() > max(self._seconds):
            return None
        return min(
            max(recent) * max(1.0, tokens / (1 << (size - 1))) for size, recent in self._seconds.items()
        )


class Watchdog:
    """Progress is a finished step, or having nothing to do. Heartbeats show only that an idle engine lives."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: limit for a step without an estimate; caps the floors of the other limits."""
        self.limit_s = limit_s
        self.tick_s = min(0.25, limit_s / 8)
        self._silence = SilenceTimer(self.tick_s)
        self.reset()

    def reset(self) -> None:
        """A new engine starts: the old one's times say nothing about it."""
        self._times = StepTimes()
        self._steps = -1
        self._tokens: int | None = None
        self._busy = self._has_work = False
        self._without_step_s = self._frozen_s = 0.0
        self._silence.reset()

    @property
    def stalled(self) -> bool:
        return self._is_late(STALLED_FLOOR_S, STALLED_FACTOR)

    @property
    def hung(self) -> bool:
        """No progress for so long that none is likely."""
        return self._is_late(HUNG_FLOOR_S, HUNG_FACTOR)

    @property
    def frozen(self) -> bool:
        """The process was stopped from outside; the engine's requests are not to blame."""
        return self._frozen_s > 0

    @property
    def quiet_s(self) -> float:
        return self._silence.seconds

    def on_step_begin(self, tokens: int) -> None:
        self._silence.reset()
        self._tokens, self._busy = tokens, True

    def on_report(self, stats: Stats) -> None:
        self._silence.reset()
        self._busy = stats.running + stats.queued > 0
        if stats.steps_total != self._steps:
            self._times.observe(stats.last_batch_tokens, stats.last_step_seconds)
            self._steps = stats.steps_total
            self._without_step_s = 0.0

    def tick(self, elapsed_s: float, *, work_waits: bool, frozen: bool = False) -> None:
        """Time has passed. ``frozen``: the system reports that the engine's process is stopped."""
        elapsed = self._silence.advance(elapsed_s)
        # The current step may hold only requests that were cancelled meanwhile.
        self._has_work = work_waits or self._busy
        self._without_step_s = self._without_step_s + elapsed if work_waits else 0.0
        self._frozen_s = self._frozen_s + elapsed if frozen else 0.0

    def _is_late(self, floor_s: float, factor: float) -> bool:
        floor = min(floor_s, self.limit_s)
        if self._frozen_s > floor:
            return True
        quiet = max(self._without_step_s, self._silence.seconds)
        if not self._has_work:
            return quiet > floor  # idle, and without heartbeats
        expected = None if self._tokens is None else self._times.expected(self._tokens)
        return quiet > (self.limit_s if expected is None else max(floor, factor * expected))
