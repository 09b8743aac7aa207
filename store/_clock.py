"""The clocks of the stores that have none of their own."""

from __future__ import annotations

import time
from typing import NamedTuple


class Moment(NamedTuple):
    """One reading of both clocks."""

    wall_ms: int
    """Since the epoch: for what outlives the process, which is when a session was changed and when it expires."""
    steady_ms: int
    """Of this process' monotonic clock: for leases, which a step of the wall clock must neither end nor prolong."""


def wall_clock_ms() -> int:
    """Ms since the epoch."""
    return time.time_ns() // 1_000_000


def steady_clock_ms() -> int:
    """Ms since some moment before this process; never steps, and means nothing to another process."""
    return time.monotonic_ns() // 1_000_000
