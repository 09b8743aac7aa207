"""``CacheManager``: the only writer of chunk places, reference counts and slots. No torch.

One request's life here: ``can_admit`` → ``admit`` (chunks pinned, slots given, copies planned) → per step ``extend``
and, at commit, ``computed`` → ``release`` (unpinned, kept). Between its turns a session's chunks wander
DEVICE → BOTH → HOST → DROPPED as ``Tiers`` needs room, and back by the next ``admit``.

Any chunk that no running request pins can be evicted, at worst by dropping it. So "does it fit" is one comparison with
the number of pinned chunks, and a full tier can never stop a request that fits an empty one.
"""

from __future__ import annotations

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Place, common_prefix
from pensieve.engine.cache.index import EvictionIndex
from pensieve.engine.cache.policy import POLICIES
from pensieve.engine.cache.restore import Range, Restore, TierTokens
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.cost.model import CostModel
from pensieve.engine.plan import Copy, PageTable


class CacheManager:
    """Two-tier chunk cache of all sessions. Not thread-safe: the engine's thread owns it."""

    def __init__(self, config: CacheConfig, cost: CostModel) -> None:
        if config.device_chunks < 1 or config.host_chunks < 0 or config.chunk_tokens < 1:
            raise ValueError(f"impossible cache sizes: {config}")
        self.config = config
        self.index = EvictionIndex(POLICIES[config.policy](), cost)
        self.tiers = Tiers(config, self.index, self._forget)
        self._sessions: dict[SessionKey, CachedSession] = {}
        self._running: dict[SessionKey, CachedSession] = {}
        self._pinned = 0

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context the device tier can hold at all."""
        return self.config.device_chunks * self.config.chunk_tokens

    @property
    def cached_sessions(self) -> int:
        return len(self._sessions)

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a context of this length occupies."""
        return -(-tokens // self.config.chunk_tokens)

    def can_admit(self, key: SessionKey, tokens: TokenArray, num_new: int, *, reserve: bool) -> bool:
        """Whether ``admit`` may be called now.

        With ``reserve``, more than ``decode_reserve`` of all device slots must stay unpinned afterwards: free,
        reclaimable, or evictable. (Evictable ones count because the plan that needs them copies them out itself;
        insisting on a clean copy first would only add a step of waiting.)
        """
        session = self._sessions.get(key)
        pinned_by_others = 0
        if session is not None:
            if session.running or any(chunk.saving or chunk.loading for chunk in session.chunks):
                return False
            keep = min(common_prefix(session.tokens, tokens), len(tokens) - num_new)
            size = self.config.chunk_tokens
            pinned_by_others = sum(
                chunk.pins > 0 and chunk.filled == size and (chunk.index + 1) * size <= keep
                for chunk in session.chunks
            )
        left = self.config.device_chunks - self._pinned - self.chunks_for(len(tokens)) + pinned_by_others
        return left > self.config.decode_reserve * self.config.device_chunks if reserve else left >= 0

    def page_table(self, key: SessionKey, tokens: int) -> PageTable:
        """Device slots of the first ``tokens`` positions of a running session; valid until it is released."""
        return self._running[key].table[: self.chunks_for(tokens)]

    def residency(self, key: SessionKey) -> TierTokens:
        session = self._sessions.get(key)
        chunks = session.chunks if session is not None else []
        device = sum(chunk.filled for chunk in chunks if chunk.device != NOWHERE)
        host = sum(chunk.filled for chunk in chunks if chunk.place is Place.HOST)
        return TierTokens(device, host)

    # -- one request -------------------------------------------------------------------------------------------------

    def admit(self, key: SessionKey, tokens: TokenArray, num_new: int, now: float) -> Restore:
        """Pin the context ``tokens`` of a session and give every chunk of it a device slot.

        The cached part is what the cached token ids and ``tokens`` agree on, never more than the history (the first
        ``len(tokens) - num_new``), and never the last token: something has to be computed to get logits.

        ====================================  =====================================  ================================
        positions                             state before                           what happens
        ====================================  =====================================  ================================
        ``[0, keep)``, chunk on the device    valid up to ``chunk.filled``           hit
        ``[0, keep)``, chunk on the host      valid up to ``chunk.filled``           slot + planned copy
        ``[0, keep)``, dropped or unfilled    missing                                slot, to be recomputed
        ``[keep, len(tokens))``               chunk freed, or its tail cut           slot, to be computed
        ====================================  =====================================  ================================
        """
        session = self._sessions.get(key) or self._add(key)
        history = len(tokens) - num_new
        keep = min(common_prefix(session.tokens, tokens), history)
        self._truncate(session, keep)
        session.tokens = tokens.copy()
        session.running = True
        self.index.came_back(session, num_new, now)
        self._running[key] = session
        for chunk in session.chunks:  # before anything is evicted: a restore must not evict itself
            self._pin(chunk)
        if keep == len(tokens):
            keep -= 1
        restore = self._lay_out(session, len(tokens), keep, history)
        self._give_slots(session, now)
        session.table = np.fromiter((c.device for c in session.chunks), np.int32, len(session.chunks))
        return restore

    def extend(self, key: SessionKey, tokens: int, now: float) -> bool:
        """Give a running session slots up to ``tokens`` positions; False when every slot is pinned."""
        session = self._running[key]
        while len(session.chunks) < self.chunks_for(tokens):
            if self._pinned >= self.config.device_chunks:
                return False
            chunk = Chunk(len(session.chunks), owners=[session])
            session.chunks.append(chunk)
            self._pin(chunk)
            self.tiers.reserve(1, now)
            self.tiers.place_on_device(chunk)
            session.table = np.append(session.table, np.int32(chunk.device))
        return True

    def computed(self, key: SessionKey, start: int, end: int) -> None:
        """KV of positions ``[start, end)`` of a running session was written. Their host copies are stale now."""
        session = self._running[key]
        size = self.config.chunk_tokens
        for index in range(start // size, self.chunks_for(end)):
            chunk = session.chunks[index]
            low = max(start - index * size, 0)
            high = min(end - index * size, size)
            assert chunk.filled == low, (
                f"{key} chunk {index}: filled {chunk.filled}, but {low} was computed next"
            )
            assert not chunk.shared, f"{key} chunk {index}: a shared chunk was written"
            chunk.filled = high
            if chunk.host != NOWHERE:
                self.tiers.discard_host(chunk)

    def release(
        self, key: SessionKey, now: float, tokens: TokenArray | None = None, *, forget: bool = False
    ) -> None:
        """The request has ended: its chunks stay (or go, with ``forget``). ``tokens``: its context, where that grew."""
        session = self._running.pop(key)
        if tokens is not None:
            session.tokens = tokens
        for chunk in session.chunks:
            self._unpin(chunk)
        session.running = False
        session.last_active = now
        self.index.left(session, now)
        while session.chunks and (forget or session.chunks[-1].filled == 0):
            self._leave(session, session.chunks[-1])
        for chunk in session.chunks:
            if chunk.filled == 0 and chunk.place is not Place.DROPPED:
                self.tiers.discard(chunk)  # its recomputation never came: nothing worth copying out
        last = session.chunks[-1] if session.chunks else None
        known = 0 if last is None else last.index * self.config.chunk_tokens + last.filled
        session.tokens = session.tokens[:known].copy()
        if session.cached == 0:
            self._forget(session)

    def suspend(self, key: SessionKey, now: float, tokens: TokenArray) -> None:
        """As ``release``, of a request that goes on later: its session is not idle, and nothing is to be learned."""
        session = self._running[key]
        self.release(key, now, tokens)
        self.index.suspended(session, now)

    # -- everything else that changes the cache ----------------------------------------------------------------------

    def swap_out_ahead(self, now: float, limit: int) -> None:
        """Below the watermark, plan background copies of the least valuable chunks (EuroSys §4.3.2)."""
        self.tiers.save_ahead(now, limit)

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...], tuple[Copy, ...]]:
        """(swap_out, copies, swap_in) planned since the last call."""
        return self.tiers.take_copies()

    def complete_copies(self) -> None:
        """The plan with the copies of the last ``take_copies`` was executed."""
        self.tiers.complete()

    def fork(self, source: SessionKey, target: SessionKey, tokens: int, now: float) -> int:
        """Let a new session share the first ``tokens`` cached tokens of another; returns how many it shares."""
        origin = self._sessions.get(source)
        if origin is None or target in self._sessions:
            return 0
        size = self.config.chunk_tokens
        known = min(tokens, len(origin.tokens))
        if origin.running:  # its tail is being written
            unfilled = [chunk.index for chunk in origin.chunks if chunk.filled < size]
            known = min(known, (unfilled[0] if unfilled else len(origin.chunks)) * size)
        shared = origin.chunks[: self.chunks_for(known)]
        if not any(chunk.place is not Place.DROPPED for chunk in shared):
            return 0
        session = self._add(target)
        session.tokens = origin.tokens[:known].copy()
        session.last_active = now
        for chunk in shared:
            chunk.owners.append(session)
            session.chunks.append(chunk)
            session.cached += chunk.place is not Place.DROPPED
        self.index.touch(session)
        return known

    def evict(self, key: SessionKey | None = None) -> int:
        """Drop what idle sessions have cached (one, or all); returns the number of KV-tokens freed."""
        sessions = list(self._sessions.values()) if key is None else [self._sessions.get(key)]
        freed = 0
        for session in sessions:
            if session is None or session.running or any(c.saving or c.loading for c in session.chunks):
                continue
            while session.chunks:
                chunk = session.chunks[-1]
                freed += 0 if chunk.shared else chunk.filled
                self._leave(session, chunk)
            self._forget(session)
        return freed

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, key: SessionKey) -> CachedSession:
        session = CachedSession(key, self.index.add_row())
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _forget(self, session: CachedSession) -> None:
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self.index.remove(session)
            for chunk in session.chunks:
                chunk.owners.remove(session)
            session.chunks.clear()

    def _truncate(self, session: CachedSession, keep: int) -> None:
        """Cut a session's cache to its first ``keep`` tokens."""
        size = self.config.chunk_tokens
        while session.chunks and session.chunks[-1].index * size >= keep:
            self._leave(session, session.chunks[-1])
        if session.chunks and not session.chunks[-1].shared:
            tail = session.chunks[-1]
            tail.filled = min(tail.filled, keep - tail.index * size)

    def _lay_out(self, session: CachedSession, total: int, keep: int, history: int) -> Restore:
        """Make the chunk list cover ``total`` positions, pinned; count sources and collect what is missing."""
        size = self.config.chunk_tokens
        missing: list[Range] = []
        sources = {Place.DEVICE: 0, Place.BOTH: 0, Place.HOST: 0, Place.DROPPED: 0}
        for index in range(self.chunks_for(total)):
            low, high = index * size, min((index + 1) * size, total)
            if index == len(session.chunks):
                session.chunks.append(Chunk(index, owners=[session]))
                self._pin(session.chunks[index])
            chunk = session.chunks[index]
            valid = max(min(chunk.filled, keep - low), 0)
            if chunk.shared and valid < high - low:
                to_come = self.chunks_for(total) - len(session.chunks)
                chunk, valid = self._make_private(session, chunk, valid, to_come)
            elif not chunk.shared:
                chunk.filled = valid
            if valid == 0 and chunk.host != NOWHERE:
                self.tiers.discard_host(chunk)
            sources[chunk.place] += valid
            if low + valid < high:
                if missing and missing[-1][1] == low + valid:
                    missing[-1] = (missing[-1][0], high)
                else:
                    missing.append((low + valid, high))
        on_device = sources[Place.DEVICE] + sources[Place.BOTH]
        recomputed = history - on_device - sources[Place.HOST]
        return Restore(tuple(missing), on_device, sources[Place.HOST], recomputed)

    def _make_private(
        self, session: CachedSession, shared: Chunk, valid: int, to_come: int
    ) -> tuple[Chunk, int]:
        """Copy on write: replace a shared chunk in a running session's list; returns the new one and what it holds.

        Its first ``valid`` tokens are copied when the device has them and a slot to spare beside the ``to_come`` chunks
        that this session still needs; otherwise they are missing and will be recomputed.
        """
        private = Chunk(shared.index, owners=[session])
        self._pin(private)
        session.chunks[shared.index] = private
        shared.owners.remove(session)
        session.cached -= shared.place is not Place.DROPPED
        spare = self.config.device_chunks - self._pinned - to_come >= 0
        if shared.device != NOWHERE and valid > 0 and spare:
            self.tiers.reserve(1, session.last_active)
            self.tiers.place_on_device(private)
            self.tiers.copies.append(Copy(shared.device, private.device))
            private.filled = valid
        self._unpin(shared)
        return private, private.filled

    def _give_slots(self, session: CachedSession, now: float) -> None:
        absent = [chunk for chunk in session.chunks if chunk.device == NOWHERE]
        self.tiers.reserve(len(absent), now)
        for chunk in absent:
            if chunk.host != NOWHERE:
                self.tiers.load(chunk)
            else:
                self.tiers.place_on_device(chunk)
        self.index.touch(session)

    def _leave(self, session: CachedSession, chunk: Chunk) -> None:
        """Take the last chunk out of a session's list; free what it holds when nobody else has it."""
        session.chunks.pop()
        session.cached -= chunk.place is not Place.DROPPED
        chunk.owners.remove(session)
        self.index.touch(session)
        if not chunk.owners:
            chunk.filled = 0  # given up on purpose: not counted as dropped for want of room
            self.tiers.discard(chunk)

    def _pin(self, chunk: Chunk) -> None:
        self._pinned += chunk.pins == 0
        chunk.pins += 1
        if chunk.pins == 1:
            self.tiers.pinned(chunk)
            self._touch_owners(chunk)

    def _unpin(self, chunk: Chunk) -> None:
        chunk.pins -= 1
        self._pinned -= chunk.pins == 0
        if chunk.pins == 0:
            self.tiers.unpinned(chunk)
            self._touch_owners(chunk)

    def _touch_owners(self, chunk: Chunk) -> None:
        for owner in chunk.owners:
            self.index.touch(owner)

    # -- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every slot has exactly one owner and all counts agree."""
        from pensieve.engine.cache.check import check_manager

        check_manager(self, self._sessions, self._running, self._pinned)
