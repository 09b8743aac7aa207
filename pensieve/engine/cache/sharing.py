"""Ownership of chunks by several sessions: the only writer of chunk lists, holders and addresses.

It creates chunks, and frees those that no session owns any more. It owns ``holder``, ``digest`` and ``other`` of a
``Chunk``, all of a ``SharedRun``, and ``chunks`` and ``shared`` of a ``CachedSession``.

A chunk with an address is in the index as soon as a request wants it, whether its KV is present, missing or being
computed. So two chunks never have the same address, and whatever one session computes, swaps in or loses, all of its
owners gain or lose. Generated tokens get their addresses later, when they are known (``CacheManager.release``).

Addresses of full chunks are a chain of hashes over token ids, so an address names a chunk and all chunks
before it: ``digest(chunk i) = H(digest(chunk i - 1), its token ids)``. The chain begins with H(model, scope),
keyed with a random secret of this process. So no client can compute, probe or hit an address of another
scope, and an address reveals nothing about how KV is stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from pensieve.core import TokenArray
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, OtherSlice, SharedRun, Slice
from pensieve.engine.cache.eviction import EvictionIndex
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.plan import PENDING

_BYTES: Final = 16
"""128 bits: a collision is less likely than an undetected memory error."""


@dataclass(frozen=True, slots=True)
class PrefixPath:
    """Addresses of a context's leading full chunks within a scope."""

    scope: str
    digests: tuple[bytes, ...]


class Digests:
    """Computes the addresses of one engine's chunks. ``model`` names the weights that KV is computed with."""

    def __init__(self, model: str, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._model = model.encode()
        self._secret = secrets.token_bytes(32)
        self._roots: dict[str, bytes] = {}

    def root(self, scope: str) -> bytes:
        found = self._roots.get(scope)
        if found is None:
            salted = blake2b(self._model, digest_size=_BYTES, key=self._secret)
            salted.update(b"\0" + scope.encode())
            found = self._roots[scope] = salted.digest()
        return found

    def extended(self, scope: str, known: Sequence[bytes], tokens: TokenArray, chunks: int) -> list[bytes]:
        """Return the addresses of the first ``chunks`` chunks of ``tokens``; ``known``: the leading ones."""
        found = list(known)
        width = self._size * 4
        start = len(found) * self._size
        data = np.ascontiguousarray(tokens[start : chunks * self._size], dtype="<i4").tobytes()
        last = found[-1] if found else self.root(scope)
        for at in range(0, len(data), width):
            last = blake2b(last + data[at : at + width], digest_size=_BYTES).digest()
            found.append(last)
        return found


class SharedChunks:
    """The chunks of all sessions, by owner and by address. See the module docstring."""

    def __init__(self, index: EvictionIndex, tiers: Tiers, model: str) -> None:
        self._index = index
        self._tiers = tiers
        self._digests = Digests(model, tiers.chunk_tokens)
        self._size = tiers.chunk_tokens
        self._two_groups = len(tiers.device.groups) > 1
        self._by_digest: dict[bytes, Chunk] = {}

    # -- addresses ---------------------------------------------------------------------------------------------------

    def find(self, digests: Sequence[bytes], start: int) -> list[Chunk]:
        """Return the chunks at the addresses from ``start`` on, up to the first that is unknown."""
        found: list[Chunk] = []
        for digest in digests[start:]:
            chunk = self._by_digest.get(digest)
            if chunk is None:
                break
            found.append(chunk)
        return found

    def register(self, chunk: Chunk, digest: bytes) -> None:
        """Enter a chunk into the index under its address."""
        assert digest not in self._by_digest, f"chunk {chunk.index}: its address is taken"
        chunk.digest = digest
        self._by_digest[digest] = chunk

    def unregister(self, chunk: Chunk) -> None:
        """Remove a chunk's address, if any, before the chunk is freed or holds other tokens."""
        if chunk.digest:
            del self._by_digest[chunk.digest]
            chunk.digest = b""

    def path(self, session: CachedSession | None, scope: str, tokens: TokenArray) -> PrefixPath:
        """Return the addresses of a context, without the chunk of its last token: that token must be
        computed, so its chunk is not shared. Addresses that the session already has are not hashed again."""
        chunks = max(len(tokens) - 1, 0) // self._size
        known: list[bytes] = []
        if session is not None and session.scope == scope:
            for chunk in session.chunks[: min(session.matching_tokens(tokens) // self._size, chunks)]:
                if not chunk.digest:
                    break
                known.append(chunk.digest)
        return PrefixPath(scope, tuple(self._digests.extended(scope, known, tokens, chunks)))

    def count_addressed(self, session: CachedSession, full: int) -> int:
        """Return how many of a session's first ``full`` chunks have an address; those are the leading ones."""
        while full > 0 and not session.chunks[full - 1].digest:
            full -= 1
        return full

    def assign_addresses(self, session: CachedSession) -> int:
        """Assign addresses to an idle session's full chunks; return how many leading chunks have one.

        A chunk whose address already names another chunk is merged into it (two requests may generate the
        same tokens). The merge waits while the other is being copied or several sessions own the chunks
        without an address.
        """
        full = self._settled(session) // self._size
        at = self.count_addressed(session, full)
        if at == full:
            return at
        known = [chunk.digest for chunk in session.chunks[:at]]
        digests = self._digests.extended(session.scope, known, session.tokens, full)
        doubles = self.find(digests, at)
        if doubles:
            if session.shared > at or any(chunk.copying for chunk in doubles):
                return at
            self._fold(session, at, doubles)
        for index in range(at + len(doubles), full):
            self.register(session.chunks[index], digests[index])
        return full

    def _settled(self, session: CachedSession) -> int:
        """Return how many leading tokens of a session have a known id."""
        # The last sampled tokens may still be unknown if the request was cancelled.
        tail = session.tokens[-2:]
        return len(session.tokens) - int((tail == PENDING).sum())

    def _fold(self, session: CachedSession, at: int, doubles: Sequence[Chunk]) -> None:
        """Replace a session's own chunks from ``at`` on by ``doubles``, which hold the same tokens."""
        end = at + len(doubles)
        mine, rest = session.chunks[at:end], session.chunks[end:]
        for own, double in zip(mine, doubles, strict=True):
            self._merge(own, double)
            if own.other is not None and double.other is not None:
                self._merge(own.other, double.other)
        del session.chunks[at:]
        self.adopt(session, doubles)
        session.chunks.extend(rest)
        self._index.touch(session)

    def _merge(self, own: Slice, double: Slice) -> None:
        """Free a slice, but leave its device page to its double if only this slice has one."""
        # Not next to a partial host copy, which would then pass for a complete one.
        whole = double.host == NOWHERE or double.filled == self._size
        if double.device == NOWHERE and own.device != NOWHERE and whole and own.filled == self._size:
            self._tiers.move_page(own, double)
        self._tiers.free(own)

    # -- owners ------------------------------------------------------------------------------------------------------

    def append(self, session: CachedSession, count: int) -> list[Chunk]:
        """Append ``count`` new chunks of its own, without pages, to a session's list."""
        first = len(session.chunks)
        chunks = [Chunk(index=index, holder=session) for index in range(first, first + count)]
        if self._two_groups:
            for chunk in chunks:
                chunk.other = OtherSlice(chunk=chunk)
        session.chunks.extend(chunks)
        self._index.touch(session)
        return chunks

    def adopt(self, session: CachedSession, chunks: Sequence[Chunk]) -> None:
        """Append chunks of other sessions to a session's list. All chunks that it has must be shared already."""
        assert session.shared == len(session.chunks), f"{session.key}: own chunks before shared ones"
        at = 0
        while at < len(chunks):
            run = self._run_up_to(chunks[at], chunks[-1].index + 1)
            run.owners[session] = None
            self._index.add_owner(run, session)
            session.chunks.extend(run.own_chunks)
            session.shared += len(run.own_chunks)
            at += len(run.own_chunks)

    def disown(self, session: CachedSession, keep: int) -> None:
        """Make a session give up its shared chunks after the first ``keep``. It must have no chunks of its own."""
        while session.shared > keep:
            run = session.chunks[session.shared - 1].holder
            assert isinstance(run, SharedRun)
            if run.first_index < keep:
                self._split(run, keep)
            del run.owners[session]
            self._index.remove_owner(run, session)
            session.shared -= len(run.own_chunks)
            del session.chunks[session.shared :]
            if len(run.owners) == 1:
                self._dissolve(run)

    def truncate(self, session: CachedSession, keep: int) -> None:
        """Truncate a session's list to ``keep`` chunks; free those that no other session owns."""
        while len(session.chunks) > max(keep, session.shared):
            chunk = session.chunks.pop()
            self.unregister(chunk)
            self._tiers.free(chunk)
            if chunk.other is not None:
                self._tiers.free(chunk.other)
        self.disown(session, keep)
        self._index.touch(session)

    def _run_up_to(self, first: Chunk, end: int) -> SharedRun:
        """Return the run that begins with ``first``, created or split so that it ends at chunk ``end`` at the
        latest."""
        holder = first.holder
        if isinstance(holder, CachedSession):
            return self._share(holder, end)
        assert holder.own_chunks[0] is first, f"chunk {first.index}: adopted from the middle of a run"
        if holder.first_index + len(holder.own_chunks) > end:
            return self._split(holder, end)
        return holder

    def _share(self, owner: CachedSession, end: int) -> SharedRun:
        """Turn a session's own chunks up to ``end`` into a run."""
        chunks = owner.chunks[owner.shared : end]
        run = self._new_run(chunks, {owner: None})
        owner.shared += len(chunks)
        self._index.touch(owner)
        return run

    def _split(self, run: SharedRun, end: int) -> SharedRun:
        """Split off a run's leading chunks, up to ``end``, into a new run and return it."""
        at = end - run.first_index
        upper = self._new_run(run.own_chunks[:at], dict(run.owners))
        del run.own_chunks[:at]
        self._index.touch(run)
        return upper

    def _dissolve(self, run: SharedRun) -> None:
        """Give the chunks of a run with one owner left to that owner."""
        (owner,) = run.owners
        assert owner.shared == run.first_index + len(run.own_chunks), (
            f"{owner.key}: shares chunks after the end of its last run"
        )
        self._index.remove_owner(run, owner)
        self._index.remove(run)
        owner.shared = run.first_index
        for chunk in run.own_chunks:
            chunk.holder = owner
        self._index.touch(owner)

    def _new_run(self, chunks: list[Chunk], owners: dict[CachedSession, None]) -> SharedRun:
        run = SharedRun(self._index.add_row(), chunks, owners, next(iter(owners)).tenant)
        for chunk in chunks:
            chunk.holder = run
        self._index.attach(run)
        for owner in owners:
            self._index.add_owner(run, owner)
        return run

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Assert that the index maps exactly the addresses of the chunks in use."""
        addressed = {chunk.digest: chunk for chunk in chunks if chunk.digest}
        assert addressed == self._by_digest, "the index of addresses is wrong"
