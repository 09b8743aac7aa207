"""The histories of sessions: the only place that reads them from the store and appends to them.

``Transcript`` caches folded histories. A cached history is valid for one revision and its chain hash; the
store's row decides. If the row is newer, only the later records are read, and the chain must continue.

``KnownRevisions`` remembers the newest revision and chain hash seen of each session. A store may go back in
time: a restored backup, a fail-over to a lagging replica, a truncated log. The next turn would then build on
a history that never existed. So a store that lacks a revision seen before is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from pensieve.errors import DataLoss
from pensieve.server.history.rendering import Renderer
from pensieve.store import Counts, HistoryStore, Key, LoggedRecord, head_hash_after
from pensieve.store.records import History, Item, Record, SessionRow

log = logging.getLogger(__name__)

_ITEM_OVERHEAD: Final = 256
_POINTER: Final = 8
MAX_LISTED: Final = 8
"""Earlier revisions kept per session; the least recently listed is dropped first."""
FOLD_BATCH: Final = 1000
"""Records folded before yielding to the event loop."""


MAX_SESSIONS: Final = 200_000
"""About 60 MB. The least recently used are forgotten first."""


@dataclass(frozen=True, slots=True)
class SeenRevision:
    """The last seen state of a session."""

    revision: int = 0
    head_hash: str = ""
    create_ms: int = 0
    """Distinguishes a session from a later one with the same id."""


NEVER_SEEN: Final = SeenRevision()


class KnownRevisions:
    """The newest revision seen of each session. Used on one event loop."""

    def __init__(
        self, on_regression: Callable[[str], None] | None = None, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """``on_regression`` is called with ``server`` or ``client``: see ``record_regression``."""
        self._on_regression = on_regression
        self._max_sessions = max_sessions
        self._seen: OrderedDict[Key, SeenRevision] = OrderedDict()

    def get(self, key: Key) -> SeenRevision:
        return self._seen.get(key, NEVER_SEEN)

    def record(self, key: Key, row: SessionRow) -> None:
        """Record a row that the store has confirmed or returned. Older rows are ignored."""
        seen = self.get(key)
        if seen.create_ms == row.create_ms and seen.revision > row.revision:
            return
        self._seen[key] = SeenRevision(row.revision, row.head_hash, row.create_ms)
        self._seen.move_to_end(key)
        while len(self._seen) > self._max_sessions:
            self._seen.popitem(last=False)

    def forget(self, key: Key) -> None:
        self._seen.pop(key, None)

    def is_consistent(self, row: SessionRow, seen: SeenRevision) -> bool:
        """Whether ``row`` may follow ``seen``; True also for another session of the same id."""
        if seen.create_ms != row.create_ms or row.revision > seen.revision:
            return True
        return (row.revision, row.head_hash) == (seen.revision, seen.head_hash)

    def check(self, key: Key, row: SessionRow, seen: SeenRevision) -> None:
        """Raises DataLoss (HISTORY_REGRESSED) unless ``row``, read after ``seen`` was taken, is consistent
        with it."""
        if not self.is_consistent(row, seen):
            raise self._regressed(key, row, seen)

    def check_log(
        self, key: Key, row: SessionRow, seen: SeenRevision, records: Sequence[LoggedRecord]
    ) -> None:
        """Raises the same unless the whole log up to ``row``, oldest first, holds the seen revision."""
        there = {one.head_hash for one in records if one.record.revision == seen.revision}
        if seen.create_ms == row.create_ms and there and seen.head_hash not in there:
            raise self._regressed(key, row, seen)

    def record_regression(self, key: Key, current: str, seen: SeenRevision) -> None:
        """Count and log that the store, at revision ``current`` ("" if unknown), holds less of a session than
        was seen. If ``seen`` explains that, the ``server`` saw more; else a ``client`` claimed to, rightly or
        not."""
        by = "server" if seen.revision and (not current or int(current) < seen.revision) else "client"
        extra = {"session": key.session_id, "revision": current, "seen": seen.revision, "seen_by": by}
        log.error("the store went back in time: a session has lost what was acknowledged", extra=extra)
        if self._on_regression is not None:
            self._on_regression(by)

    def _regressed(self, key: Key, row: SessionRow, seen: SeenRevision) -> DataLoss:
        self.record_regression(key, "" if row.revision >= seen.revision else str(row.revision), seen)
        return DataLoss(
            f"the store holds revision {row.revision} of the session, but not the acknowledged revision "
            f"{seen.revision}: history went back in time",
            reason="HISTORY_REGRESSED",
            metadata={"current_revision": str(row.revision)},
        )


@dataclass(slots=True)
class _CacheEntry:
    history: History
    size: int
    listed: OrderedDict[int, tuple[History, int]] = field(default_factory=OrderedDict)
    """Revision → history and size."""

    @property
    def whole_size(self) -> int:
        return self.size + sum(size for _, size in self.listed.values())


class AppendResult(NamedTuple):
    row: SessionRow
    is_ours: bool
    """Whether the log ends in this very record. If not, the change was a repetition, and ``row`` is the
    present state."""


class Transcript:
    """One per process, used on one event loop."""

    def __init__(
        self,
        store: HistoryStore,
        renderer: Renderer,
        max_bytes: int,
        on_regression: Callable[[str], None] | None = None,
    ) -> None:
        """Beyond ``max_bytes`` the least recently used histories are dropped."""
        self.store = store
        self.renderer = renderer
        self.known = KnownRevisions(on_regression)
        self._max_bytes = max_bytes
        self._cached: OrderedDict[Key, _CacheEntry] = OrderedDict()
        self._bytes = 0
        self._read_locks = WeakValueDictionary[Key, asyncio.Lock]()
        """Concurrent callers share one read of a log. A lock lives as long as one of them holds or awaits it."""

    async def read(self, key: Key, *, known_revision: int | None = None) -> tuple[SessionRow, History]:
        """The session as it is now; ``known_revision``: one that a client has seen. Raises the errors of
        ``HistoryStore.load`` and ``history_at``."""
        row = await self.store.load(key, known_revision=known_revision or 0)
        return row, await self.history_at(key, row)

    async def create(
        self, key: Key, record: Record, made: History, mark: str, source: tuple[str, int] = ("", 0)
    ) -> SessionRow:
        """Create a session from its first record; ``made`` is ``initial_history(record)``; ``source``: name
        of the copied session and its last copied item. Returns the present row if the session existed. Raises
        the errors of ``HistoryStore.create``."""
        counts = self.counts(made)
        row = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            head_item=counts.head_item,
            item_count=counts.item_count,
            context_tokens=counts.context_tokens,
            config=made.config,
            labels=dict(made.labels),
            forked_from=source[0],
            forked_from_item=source[1],
        )
        created = await self.store.create(row, record, mark)
        self.known.record(key, created)
        if created.head_hash == made.head_hash:
            self._put(key, made, erased=True)
        return created

    async def append(
        self, key: Key, base: History, record: Record, write: Callable[[Counts], Awaitable[SessionRow]]
    ) -> AppendResult:
        """Append ``record`` to ``base``, the session's history as read, before any truncation or view.
        ``write`` makes the store do it, with the counts of the history after it, and returns the row."""
        after = base.apply(record, head_hash_after(record, base.head_hash))
        row = await write(self.counts(after))
        self.known.record(key, row)
        is_ours = row.head_hash == after.head_hash
        if is_ours:
            self._put(key, after, erased=bool(record.erases))
        else:
            self._drop(key)
        return AppendResult(row, is_ours)

    def counts(self, history: History) -> Counts:
        return Counts(history.head_item, len(history.items), self.renderer.length(history))

    async def history_at(self, key: Key, row: SessionRow) -> History:
        """The session's history at ``row``, or later if a commit came in between. Raises the errors of
        ``HistoryStore.read``, and DataLoss (HISTORY_REGRESSED) when the store has gone back."""
        seen = self.known.get(key)
        if not self.known.is_consistent(row, seen):
            # This row may merely be outdated. Only a row read after ``seen`` was taken can prove a
            # regression.
            row = await self.store.load(key)
            self.known.check(key, row, seen)
        if seen.create_ms != row.create_ms:
            self._drop(key)  # another session had this id, or it is unknown
        history = self._get_cached(key, row)
        if history is None:
            async with self._read_lock(key):
                entry = self._cached.get(key)
                if entry is not None and entry.history.revision > row.revision:
                    # Another caller has read more meanwhile.
                    row = await self.store.load(key)
                    self.known.check(key, row, seen)
                history = self._get_cached(key, row) or await self._read(key, row, seen)
        self.known.record(key, row)
        return history

    def _get_cached(self, key: Key, row: SessionRow) -> History | None:
        entry = self._cached.get(key)
        if entry is None or (entry.history.revision, entry.history.head_hash) != (
            row.revision,
            row.head_hash,
        ):
            return None
        self._cached.move_to_end(key)
        return entry.history

    def _read_lock(self, key: Key) -> asyncio.Lock:
        return self._read_locks.setdefault(key, asyncio.Lock())

    async def _read(self, key: Key, row: SessionRow, seen: SeenRevision) -> History:
        cached = self._cached[key].history if key in self._cached else History()
        if 0 < cached.revision < row.revision:
            try:
                newer = await self.store.read(key, after_revision=cached.revision, head_hash=cached.head_hash)
                return self._put(
                    key, await fold(cached, newer), erased=any(one.record.erases for one in newer)
                )
            except DataLoss as error:
                self._drop(key)
                if error.reason == "HISTORY_REGRESSED":
                    self.known.record_regression(key, "", seen)
                    raise
                # Either side may be wrong: only a full read can tell.
        records = await self.store.read(key)
        self.known.check_log(key, row, seen, records)
        return self._put(key, await fold(History(), records), erased=True)

    async def history_at_revision(self, key: Key, row: SessionRow, revision: int) -> History:
        """The history at an earlier (or the current) revision."""
        current = await self.history_at(key, row)
        if current.revision == revision:
            return current
        history = self._get_listed(key, revision)
        if history is None:
            async with self._read_lock(key):
                history = self._get_listed(key, revision)
                if history is None:
                    records = await self.store.read(key)
                    until = [logged for logged in records if logged.record.revision <= revision]
                    history = _share_items(await fold(History(), until), current)
                    self.keep_listed(key, history)
        return history

    def keep_listed(self, key: Key, history: History) -> None:
        """Keep ``history`` for the next page of its listing, even if the session changes in between."""
        entry = self._cached.get(key)
        if entry is None or history.revision in entry.listed:
            return
        newest = {id(item) for item in entry.history.items}
        own = (item for item in history.items if id(item) not in newest)
        size = _POINTER * len(history.items) + sum(_size_of(item) for item in own)
        self._bytes += size
        entry.listed[history.revision] = history, size
        if len(entry.listed) > MAX_LISTED:
            _, (_, dropped) = entry.listed.popitem(last=False)
            self._bytes -= dropped
        self._make_room()

    def _get_listed(self, key: Key, revision: int) -> History | None:
        entry = self._cached.get(key)
        if entry is None or revision not in entry.listed:
            return None
        entry.listed.move_to_end(revision)
        return entry.listed[revision][0]

    def forget(self, key: Key) -> None:
        self._drop(key)
        self.known.forget(key)

    def _drop(self, key: Key) -> None:
        dropped = self._cached.pop(key, None)
        if dropped is not None:
            self._bytes -= dropped.whole_size

    def _put(self, key: Key, history: History, *, erased: bool) -> History:
        """Cache a history. ``erased``: drop earlier revisions, which may hold content erased since."""
        if erased:
            self._drop(key)
        before = self._cached.pop(key, None)
        entry = _CacheEntry(history, sum(_size_of(item) for item in history.items))
        if before is not None:
            self._bytes -= before.size
            entry.listed = before.listed
        self._cached[key] = entry
        self._bytes += entry.size
        self._make_room()
        return history

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._bytes -= dropped.whole_size


def initial_history(record: Record) -> History:
    """The history of a session that ``record`` creates."""
    return History().apply(record, head_hash_after(record, ""))


def _size_of(item: Item) -> int:
    return len(item.tokens) + len(item.text) + _ITEM_OVERHEAD


def _share_items(history: History, newest: History) -> History:
    """``history`` with the item objects of ``newest`` where both are equal."""
    theirs = {item.number: item for item in newest.items}
    items = tuple(
        other if (other := theirs.get(item.number)) == item and other is not None else item
        for item in history.items
    )
    return replace(history, items=items)


async def fold(history: History, records: Sequence[LoggedRecord]) -> History:
    """``history`` after more records, folded in batches. Raises DataLoss when they do not follow it."""
    for begin in range(0, len(records), FOLD_BATCH):
        if begin:
            await asyncio.sleep(0)
        part = records[begin : begin + FOLD_BATCH]
        try:
            history = history.after((one.record, one.head_hash) for one in part)
        except ValueError as error:
            raise DataLoss("the history has a gap") from error
    return history
