"""A running request's chunks: which of them its session has, which others have, where each is put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pensieve.core import TokenArray
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Place, Range, Restore
from pensieve.engine.cache.digests import Path
from pensieve.engine.cache.eviction import EvictionIndex, way_of
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.sharing import SharedChunks
from pensieve.engine.cache.tiers import Tiers


@dataclass(frozen=True, slots=True)
class ToBring:
    """What it takes to have a context on the device."""

    pages: int
    """Device pages, for what is on the host and what is in no tier."""
    computing: bool
    """Whether anything has to be computed."""
    room: int
    """Device pages that can be had for it and cost nothing: free, or of others' chunks that the host has too."""


class Layout:
    """Lays contexts out over chunks. The caller keeps track of sessions, and says which of them run."""

    def __init__(self, tiers: Tiers, shared: SharedChunks, index: EvictionIndex, chunk_tokens: int) -> None:
        self._tiers = tiers
        self._shared = shared
        self._index = index
        self._size = chunk_tokens

    def keep(self, session: CachedSession, tokens: TokenArray, num_new: int, path: Path | None) -> int:
        """How many leading ``tokens`` the session has itself; without addresses never more than the history."""
        known = session.known(tokens)
        return known if path is not None else min(known, len(tokens) - num_new)

    def shared_with_others(
        self, session: CachedSession | None, tokens: TokenArray, num_new: int, path: Path | None
    ) -> list[Chunk]:
        """Which chunks a context would have in common with others, without a change."""
        mine: list[Chunk] = []
        full = addressed = 0
        if session is not None and session.scope == ("" if path is None else path.scope):
            full = self.keep(session, tokens, num_new, path) // self._size
            addressed = self._shared.addressed(session, full)
            mine = session.chunks[: min(full, session.shared)]
        others = [] if path is None else self._shared.find(path.digests, addressed)
        # Of what has no address yet its own gives way to doubles, if there are any.
        return mine[: addressed if others else full] + others

    def find(self, session: CachedSession, tokens: TokenArray, num_new: int, path: Path | None) -> int:
        """Cut a session to what it has of ``tokens`` and let it own what others have behind that; returns to where."""
        size = self._size
        keep = self.keep(session, tokens, num_new, path)
        if path is None:
            self._shared.cut(session, -(-keep // size))
            return keep
        addressed = self._shared.address(session)
        if addressed < keep // size:  # what could not be folded into its double gives way to it
            keep = addressed * size
        full = keep // size
        self._shared.cut(session, -(-keep // size))
        found = self._shared.find(path.digests, full)
        if found:
            self._shared.cut(session, full)  # a partly filled tail, to one that may hold more
            self._shared.adopt(session, found)
            keep = (full + len(found)) * size
        return keep

    def to_bring(
        self, session: CachedSession | None, tokens: TokenArray, path: Path | None, tenant: int
    ) -> ToBring:
        """What it takes to have all of a tenant's context on the device; changes nothing."""
        size = self._size
        keep = 0 if session is None else self.keep(session, tokens, 0, path)
        chunks = [] if session is None else session.chunks[: -(-keep // size)]
        found = [] if path is None else self._shared.find(path.digests, keep // size)
        if found:
            chunks = chunks[: keep // size] + found
            keep = len(chunks) * size
        pages = -(-len(tokens) // size) - len(chunks)
        computing, clean = keep < len(tokens), 0
        for chunk in chunks:
            low = chunk.index * size
            copied = chunk.shared and low + size > keep  # on write, or recomputed
            pages += copied or chunk.device == NOWHERE
            computing |= copied or min(chunk.filled, keep - low) < min(size, len(tokens) - low)
            clean += way_of(chunk) is Reclaim.PAGE
        return ToBring(
            pages, computing, self._tiers.device.free + max(self._tiers.reclaimable(tenant) - clean, 0)
        )

    def lay_out(self, session: CachedSession, keep: int, history: int, path: Path | None) -> Restore:
        """Make the chunk list cover the session's tokens, pinned; count sources and collect what is missing.

        The first ``keep`` tokens are those that the chunks in the list stand for.
        """
        size, total = self._size, len(session.tokens)
        chunks, held = -(-total // size), len(session.chunks)
        if held * size > keep:
            self._own_tail(session, keep, chunks)
        self._append(session, chunks - held)
        if path is not None:
            first = held - 1 if held and not session.chunks[held - 1].digest else held
            for index in range(first, len(path.digests)):
                self._shared.register(session.chunks[index], path.digests[index])
        on_device = on_host = 0
        missing: list[Range] = []
        for chunk in session.chunks[:held]:
            filled = chunk.filled
            if chunk.device != NOWHERE:
                on_device += filled
            else:
                on_host += filled
            if filled < size:
                _add(missing, chunk.index * size + filled, min((chunk.index + 1) * size, total))
        _add(missing, held * size, total)
        recomputed = sum(max(min(end, history) - start, 0) for start, end in missing)
        return Restore(tuple(missing), on_device, on_host, recomputed)

    def _own_tail(self, session: CachedSession, keep: int, total: int) -> None:
        """Let a running session's last chunk hold no more than what is left of the first ``keep`` tokens: other tokens
        will follow, which only a session's own chunks may take. It will have ``total`` chunks."""
        tail = session.chunks[-1]
        valid = max(min(tail.filled, keep - tail.index * self._size), 0)
        if tail.shared:
            self._make_private(session, tail, valid, total)
            return
        self._shared.unregister(tail)
        tail.filled = valid
        if valid == 0 and tail.host != NOWHERE:
            self._tiers.discard_host(tail)  # or an empty chunk would be copied in

    def bring_to_device(self, session: CachedSession, now: float) -> None:
        """Place every chunk of a session on the device that is not there; those that the host has are loaded."""
        absent = [chunk for chunk in session.chunks if chunk.device == NOWHERE]
        self._tiers.reserve(len(absent), now, session.tenant)
        for chunk in absent:
            if chunk.host != NOWHERE:
                self._tiers.load(chunk)
            else:
                self._tiers.place_on_device(chunk)
        session.table = np.fromiter((c.device for c in session.chunks), np.int32, len(session.chunks))
        self._index.touch(session)

    def follow(self, origin: CachedSession, session: CachedSession, tokens: TokenArray, now: float) -> int:
        """Let a running session take over another's context, all but the last of ``tokens``, as ``branch`` says.

        A page can be had for its tail. Returns where its missing KV begins.
        """
        full, filled = divmod(len(tokens) - 1, self._size)
        common = common_chunks(session, origin, full)
        for chunk in session.chunks[common:]:
            self._tiers.unpin(chunk)
        self._shared.cut(session, common)
        self._shared.adopt(session, origin.chunks[common:full])
        for chunk in session.chunks[common:]:
            self._tiers.pin(chunk)
        session.tokens, session.new_tokens = tokens.copy(), origin.new_tokens
        tail = self.append(session)
        self._tiers.reserve(1, now, session.tenant)
        source = origin.chunks[full] if full < len(origin.chunks) else None
        if source is not None and min(source.filled, filled) and self._tiers.can_duplicate(source):
            self._tiers.duplicate(source, tail)
            tail.filled = min(source.filled, filled)
        else:
            self._tiers.place_on_device(tail)
        session.table = np.fromiter((c.device for c in session.chunks), np.int32, len(session.chunks))
        return full * self._size + tail.filled

    def clear_out(self, session: CachedSession, *, forget: bool) -> None:
        """Of a session that runs no more keep what holds KV of its tokens, or nothing; its tokens are those then."""
        size, tokens = self._size, len(session.tokens)
        for chunk in list(session.chunks):
            if chunk.filled == 0 and chunk.place is not Place.DROPPED and not chunk.pins:
                self._tiers.discard(chunk)  # its recomputation never came: nothing worth copying out
        keep = 0 if forget else min(len(session.chunks), -(-tokens // size))
        if session.shared < keep:
            tail = session.chunks[keep - 1]
            tail.filled = min(tail.filled, tokens - tail.index * size)
        while keep and not self._has_kv(session.chunks[keep - 1]):
            keep -= 1
        if keep < len(session.chunks):
            self._shared.cut(session, keep)  # at once: what others share with it is not cut to pieces
        last = session.chunks[-1] if session.chunks else None
        known = 0 if last is None else last.index * size + last.filled
        session.tokens = session.tokens[:known].copy()
        if last is not None and last.filled < size:
            self._shared.unregister(last)

    def _has_kv(self, last: Chunk) -> bool:
        """Whether a session's last chunk holds KV of it: what is partly filled and shared, another is computing."""
        return last.filled > 0 and not (last.shared and last.filled < self._size)

    def append(self, session: CachedSession) -> Chunk:
        """A new, pinned chunk at the end of a running session's list; it has no page yet."""
        self._append(session, 1)
        return session.chunks[-1]

    def _append(self, session: CachedSession, count: int) -> None:
        first = len(session.chunks)
        session.chunks.extend(Chunk(index, pins=1, holder=session) for index in range(first, first + count))
        self._tiers.pin_new(session.tenant, count)
        self._index.touch(session)

    def _make_private(self, session: CachedSession, shared: Chunk, valid: int, total: int) -> None:
        """Copy on write: replace the shared chunk at the end of a running session's list, which will have ``total``
        chunks.

        Its first ``valid`` tokens are copied when the device has them and a page to spare beside those that this
        session still needs; otherwise they are missing and will be recomputed.
        """
        self._shared.leave(session, shared.index)
        private = self.append(session)
        spare = self._tiers.unpinned >= total - len(session.chunks)
        if valid > 0 and spare and self._tiers.can_duplicate(shared):
            self._tiers.reserve(1, session.last_active, session.tenant)
            self._tiers.duplicate(shared, private)
            private.filled = valid
        # Only now: the reservation must not have evicted what is to be copied.
        self._tiers.unpin(shared)


def _add(ranges: list[Range], start: int, end: int) -> None:
    """Append a range; ranges that touch become one, as each will be a span of its own."""
    if start >= end:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))


def common_chunks(session: CachedSession, origin: CachedSession, full: int) -> int:
    """How many of another's first ``full`` chunks a session has."""
    common = 0
    for mine, other in zip(session.chunks, origin.chunks[:full], strict=False):
        if mine is not other:
            break
        common += 1
    return common
