"""The engine's latest strips: asked for when somebody looks, and once for all who do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pensieve.engine.messages import SessionStrip
from pensieve.errors import PensieveError
from pensieve.server.links.engine_link import EngineLink

FRESH_S: Final = 0.4
"""Nobody asks the engine again so soon."""
PATIENCE_S: Final = 2.0
"""An engine in a long step is not waited for any longer: the strips there were are shown, with their age."""


@dataclass(frozen=True, slots=True)
class StripsTaken:
    """Strips of all cached sessions, the most active first."""

    at: float
    sessions: Sequence[SessionStrip] = ()


class StripWatch:
    """Used on one event loop. ``close`` ends what is under way."""

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._latest: StripsTaken | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def strips(self) -> StripsTaken | None:
        """The latest, not much older than ``FRESH_S`` if the engine answers; None when none were ever taken."""
        if self._latest is None or self._clock() - self._latest.at >= FRESH_S:
            if self._under_way is None or self._under_way.done():
                self._under_way = asyncio.create_task(self._take(), name="strips")
            await asyncio.wait({self._under_way}, timeout=PATIENCE_S)
        return self._latest

    async def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})

    async def _take(self) -> None:
        try:
            strips = await self._link.look()
        except PensieveError:
            self._latest = None  # No engine serves: what was cached is gone with it.
            return
        strips.sort(key=lambda one: (not one.running, one.idle_s, one.session))
        self._latest = StripsTaken(self._clock(), strips)
