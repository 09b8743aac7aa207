"""Finds the chunks that a context has in the cache: chunks of its own session, then chunks of others, by address.

``found`` and ``in_common`` only look; ``take`` makes them the session's. All three give chunks for the leading tokens
of a context, and say for how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pensieve.core import TokenArray
from pensieve.engine.cache.chunk import CachedSession, Chunk
from pensieve.engine.cache.sharing import PrefixPath, SharedChunks


class Branches(NamedTuple):
    """Requests that will branch off another when it is admitted."""

    requests: int = 0
    pages: int = 0
    """Device pages of the first group that they do not share with it."""


NO_BRANCHES: Final = Branches()


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """The cost of bringing a context to the device."""

    num_bytes: int
    """Bytes of the device pages needed, for slices on the host and in no tier."""
    needs_compute: bool
    room: int
    """Bytes of the device available without any loss: free, or of other chunks with a clean host copy."""


class Finder:
    """Finds chunks for contexts. It has no state of its own."""

    def __init__(self, shared: SharedChunks, chunk_tokens: int) -> None:
        self._shared = shared
        self._size = chunk_tokens

    def take(self, session: CachedSession, tokens: TokenArray, num_new: int, path: PrefixPath | None) -> int:
        """Truncate a session to what matches ``tokens``, adopt others' chunks after it, and return the
        cached length."""
        size = self._size
        keep = self.matching(session, tokens, num_new, path)
        if path is None:
            self._shared.truncate(session, -(-keep // self._size))
            return keep
        addressed = self._shared.assign_addresses(session)
        if addressed < keep // size:  # chunks that could not be merged give way to the others'
            keep = addressed * size
        full = keep // size
        self._shared.truncate(session, -(-keep // self._size))
        found = self._shared.find(path.digests, full)
        if found:
            self._shared.truncate(session, full)  # a partly filled tail gives way to a full chunk
            self._shared.adopt(session, found)
            keep = (full + len(found)) * size
        return keep

    def found(
        self, session: CachedSession | None, tokens: TokenArray, num_new: int, path: PrefixPath | None
    ) -> tuple[list[Chunk], int]:
        """Return the chunks that ``admit`` would find for a context, and how many leading tokens they stand for."""
        keep, chunks = 0, list[Chunk]()
        if session is not None and session.scope == scope_of(path):
            keep = self.matching(session, tokens, num_new, path)
            chunks = session.chunks[: -(-keep // self._size)]
        found = [] if path is None else self._shared.find(path.digests, keep // self._size)
        if found:
            chunks = chunks[: keep // self._size] + found
            keep = len(chunks) * self._size
        return chunks, keep

    def in_common(
        self, session: CachedSession | None, tokens: TokenArray, num_new: int, path: PrefixPath | None
    ) -> list[Chunk]:
        """Return the chunks that a context would share with other sessions."""
        mine: list[Chunk] = []
        full = addressed = 0
        if session is not None and session.scope == scope_of(path):
            full = self.matching(session, tokens, num_new, path) // self._size
            addressed = self._shared.count_addressed(session, full)
            mine = session.chunks[: min(full, session.shared)]
        others = [] if path is None else self._shared.find(path.digests, addressed)
        # If others have the same chunks as those of its own without an address, it takes the others'.
        return mine[: addressed if others else full] + others

    def matching(
        self, session: CachedSession, tokens: TokenArray, num_new: int, path: PrefixPath | None
    ) -> int:
        """Return how many leading ``tokens`` the session itself has; without addresses at most the history."""
        known = session.matching_tokens(tokens)
        return known if path is not None else min(known, len(tokens) - num_new)


def scope_of(path: PrefixPath | None) -> str:
    return "" if path is None else path.scope
