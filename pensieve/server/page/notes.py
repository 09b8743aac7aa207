"""What the store knows of the sessions that are shown: labels, items, age. Read a few at a time, and remembered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pensieve.errors import PensieveError
from pensieve.store import HistoryStore, Key

MOST_READ: Final = 20
"""Sessions that are read for one look; the others are told without notes, and read for the next."""
MOST_KEPT: Final = 10_000
FRESH_S: Final = 60.0
"""Labels may have changed after so long."""
CHANGED_S: Final = 5.0
"""A session that has had a turn is read again after so long."""
PATIENCE_S: Final = 1.0
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
            _, late = await asyncio.wait(reading, timeout=PATIENCE_S)
            for one in late:
                one.cancel()
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        known = ((key, self._kept.get(key)) for key, _ in wanted)
        return {key: kept.note for key, kept in known if kept is not None and kept.note is not None}

    def _is_due(self, key: Key, tokens: int, now: float) -> bool:
        kept = self._kept.get(key)
        return kept is None or now - kept.at > (FRESH_S if kept.tokens == tokens else CHANGED_S)

    async def _load(self, key: Key, tokens: int, now: float) -> None:
        note = None
        try:
            row = await self._store.load(key)
            note = SessionNote(row.labels, row.item_count, row.create_ms / 1e3)
        except PensieveError:
            """Deleted, or the store is down: it is shown without."""
        self._kept[key] = _Kept(note, now, tokens)
        self._kept.move_to_end(key)
