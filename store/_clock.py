"""Clocks for the stores that have none of their own."""

from __future__ import annotations

import time
from typing import NamedTuple


class Moment(NamedTuple):
    wall_ms: int
    """Since the epoch, for times that outlive the process: changes and expiry."""
    steady_ms: int
    """This process's monotonic clock, for leases: a step of the wall clock must not end or prolong them."""


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_clock_ms() -> int:
    """Return ms since some moment before this process. Never steps; means nothing to another process."""
    return time.monotonic_ns() // 1_000_000
