"""How often streams are written to when there are many: a message costs the front end more than the token in it.

Most of that cost is the system's (one ``sendmsg`` and two thread switches each), so it does not shrink with better
Python. The first output of a stream and its end are never held up; in between a stream is written to at most once per
interval, whatever has come meanwhile in one message.
"""

from __future__ import annotations

import math
from typing import Final

SHORTEST_S: Final = 0.0125
"""Shorter intervals would not merge much: engine steps take about as long."""
LONGEST_S: Final = 0.1
"""Text that comes ten times a second still looks like a stream."""


class StreamPacer:
    """Shared by all streams of a front end. One event loop."""

    def __init__(self, messages_per_s: float = float("inf")) -> None:
        """Stay below so many messages with output per second, all streams together, if ``MAX_TIMEOUT_S`` allows."""
        self._messages_per_s = messages_per_s
        self._streams = 0

    def join(self, candidates: int = 1) -> None:
        """A stream has its first output. Each of its candidates has messages of its own, so each counts."""
        self._streams += candidates

    def leave(self, candidates: int = 1) -> None:
        """A stream that joined has ended."""
        self._streams -= candidates

    def next_at(self, now: float) -> float:
        """When a stream that is written to now may be again, on the same clock (seconds); ``now`` with few streams.

        The same time for all streams, so that they are served in one go: woken one by one, each would cost the system
        calls and the thread switches that a crowd shares.
        """
        wanted = self._streams / self._messages_per_s
        if wanted < SHORTEST_S:
            return now
        # Doubled, so that the times of a longer interval are among those of the shorter ones: streams come and go all
        # the time, and each would shift a grid that followed their number.
        interval = min(math.ldexp(SHORTEST_S, math.ceil(math.log2(wanted / SHORTEST_S))), LONGEST_S)
        return (math.floor(now / interval) + 1) * interval
