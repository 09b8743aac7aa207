"""What this process knows to be durable: the newest revision of each session that it has seen, with its chain hash.

A store may go back in time: a restored backup, a fail-over to a replica that had not got everything, a log cut at its
end. What was acknowledged is then gone, and the next turn would be answered from a history that never was. So what was
seen is remembered, longer than the folded histories are, and a store that no longer has it is refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pensieve.errors import DataLoss
from pensieve.store import Key, LoggedRecord
from pensieve.store.records import SessionRow

log = logging.getLogger(__name__)

MAX_SESSIONS: Final = 200_000
"""About 60 MB. The least recently used are forgotten first."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One session as it was seen last."""

    revision: int = 0
    head_hash: str = ""
    create_ms: int = 0
    """Tells a session from one that was made under the same id after it had expired."""


NOTHING: Final = Seen()


class KnownRevisions:
    """Used on one event loop."""

    def __init__(
        self, on_regression: Callable[[str], None] | None = None, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """``on_regression`` hears, each time that the store seems to have gone back, who saw it: see ``found``."""
        self._on_regression = on_regression
        self._max_sessions = max_sessions
        self._seen: OrderedDict[Key, Seen] = OrderedDict()

    def of(self, key: Key) -> Seen:
        """What was seen last; all zero when nothing was."""
        return self._seen.get(key, NOTHING)

    def note(self, key: Key, row: SessionRow) -> None:
        """``row`` is what the store has confirmed, or has answered. An older one than was seen changes nothing."""
        seen = self.of(key)
        if seen.create_ms == row.create_ms and seen.revision > row.revision:
            return
        self._seen[key] = Seen(row.revision, row.head_hash, row.create_ms)
        self._seen.move_to_end(key)
        while len(self._seen) > self._max_sessions:
            self._seen.popitem(last=False)

    def forget(self, key: Key) -> None:
        self._seen.pop(key, None)

    def fits(self, row: SessionRow, seen: Seen) -> bool:
        """Whether ``row`` may be the session after what was ``seen``; True also for another session of the same id."""
        if seen.create_ms != row.create_ms or row.revision > seen.revision:
            return True
        return (row.revision, row.head_hash) == (seen.revision, seen.head_hash)

    def check(self, key: Key, row: SessionRow, seen: Seen) -> None:
        """Raises DataLoss (HISTORY_REGRESSED) unless ``row`` fits. ``seen``: taken before the row was asked for."""
        if not self.fits(row, seen):
            raise self._regressed(key, row, seen)

    def check_log(self, key: Key, row: SessionRow, seen: Seen, records: Sequence[LoggedRecord]) -> None:
        """The same for the whole log that leads up to ``row``, oldest first: it must hold what was seen."""
        there = {one.head_hash for one in records if one.record.revision == seen.revision}
        if seen.create_ms == row.create_ms and there and seen.head_hash not in there:
            raise self._regressed(key, row, seen)

    def found(self, key: Key, current: str, seen: Seen) -> None:
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

    def _regressed(self, key: Key, row: SessionRow, seen: Seen) -> DataLoss:
        self.found(key, "" if row.revision >= seen.revision else str(row.revision), seen)
        return DataLoss(
            f"the store holds revision {row.revision} of the session, and not revision {seen.revision} as it was "
            "acknowledged: history went back in time",
            reason="HISTORY_REGRESSED",
            metadata={"current_revision": str(row.revision)},
        )
