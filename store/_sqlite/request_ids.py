"""Request ids of the sessions that were used last, so that a miss is known without asking the file again.

A request id that is missing in the file is either new or lost. The sum of checksums in the session's row tells which,
if all of the session's ids are read. This memory spares that reading from the second turn on.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

MOST: Final = 200_000
"""Request ids that are remembered; a session that has more alone is read each time."""


class RequestIds:
    """One writer owns the file and this. Sessions go by their number in the file."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._sessions: dict[int, tuple[int, set[str]]] = {}
        """Sum of checksums and ids; the session that was used last is the last one."""
        self._count = 0

    def of(self, number: int, requests_sum: int) -> Set[str] | None:
        """All ids of the session, if they are known to be those whose checksums have this sum."""
        found = self._sessions.pop(number, None)
        if found is None:
            return None
        if found[0] != requests_sum:
            self._count -= len(found[1])
            return None
        self._sessions[number] = found
        return found[1]

    def keep(self, number: int, requests_sum: int, ids: Iterable[str]) -> None:
        """Remember all ids of a session."""
        self.forget(number)
        kept = set(ids)
        self._sessions[number] = requests_sum, kept
        self._count += len(kept)
        while self._count > self._most and self._sessions:
            self.forget(next(iter(self._sessions)))

    def add(self, number: int, added: Iterable[tuple[str, int]]) -> None:
        """Ids and checksums that the session has won."""
        found = self._sessions.get(number)
        if found is not None:
            requests_sum, ids = found
            self._count -= len(ids)
            for request_id, crc in added:
                requests_sum += crc
                ids.add(request_id)
            self._count += len(ids)
            self._sessions[number] = requests_sum, ids

    def forget(self, number: int) -> None:
        found = self._sessions.pop(number, None)
        if found is not None:
            self._count -= len(found[1])
