"""Folded histories of recently used sessions, so that a turn reads only the records that are new to this process.

A cached history is a claim about one revision and its chain hash. The store's row decides: equal revision and hash,
use it; smaller revision, read what follows and check that the chain continues. A store that is behind what this process
has seen, or has another history there, has gone back in time and is refused (``known``).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from pensieve.core import Role
from pensieve.errors import DataLoss
from pensieve.server.history.known import KnownRevisions, Seen
from pensieve.store import HistoryStore, Key, LoggedRecord, head_hash_after
from pensieve.store.records import History, Record, SessionRow

_ITEM_OVERHEAD = 256


class Histories:
    """The cache. Beyond ``max_bytes`` the least recently used histories are dropped. Used on one event loop."""

    def __init__(self, store: HistoryStore, max_bytes: int, known: KnownRevisions | None = None) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self.known = known or KnownRevisions()
        self._cached: OrderedDict[Key, tuple[History, int]] = OrderedDict()
        self._bytes = 0

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
        history = await self._read(key, row, seen)
        self.known.note(key, row)
        return history

    async def _read(self, key: Key, row: SessionRow, seen: Seen) -> History:
        cached = self._cached[key][0] if key in self._cached else History()
        if (cached.revision, cached.head_hash) == (row.revision, row.head_hash):
            self._cached.move_to_end(key)
            return cached
        if 0 < cached.revision < row.revision:
            try:
                newer = await self._store.read(
                    key, after_revision=cached.revision, head_hash=cached.head_hash
                )
                return self._keep(key, fold(cached, newer))
            except DataLoss as error:
                self._drop(key)
                if error.reason == "HISTORY_REGRESSED":
                    self.known.found(key, "", seen)
                    raise
                # Either side may be wrong: only a full read tells.
        records = await self._store.read(key)
        self.known.check_log(key, row, seen, records)
        return self._keep(key, fold(History(), records))

    async def at_revision(self, key: Key, row: SessionRow, revision: int) -> History:
        """The history as it was at an earlier (or the current) revision."""
        current = await self.at(key, row)
        if current.revision == revision:
            return current
        records = await self._store.read(key)
        return fold(History(), [logged for logged in records if logged.record.revision <= revision])

    def committed(self, key: Key, base: History, record: Record, row: SessionRow) -> None:
        """Note what this process has just committed on top of ``base``.

        ``base``: as cached, i.e. before truncation or any view was applied. Kept only if the row ends in this very
        record: a change that is sent again is answered with the row as it is now, and the revision that it asked for
        may meanwhile be somebody else's.
        """
        self.known.note(key, row)
        if row.revision == record.revision and row.head_hash == head_hash_after(record, base.head_hash):
            self._keep(key, base.apply(record, row.head_hash))
        else:
            self._drop(key)

    def forget(self, key: Key) -> None:
        """The session is gone, and what was known of it with it."""
        self._drop(key)
        self.known.forget(key)

    def _drop(self, key: Key) -> None:
        dropped = self._cached.pop(key, None)
        if dropped is not None:
            self._bytes -= dropped[1]

    def _keep(self, key: Key, history: History) -> History:
        self._drop(key)
        size = sum(len(item.tokens) + len(item.text) + _ITEM_OVERHEAD for item in history.items)
        self._cached[key] = (history, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._cached) > 1:
            _, (_, dropped) = self._cached.popitem(last=False)
            self._bytes -= dropped
        return history


def fold(history: History, records: list[LoggedRecord]) -> History:
    """``history`` after more records. Raises DataLoss when they do not follow it."""
    try:
        for logged in records:
            history = history.apply(logged.record, logged.head_hash)
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
