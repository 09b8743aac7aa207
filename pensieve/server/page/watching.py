"""What is known of the cached sessions, asked for when somebody looks: the engine's strips, and the store's notes."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pensieve.engine.messages import SessionStrip
from pensieve.errors import PensieveError
from pensieve.server.links.engine_link import EngineLink
from pensieve.store import HistoryStore, Key

FRESH_S: Final = 0.4
"""Nobody asks the engine again so soon."""
PATIENCE_S: Final = 2.0
"""An engine in a long step is not waited for any longer: the strips there were are shown, with their age."""


@dataclass(frozen=True, slots=True)
class StripSnapshot:
    """Strips of all cached sessions, the most active first."""

    at: float
    sessions: Sequence[SessionStrip] = ()


class StripPoller:
    """Used on one event loop. ``close`` ends what is under way."""

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._latest: StripSnapshot | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def strips(self) -> StripSnapshot | None:
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
            strips = await self._link.read_strips()
        except PensieveError:
            self._latest = None  # No engine serves: what was cached is gone with it.
            return
        strips.sort(key=lambda one: (not one.running, one.idle_s, one.session))
        self._latest = StripSnapshot(self._clock(), strips)


MOST_READ: Final = 20
"""Sessions that are read for one look; the others are told without notes, and read for the next."""
MOST_KEPT: Final = 10_000
NOTE_FRESH_S: Final = 60.0
"""Labels may have changed after so long."""
CHANGED_S: Final = 5.0
"""A session that has had a turn is read again after so long."""
NOTE_PATIENCE_S: Final = 1.0
"""A store that takes longer is not waited for."""


@dataclass(frozen=True, slots=True)
class SessionNote:
    """From a session's row."""

    labels: dict[str, str]
    items: int
    created_s: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class _Kept:
    note: SessionNote | None
    """None: the store has no such session."""
    at: float
    tokens: int
    """Length of the context as the cache had it then: another one means that there was a turn."""


class SessionNotes:
    """Used on one event loop."""

    def __init__(self, store: HistoryStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    async def read(self, wanted: Iterable[tuple[Key, int]]) -> dict[Key, SessionNote]:
        """What is known of these sessions, given with the lengths of their contexts; in the order of importance."""
        wanted = list(wanted)
        now = self._clock()
        due = [(key, tokens) for key, tokens in wanted if self._is_due(key, tokens, now)][:MOST_READ]
        if due:
            reading = {asyncio.create_task(self._load(key, tokens, now)) for key, tokens in due}
            _, late = await asyncio.wait(reading, timeout=NOTE_PATIENCE_S)
            for one in late:
                one.cancel()
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        known = ((key, self._kept.get(key)) for key, _ in wanted)
        return {key: kept.note for key, kept in known if kept is not None and kept.note is not None}

    def _is_due(self, key: Key, tokens: int, now: float) -> bool:
        kept = self._kept.get(key)
        return kept is None or now - kept.at > (NOTE_FRESH_S if kept.tokens == tokens else CHANGED_S)

    async def _load(self, key: Key, tokens: int, now: float) -> None:
        note = None
        try:
            row = await self._store.load(key)
            note = SessionNote(row.labels, row.item_count, row.create_ms / 1e3)
        except PensieveError:
            """Deleted, or the store is down: it is shown without."""
        self._kept[key] = _Kept(note, now, tokens)
        self._kept.move_to_end(key)
