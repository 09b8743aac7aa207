"""Folded histories of recently used sessions, so that a turn reads only the records that are new to this process.

Histories of earlier revisions that are being listed are kept beside the newest one. They share its items.

A cached history is a claim about one revision and its chain hash. The store's row decides: equal revision and hash,
use it; smaller revision, read what follows and check that the chain continues. A store that is behind what this process
has seen, or has another history there, has gone back in time and is refused (``known``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from pensieve.core import Role
from pensieve.errors import DataLoss
from pensieve.server.history.known import KnownRevisions, Seen
from pensieve.store import HistoryStore, Key, LoggedRecord, head_hash_after
from pensieve.store.records import History, Item, Record, SessionRow

_ITEM_OVERHEAD: Final = 256
_POINTER: Final = 8
MOST_LISTED: Final = 8
"""Earlier revisions of one session that are kept; the least recently listed go first."""
FOLDED_AT_ONCE: Final = 1000
"""Records that are folded before other work on the event loop has its turn."""


@dataclass(slots=True)
class _Held:
    """What is cached of one session."""

    history: History
    size: int
    listed: OrderedDict[int, tuple[History, int]] = field(default_factory=OrderedDict)
    """Revision → history and size."""

    @property
    def whole_size(self) -> int:
        return self.size + sum(size for _, size in self.listed.values())


class Histories:
    """The cache. Beyond ``max_bytes`` the least recently used histories are dropped. Used on one event loop."""

    def __init__(self, store: HistoryStore, max_bytes: int, known: KnownRevisions | None = None) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self.known = known or KnownRevisions()
        self._cached: OrderedDict[Key, _Held] = OrderedDict()
        self._bytes = 0
        self._reading: defaultdict[Key, tuple[asyncio.Lock, list[None]]] = defaultdict(
            lambda: (asyncio.Lock(), [])
        )
        """One log is read once at a time: a second caller finds what the first one has read."""

    async def at(self, key: Key, row: SessionRow) -> History:
        """The session's history at ``row``, or later when a commit came in between.

        Raises what ``HistoryStore.read`` does, and DataLoss (HISTORY_REGRESSED) when the store has gone back.
        """
        seen = self.known.of(key)
        if not self.known.fits(row, seen):
            # Only a row that was asked for after that was seen can tell: this one may just have been overtaken.
            row = await self._store.load(key)
            self.known.check(key, row, seen)
        if seen.create_ms != row.create_ms:
            self._drop(key)  # nothing is known of it, or of another session that had its id
        history = self._at_hand(key, row)
        if history is None:
            async with self._alone(key):
                held = self._cached.get(key)
                if (
                    held is not None and held.history.revision > row.revision
                ):  # read by another caller meanwhile
                    row = await self._store.load(key)
                    self.known.check(key, row, seen)
                history = self._at_hand(key, row) or await self._read(key, row, seen)
        self.known.note(key, row)
        return history

    def _at_hand(self, key: Key, row: SessionRow) -> History | None:
        """What is cached, if it is the session's history at ``row``."""
        held = self._cached.get(key)
        if held is None or (held.history.revision, held.history.head_hash) != (row.revision, row.head_hash):
            return None
        self._cached.move_to_end(key)
        return held.history

    @asynccontextmanager
    async def _alone(self, key: Key) -> AsyncIterator[None]:
        lock, waiting = self._reading[key]
        waiting.append(None)
        try:
            async with lock:
                yield
        finally:
            waiting.pop()
            if not waiting:
                self._reading.pop(key, None)

    async def _read(self, key: Key, row: SessionRow, seen: Seen) -> History:
        cached = self._cached[key].history if key in self._cached else History()
        if 0 < cached.revision < row.revision:
            try:
                newer = await self._store.read(
                    key, after_revision=cached.revision, head_hash=cached.head_hash
                )
                return self._keep(
                    key, await fold(cached, newer), erased=any(one.record.erases for one in newer)
                )
            except DataLoss as error:
                self._drop(key)
                if error.reason == "HISTORY_REGRESSED":
                    self.known.found(key, "", seen)
                    raise
                # Either side may be wrong: only a full read tells.
        records = await self._store.read(key)
        self.known.check_log(key, row, seen, records)
        return self._keep(key, await fold(History(), records), erased=True)

    async def at_revision(self, key: Key, row: SessionRow, revision: int) -> History:
        """The history as it was at an earlier (or the current) revision."""
        current = await self.at(key, row)
        if current.revision == revision:
            return current
        history = self._listed(key, revision)
        if history is None:
            async with self._alone(key):
                history = self._listed(key, revision)
                if history is None:
                    records = await self._store.read(key)
                    until = [logged for logged in records if logged.record.revision <= revision]
                    history = _sharing(await fold(History(), until), current)
                    self.listed(key, history)
        return history

    def listed(self, key: Key, history: History) -> None:
        """Keep ``history`` for the next page of its listing, also when the session has gone on until then."""
        held = self._cached.get(key)
        if held is None or history.revision in held.listed:
            return
        newest = {id(item) for item in held.history.items}
        own = (item for item in history.items if id(item) not in newest)
        size = _POINTER * len(history.items) + sum(_size_of(item) for item in own)
        self._bytes += size
        held.listed[history.revision] = history, size
        if len(held.listed) > MOST_LISTED:
            _, (_, dropped) = held.listed.popitem(last=False)
            self._bytes -= dropped
        self._make_room()

    def _listed(self, key: Key, revision: int) -> History | None:
        held = self._cached.get(key)
        if held is None or revision not in held.listed:
            return None
        held.listed.move_to_end(revision)
        return held.listed[revision][0]

    def committed(self, key: Key, base: History, record: Record, row: SessionRow) -> None:
        """Note what this process has just committed on top of ``base``.

        ``base``: as cached, i.e. before truncation or any view was applied. Kept only if the row ends in this very
        record: a change that is sent again is answered with the row as it is now, and the revision that it asked for
        may meanwhile be somebody else's.
        """
        self.known.note(key, row)
        if row.revision == record.revision and row.head_hash == head_hash_after(record, base.head_hash):
            self._keep(key, base.apply(record, row.head_hash), erased=bool(record.erases))
        else:
            self._drop(key)

    def forget(self, key: Key) -> None:
        """The session is gone, and what was known of it with it."""
        self._drop(key)
        self.known.forget(key)

    def _drop(self, key: Key) -> None:
        dropped = self._cached.pop(key, None)
        if dropped is not None:
            self._bytes -= dropped.whole_size

    def _keep(self, key: Key, history: History, *, erased: bool) -> History:
        """``erased``: histories of earlier revisions may have content that was erased since."""
        if erased:
            self._drop(key)
        before = self._cached.pop(key, None)
        held = _Held(history, sum(_size_of(item) for item in history.items))
        if before is not None:
            self._bytes -= before.size
            held.listed = before.listed
        self._cached[key] = held
        self._bytes += held.size
        self._make_room()
        return history

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._bytes -= dropped.whole_size


def _size_of(item: Item) -> int:
    return len(item.tokens) + len(item.text) + _ITEM_OVERHEAD


def _sharing(history: History, newest: History) -> History:
    """``history`` with the item objects of ``newest`` where both have the same."""
    theirs = {item.number: item for item in newest.items}
    items = tuple(
        other if (other := theirs.get(item.number)) == item and other is not None else item
        for item in history.items
    )
    return replace(history, items=items)


async def fold(history: History, records: Sequence[LoggedRecord]) -> History:
    """``history`` after more records, of which it takes some at a time. Raises DataLoss when they do not follow it."""
    for begin in range(0, len(records), FOLDED_AT_ONCE):
        if begin:
            await asyncio.sleep(0)
        part = records[begin : begin + FOLDED_AT_ONCE]
        try:
            history = history.after((one.record, one.head_hash) for one in part)
        except ValueError as error:
            raise DataLoss("the history has a gap") from error
    return history


def kept(history: History, item: int) -> History:
    """``history`` without the items after ``item``, for a change that supersedes them.

    The system prompt stays whatever ``item`` is, and an overflow view is taken back: it was made for what is cut off.
    """
    item = max(item, system_item(history))
    return replace(history, items=history.truncated(item), hidden_before=0)


def system_item(history: History) -> int:
    """Number of the system prompt's item: the first live item when it is one that the session's config made; else 0."""
    first = history.items[0] if history.items else None
    is_prompt = first is not None and first.role is Role.SYSTEM and bool(history.config.system_prompt)
    return first.number if first is not None and is_prompt else 0
