"""Cached sessions, polled while the page is open: strips from the engine, labels from the store."""

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
PATIENCE_S: Final = 2.0
"""Timeout for an engine in a long step. After it the previous strips are shown, with their age."""


@dataclass(frozen=True, slots=True)
class StripSnapshot:
    """Strips of all cached sessions at one time, the most active first."""

    at: float
    sessions: Sequence[SessionStrip] = ()


class StripPoller:
    """Polls the engine for strips. Used on one event loop; ``close`` cancels a running query."""

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._latest: StripSnapshot | None = None
        self._query: asyncio.Task[None] | None = None

    async def strips(self) -> StripSnapshot | None:
        """Return the latest strips, at most ``FRESH_S`` old if the engine answers in time. None if there are none."""
        if self._latest is None or self._clock() - self._latest.at >= FRESH_S:
            if self._query is None or self._query.done():
                self._query = asyncio.create_task(self._take(), name="strips")
            await asyncio.wait({self._query}, timeout=PATIENCE_S)
        return self._latest

    async def close(self) -> None:
        if self._query is not None:
            self._query.cancel()
            await asyncio.wait({self._query})

    async def _take(self) -> None:
        try:
            strips = await self._link.read_strips()
        except PensieveError:
            self._latest = None  # no engine serves: its cache is gone
            return
        strips.sort(key=lambda one: (not one.running, one.idle_s, one.session))
        self._latest = StripSnapshot(self._clock(), strips)


MOST_READ: Final = 20
"""Sessions read from the store per poll. The rest are shown without notes until a later poll."""
MOST_KEPT: Final = 10_000
NOTE_FRESH_S: Final = 60.0
CHANGED_S: Final = 5.0
NOTE_PATIENCE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SessionNote:
    labels: dict[str, str]
    items: int
    created_s: float


@dataclass(frozen=True, slots=True)
class _CachedNote:
    note: SessionNote | None
    at: float
    tokens: int
    """Context length in the cache at that time. A different length means that there was a turn."""


class SessionNotes:
    def __init__(self, store: HistoryStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._notes: OrderedDict[Key, _CachedNote] = OrderedDict()

    async def read(self, wanted: Iterable[tuple[Key, int]]) -> dict[Key, SessionNote]:
        """Return the known notes of sessions, given with their context lengths. Important sessions come first."""
        wanted = list(wanted)
        now = self._clock()
        due = [(key, tokens) for key, tokens in wanted if self._is_due(key, tokens, now)][:MOST_READ]
        if due:
            reading = {asyncio.create_task(self._load(key, tokens, now)) for key, tokens in due}
            _, late = await asyncio.wait(reading, timeout=NOTE_PATIENCE_S)
            for one in late:
                one.cancel()
        while len(self._notes) > MOST_KEPT:
            self._notes.popitem(last=False)
        cached = ((key, self._notes.get(key)) for key, _ in wanted)
        return {key: kept.note for key, kept in cached if kept is not None and kept.note is not None}

    def _is_due(self, key: Key, tokens: int, now: float) -> bool:
        cached = self._notes.get(key)
        return cached is None or now - cached.at > (NOTE_FRESH_S if cached.tokens == tokens else CHANGED_S)

    async def _load(self, key: Key, tokens: int, now: float) -> None:
        note = None
        try:
            row = await self._store.load(key)
            note = SessionNote(row.labels, row.item_count, row.create_ms / 1e3)
        except PensieveError:
            pass  # deleted, or the store is down: shown without a note
        self._notes[key] = _CachedNote(note, now, tokens)
        self._notes.move_to_end(key)
