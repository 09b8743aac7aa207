"""The histories of sessions: one place that reads them from the store, and the only one that appends to them.

Claims of request ids (``sessions.lookup``) are rows without a history, and not in here.

``Transcript`` reads, folds, caches and appends. A cached history is a claim about one revision and its chain hash. The
store's row decides: equal revision and hash, use it; smaller revision, read what follows and check that the chain
continues. So a turn reads only the records that are new to this process. Histories of earlier revisions that are being
listed are kept beside the newest one, and share its items.

``KnownRevisions`` remembers what this process knows to be durable: the newest revision of each session that it has
seen, with its chain hash. A store may go back in time: a restored backup, a fail-over to a replica that had not got
everything, a log cut at its end. What was acknowledged is then gone, and the next turn would be answered from a history
that never was. So what was seen is remembered, longer than the folded histories are, and a store that no longer has it
is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from pensieve.errors import DataLoss
from pensieve.server.history.rendering import Renderer
from pensieve.store import Counts, HistoryStore, Key, LoggedRecord, head_hash_after
from pensieve.store.records import History, Item, Record, SessionRow

log = logging.getLogger(__name__)

_ITEM_OVERHEAD: Final = 256
_POINTER: Final = 8
MAX_LISTED: Final = 8
"""Earlier revisions of one session that are kept; the least recently listed go first."""
FOLD_BATCH: Final = 1000
"""Records that are folded before other work on the event loop has its turn."""


MAX_SESSIONS: Final = 200_000
"""About 60 MB. The least recently used are forgotten first."""


@dataclass(frozen=True, slots=True)
class SeenRevision:
    """One session as it was seen last."""

    revision: int = 0
    head_hash: str = ""
    create_ms: int = 0
    """Tells a session from one that was made under the same id after it had expired."""


NEVER_SEEN: Final = SeenRevision()


class KnownRevisions:
    """Used on one event loop."""

    def __init__(
        self, on_regression: Callable[[str], None] | None = None, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """``on_regression`` hears, each time that the store seems to have gone back, who saw it: see ``found``."""
        self._on_regression = on_regression
        self._max_sessions = max_sessions
        self._seen: OrderedDict[Key, SeenRevision] = OrderedDict()

    def get(self, key: Key) -> SeenRevision:
        """The session as it was seen last; all zero when it never was."""
        return self._seen.get(key, NEVER_SEEN)

    def record(self, key: Key, row: SessionRow) -> None:
        """``row`` is what the store has confirmed, or has answered. An older one than was seen changes nothing."""
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
        """Whether ``row`` may be the session after what was ``seen``; True also for another session of the same id."""
        if seen.create_ms != row.create_ms or row.revision > seen.revision:
            return True
        return (row.revision, row.head_hash) == (seen.revision, seen.head_hash)

    def check(self, key: Key, row: SessionRow, seen: SeenRevision) -> None:
        """Raises DataLoss (HISTORY_REGRESSED) unless ``row`` fits. ``seen``: taken before the row was asked for."""
        if not self.is_consistent(row, seen):
            raise self._regressed(key, row, seen)

    def check_log(
        self, key: Key, row: SessionRow, seen: SeenRevision, records: Sequence[LoggedRecord]
    ) -> None:
        """The same for the whole log that leads up to ``row``, oldest first: it must hold what was seen."""
        there = {one.head_hash for one in records if one.record.revision == seen.revision}
        if seen.create_ms == row.create_ms and there and seen.head_hash not in there:
            raise self._regressed(key, row, seen)

    def record_regression(self, key: Key, current: str, seen: SeenRevision) -> None:
        """Count and log that the store refused something as behind what is known of a session.

        ``current``: the store's revision, "" if it is not that which tells; ``seen``: what it was asked with. Where
        that does not explain the refusal, a ``client`` said that it has seen more: maybe so, maybe it is mistaken. Else
        the ``server`` has seen it.
        """
        by = "server" if seen.revision and (not current or int(current) < seen.revision) else "client"
        extra = {"session": key.session_id, "revision": current, "seen": seen.revision, "seen_by": by}
        log.error("the store went back in time: a session has lost what was acknowledged", extra=extra)
        if self._on_regression is not None:
            self._on_regression(by)

    def _regressed(self, key: Key, row: SessionRow, seen: SeenRevision) -> DataLoss:
        self.record_regression(key, "" if row.revision >= seen.revision else str(row.revision), seen)
        return DataLoss(
            f"the store holds revision {row.revision} of the session, and not revision {seen.revision} as it was "
            "acknowledged: history went back in time",
            reason="HISTORY_REGRESSED",
            metadata={"current_revision": str(row.revision)},
        )


@dataclass(slots=True)
class _CacheEntry:
    """One session in the cache."""

    history: History
    size: int
    listed: OrderedDict[int, tuple[History, int]] = field(default_factory=OrderedDict)
    """Revision → history and size."""

    @property
    def whole_size(self) -> int:
        return self.size + sum(size for _, size in self.listed.values())


class AppendResult(NamedTuple):
    """The store's answer to a record."""

    row: SessionRow
    is_ours: bool
    """The log ends in this very record. It does not when the change was sent again: the row is as it is now, and the
    revision that the caller asked for may meanwhile be another change's."""


class Transcript:
    """See the module docstring. One per process, used on one event loop."""

    def __init__(
        self,
        store: HistoryStore,
        renderer: Renderer,
        max_bytes: int,
        on_regression: Callable[[str], None] | None = None,
    ) -> None:
        """Beyond ``max_bytes`` the least recently used histories are dropped. ``on_regression``: see
        ``KnownRevisions``."""
        self.store = store
        self.renderer = renderer
        self.known = KnownRevisions(on_regression)
        self._max_bytes = max_bytes
        self._cached: OrderedDict[Key, _CacheEntry] = OrderedDict()
        self._bytes = 0
        self._read_locks: defaultdict[Key, tuple[asyncio.Lock, list[None]]] = defaultdict(
            lambda: (asyncio.Lock(), [])
        )
        """One log is read once at a time: a second caller finds what the first one has read."""

    async def read(self, key: Key) -> tuple[SessionRow, History]:
        """The session as it is now. Raises what ``HistoryStore.load`` and ``at`` do."""
        row = await self.store.load(key)
        return row, await self.history_at(key, row)

    async def create(
        self, key: Key, record: Record, made: History, mark: str, source: tuple[str, int] = ("", 0)
    ) -> SessionRow:
        """Make a session of its first record; ``made`` is ``first(record)``. ``source``: name of the session and number
        of the item that it is a copy up to.

        Raises what ``HistoryStore.create`` does. The row of a session that was made before is as it is now.
        """
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
        """Append ``record`` to ``base``, the session's history as it was read: before any item or view is cut off.

        ``write`` has the store do it and returns its row; what it raises, this does. The store writes the row together
        with the record, so what the row says of the history after it is counted before.
        """
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
        """The numbers that a session's row keeps of its ``history``."""
        return Counts(history.head_item, len(history.items), self.renderer.length(history))

    async def history_at(self, key: Key, row: SessionRow) -> History:
        """The session's history at ``row``, or later when a commit came in between.

        Raises what ``HistoryStore.read`` does, and DataLoss (HISTORY_REGRESSED) when the store has gone back.
        """
        seen = self.known.get(key)
        if not self.known.is_consistent(row, seen):
            # Only a row that was asked for after that was seen can tell: this one may just have been overtaken.
            row = await self.store.load(key)
            self.known.check(key, row, seen)
        if seen.create_ms != row.create_ms:
            self._drop(key)  # nothing is known of it, or of another session that had its id
        history = self._get_cached(key, row)
        if history is None:
            async with self._read_lock(key):
                entry = self._cached.get(key)
                if (
                    entry is not None and entry.history.revision > row.revision
                ):  # read by another caller meanwhile
                    row = await self.store.load(key)
                    self.known.check(key, row, seen)
                history = self._get_cached(key, row) or await self._read(key, row, seen)
        self.known.record(key, row)
        return history

    def _get_cached(self, key: Key, row: SessionRow) -> History | None:
        """The cached history, if it is the session's at ``row``."""
        entry = self._cached.get(key)
        if entry is None or (entry.history.revision, entry.history.head_hash) != (
            row.revision,
            row.head_hash,
        ):
            return None
        self._cached.move_to_end(key)
        return entry.history

    @asynccontextmanager
    async def _read_lock(self, key: Key) -> AsyncIterator[None]:
        lock, waiting = self._read_locks[key]
        waiting.append(None)
        try:
            async with lock:
                yield
        finally:
            waiting.pop()
            if not waiting:
                self._read_locks.pop(key, None)

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
                # Either side may be wrong: only a full read tells.
        records = await self.store.read(key)
        self.known.check_log(key, row, seen, records)
        return self._put(key, await fold(History(), records), erased=True)

    async def history_at_revision(self, key: Key, row: SessionRow, revision: int) -> History:
        """The history as it was at an earlier (or the current) revision."""
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
        """Keep ``history`` for the next page of its listing, also when the session has gone on until then."""
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
        """The session is gone, and what was known of it with it."""
        self._drop(key)
        self.known.forget(key)

    def _drop(self, key: Key) -> None:
        dropped = self._cached.pop(key, None)
        if dropped is not None:
            self._bytes -= dropped.whole_size

    def _put(self, key: Key, history: History, *, erased: bool) -> History:
        """``erased``: histories of earlier revisions may have content that was erased since."""
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
    """The history of a session that ``record`` makes."""
    return History().apply(record, head_hash_after(record, ""))


def _size_of(item: Item) -> int:
    return len(item.tokens) + len(item.text) + _ITEM_OVERHEAD


def _share_items(history: History, newest: History) -> History:
    """``history`` with the item objects of ``newest`` where both have the same."""
    theirs = {item.number: item for item in newest.items}
    items = tuple(
        other if (other := theirs.get(item.number)) == item and other is not None else item
        for item in history.items
    )
    return replace(history, items=items)


async def fold(history: History, records: Sequence[LoggedRecord]) -> History:
    """``history`` after more records, of which it takes some at a time. Raises DataLoss when they do not follow it."""
    for begin in range(0, len(records), FOLD_BATCH):
        if begin:
            await asyncio.sleep(0)
        part = records[begin : begin + FOLD_BATCH]
        try:
            history = history.after((one.record, one.head_hash) for one in part)
        except ValueError as error:
            raise DataLoss("the history has a gap") from error
    return history
