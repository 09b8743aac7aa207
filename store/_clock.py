"""The clock of the stores that have none of their own."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Ms since the epoch."""
    return time.time_ns() // 1_000_000
