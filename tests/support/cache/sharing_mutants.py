"""Deliberate faults of sharing, by name: methods of the cache, and what takes their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pensieve.core import TokenArray
from pensieve.engine.cache.chunk import CachedSession, Chunk, SharedRun
from pensieve.engine.cache.eviction import EvictionIndex
from pensieve.engine.cache.finding import Finder
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.sharing import Digests, SharedChunks
from pensieve.engine.cache.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Fault:
    """One method, and what takes its place."""

    owner: type
    name: str
    broken: Callable[..., Any]


def unchained(
    self: Digests, scope: str, known: Sequence[bytes], tokens: TokenArray, chunks: int
) -> list[bytes]:
    """An address says nothing of what comes before the chunk, but for how much."""
    size, root = self._size, self.root(scope)
    return [
        blake2b(
            root + bytes([at % 256]) + tokens[at * size : (at + 1) * size].tobytes(), digest_size=16
        ).digest()
        for at in range(chunks)
    ]


def one_root(self: Digests, scope: str) -> bytes:
    """All tenants share one chain."""
    return b"\0" * 16


def written_in_place(
    self: CacheManager, session: CachedSession, shared: Chunk, valid: int, total: int
) -> None:
    """What is shared is written to."""
    shared.filled = valid


def leaves_in_name_only(self: SharedChunks, session: CachedSession, keep: int) -> None:
    """The run still counts one that has left."""
    while session.shared > keep:
        run = session.chunks[session.shared - 1].holder
        assert isinstance(run, SharedRun)
        if run.first_index < keep:
            self._split(run, keep)
        session.shared -= len(run.own_chunks)
        del session.chunks[session.shared :]


def claims_stay(self: EvictionIndex, run: SharedRun, owner: CachedSession) -> None:
    """The worth of a run still counts one that has left."""


def adopts_in_name_only(self: SharedChunks, session: CachedSession, chunks: Sequence[Chunk]) -> None:
    """The run does not count one that has joined."""
    at = 0
    while at < len(chunks):
        run = self._run_up_to(chunks[at], chunks[-1].index + 1)
        session.chunks.extend(run.own_chunks)
        session.shared += len(run.own_chunks)
        at += len(run.own_chunks)


def uncopied(self: Tiers, source: Chunk, target: Chunk, filled: int) -> None:
    """A tail counts as copied, and is not."""
    self.place(target)
    target.filled = filled


def stays_registered(self: SharedChunks, chunk: Chunk) -> None:
    """What was written over is still found."""


def ignores_copies(
    self: Finder, session: CachedSession | None, tokens: TokenArray, num_new: int, path: object
) -> list[Chunk]:
    """Chunks are adopted while they are copied out."""
    return [chunk for chunk in _in_common(self, session, tokens, num_new, path) if not chunk.saving]


def keeps_host_copies(self: Tiers, chunks: Sequence[Chunk], start: int, end: int) -> None:
    """A host copy outlives what was written behind it."""
    for chunk in chunks:
        chunk.filled = min(end - chunk.index * self.chunk_tokens, self.chunk_tokens)
        if chunk.shared:
            self._fresh.add(chunk)


_in_common: Callable[..., list[Chunk]] = Finder.in_common

SHARING_MUTANTS: dict[str, tuple[Fault, ...]] = {
    "address: of the chunk alone": (Fault(Digests, "extended", unchained),),
    "address: of no tenant": (Fault(Digests, "root", one_root),),
    "shared chunk: written to": (Fault(CacheManager, "_own_copy", written_in_place),),
    "owners: one that left counts": (Fault(SharedChunks, "disown", leaves_in_name_only),),
    "owners: one that joined does not count": (Fault(SharedChunks, "adopt", adopts_in_name_only),),
    "worth: one that left counts": (Fault(EvictionIndex, "remove_owner", claims_stay),),
    "tail: not copied": (Fault(Tiers, "copy", uncopied),),
    "index: what is written over is found": (Fault(SharedChunks, "unregister", stays_registered),),
    "in flight: adopted while copied out": (Fault(Finder, "in_common", ignores_copies),),
    "written: its host copy is kept": (Fault(Tiers, "fill", keeps_host_copies),),
}
