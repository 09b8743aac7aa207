"""Pacing of streams: with many streams, a message costs the front end more than the token in it.

Most of that is the system's cost (one ``sendmsg`` and two thread switches per message), so faster Python does not
help. A stream's first output and its end are never delayed. In between, a stream is written at most once per
interval, with everything that has come since in one message.
"""

from __future__ import annotations

import math
from typing import Final

MIN_INTERVAL_S: Final = 0.0125
"""Shorter intervals would merge little: an engine step takes about as long."""
MAX_INTERVAL_S: Final = 0.1
"""Ten writes per second still look like a stream."""


class StreamPacer:
    """Write times for all streams of a front end. Used on one event loop."""

    def __init__(self, messages_per_s: float = float("inf")) -> None:
        """Keep all streams together below this many output messages per second, if ``MAX_INTERVAL_S`` allows."""
        self._messages_per_s = messages_per_s
        self._streams = 0

    def join(self, candidates: int = 1) -> None:
        """Count a stream from its first output on. Each of its candidates counts, since each has its own messages."""
        self._streams += candidates

    def leave(self, candidates: int = 1) -> None:
        self._streams -= candidates

    def next_at(self, now: float) -> float:
        """Return when a stream written now may be written again, on the same clock; ``now`` if there are few streams.

        All streams get the same time and are served together: waking them one by one would cost each the system calls
        and thread switches that a group shares.
        """
        wanted = self._streams / self._messages_per_s
        if wanted < MIN_INTERVAL_S:
            return now
        # Rounded up to a power of two, so that the times of a longer interval are among those of a shorter
        # one. Otherwise each stream that joins or leaves would shift the grid.
        interval = min(
            math.ldexp(MIN_INTERVAL_S, math.ceil(math.log2(wanted / MIN_INTERVAL_S))), MAX_INTERVAL_S
        )
        return (math.floor(now / interval) + 1) * interval
