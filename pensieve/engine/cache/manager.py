"""``CacheManager``: the only writer of chunk places, pins and pages. No torch.

One request's life here: ``can_admit`` → ``admit`` (its chunks are pinned and placed on the device, copies are planned)
→ per step ``extend`` and, when it is launched, ``computed`` → ``release`` (its chunks are unpinned and stay). Between
turns the chunks of a session wander DEVICE → BOTH → HOST → DROPPED as ``Tiers`` needs room; the next ``admit`` brings
them back.

Any chunk that no running request pins can be evicted, at worst by dropping it. So "does it fit" is one comparison with
the number of pinned chunks, and a full tier can never stop a request that fits an empty one.
"""

from __future__ import annotations

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.check import check_cache
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Place, Range, Restore, TierTokens
from pensieve.engine.cache.index import EvictionIndex
from pensieve.engine.cache.policy import POLICIES, Policy
from pensieve.engine.cache.tiers import Occupancy, PlannedCopies, Tiers
from pensieve.engine.cost.model import CostModel
from pensieve.engine.plan import PageTable


class CacheManager:
    """Two-tier chunk cache of all sessions. Not thread-safe: the engine's thread owns it.

    ``policy``: takes the place of the one that ``config`` names; simulations have more of them.
    """

    def __init__(self, config: CacheConfig, cost: CostModel, policy: Policy | None = None) -> None:
        if config.device_chunks < 1 or config.host_chunks < 0 or config.chunk_tokens < 1:
            raise ValueError(f"impossible cache sizes: {config}")
        self.config = config
        self.index = EvictionIndex(POLICIES[config.policy]() if policy is None else policy, cost)
        self._tiers = Tiers(config, self.index, self._forget)
        self._sessions: dict[SessionKey, CachedSession] = {}
        self._running: dict[SessionKey, CachedSession] = {}

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context the device tier can hold at all."""
        return self.config.device_chunks * self.config.chunk_tokens

    @property
    def cached_sessions(self) -> int:
        return len(self._sessions)

    @property
    def swaps_in(self) -> bool:
        """Whether the plan in the making copies chunks in from the host."""
        return self._tiers.swaps_in

    def occupancy(self) -> Occupancy:
        """How full both tiers are, and what was dropped for want of room."""
        return self._tiers.occupancy()

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a context of this length occupies."""
        return -(-tokens // self.config.chunk_tokens)

    def can_admit(self, key: SessionKey, tokens: TokenArray, num_new: int, *, reserve: bool) -> bool:
        """Whether ``admit`` may be called now.

        With ``reserve``, more than ``decode_reserve`` of all device pages must stay unpinned afterwards: free,
        reclaimable, or evictable. (Evictable ones count because the plan that needs them copies their chunks out
        itself; insisting on a clean copy first would only add a step of waiting.)
        """
        session = self._sessions.get(key)
        pinned_by_others = 0
        if session is not None:
            if session.running or session.copying:
                return False
            keep = session.known(tokens, num_new)
            size = self.config.chunk_tokens
            # Shared chunks that are pinned already cost this request no page; one that it will write to does.
            pinned_by_others = sum(
                chunk.pins > 0 and chunk.filled == size and (chunk.index + 1) * size <= keep
                for chunk in session.chunks
            )
        left = self._tiers.unpinned - self.chunks_for(len(tokens)) + pinned_by_others
        return left > self.config.decode_reserve * self.config.device_chunks if reserve else left >= 0

    def page_table(self, key: SessionKey, tokens: int) -> PageTable:
        """Device pages of the first ``tokens`` positions of a running session; valid until it is released."""
        return self._running[key].table[: self.chunks_for(tokens)]

    def residency(self, key: SessionKey) -> TierTokens:
        """What is cached of a session, and where."""
        session = self._sessions.get(key)
        return TierTokens(0, 0) if session is None else session.residency()

    # -- one request -------------------------------------------------------------------------------------------------

    def admit(self, key: SessionKey, tokens: TokenArray, num_new: int, now: float) -> Restore:
        """Pin the context ``tokens`` of a session and place every chunk of it on the device.

        The cached part is what the cached token ids and ``tokens`` agree on, never more than the history (the first
        ``len(tokens) - num_new``), and never the last token: something has to be computed to get logits.

        ====================================  =====================================  ================================
        positions                             state before                           what happens
        ====================================  =====================================  ================================
        ``[0, keep)``, chunk on the device    valid up to ``chunk.filled``           hit
        ``[0, keep)``, chunk on the host      valid up to ``chunk.filled``           page + planned copy
        ``[0, keep)``, dropped or unfilled    missing                                page, to be recomputed
        ``[keep, len(tokens))``               chunk freed, or its tail cut           page, to be computed
        ====================================  =====================================  ================================
        """
        session = self._sessions.get(key) or self._add(key)
        keep = session.known(tokens, num_new)
        self._truncate(session, keep)
        session.tokens = tokens.copy()
        session.running = True
        self.index.came_back(session, num_new, now)
        self._running[key] = session
        # All before anything is evicted: a restore must not evict itself.
        for chunk in session.chunks:
            self._tiers.pin(chunk)
        if keep == len(tokens):
            keep -= 1  # the last token's logits are needed, however much of its KV is cached
        restore = self._lay_out(session, len(tokens), keep, len(tokens) - num_new)
        self._bring_to_device(session, now)
        session.table = np.fromiter((c.device for c in session.chunks), np.int32, len(session.chunks))
        return restore

    def extend(self, key: SessionKey, tokens: int, now: float) -> bool:
        """Make room on the device for ``tokens`` positions of a running session; False when every page is pinned."""
        session = self._running[key]
        while len(session.chunks) < self.chunks_for(tokens):
            if not self._tiers.unpinned:
                return False
            chunk = self._append(session)
            self._tiers.reserve(1, now)
            self._tiers.place_on_device(chunk)
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
                self._tiers.discard_host(chunk)

    def release(
        self, key: SessionKey, now: float, tokens: TokenArray | None = None, *, forget: bool = False
    ) -> None:
        """The request has ended. Its chunks stay, or go with ``forget``.

        ``tokens``: its context, where that has grown since ``admit``.
        """
        session = self._running.pop(key)
        if tokens is not None:
            session.tokens = tokens
        for chunk in session.chunks:
            self._tiers.unpin(chunk)
        session.running = False
        session.last_active = now
        self.index.left(session, now)
        while session.chunks and (forget or session.chunks[-1].filled == 0):
            self._cut_last(session)
        for chunk in session.chunks:
            if chunk.filled == 0 and chunk.place is not Place.DROPPED:
                self._tiers.discard(chunk)  # its recomputation never came: nothing worth copying out
        last = session.chunks[-1] if session.chunks else None
        known = 0 if last is None else last.index * self.config.chunk_tokens + last.filled
        session.tokens = session.tokens[:known].copy()
        if session.cached == 0:
            self._forget(session)

    def suspend(self, key: SessionKey, now: float, tokens: TokenArray) -> None:
        """``release`` a request that goes on later: its session is not idle, so the policy learns nothing from it."""
        session = self._running[key]
        self.release(key, now, tokens)
        self.index.suspended(session, now)

    # -- everything else that changes the cache ----------------------------------------------------------------------

    def swap_out_ahead(self, now: float, limit: int) -> None:
        """Below the watermark, plan background copies of the least valuable chunks (EuroSys §4.3.2)."""
        self._tiers.save_ahead(now, limit)

    def take_copies(self) -> PlannedCopies:
        """What was planned since the last call."""
        return self._tiers.take_copies()

    def complete_copies(self) -> None:
        """The plan with the copies of the last ``take_copies`` was launched."""
        self._tiers.complete()

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
            if session is None or session.running or session.copying:
                continue
            while session.chunks:
                freed += 0 if session.chunks[-1].shared else session.chunks[-1].filled
                self._cut_last(session)
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
            self._cut_last(session)
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
            chunk = session.chunks[index] if index < len(session.chunks) else self._append(session)
            valid = max(min(chunk.filled, keep - low), 0)
            # The part that is not valid will be written, which only a session's own chunks may be.
            if chunk.shared and valid < high - low:
                to_come = self.chunks_for(total) - len(session.chunks)
                chunk, valid = self._make_private(session, chunk, valid, to_come)
            elif not chunk.shared:
                chunk.filled = valid
            if valid == 0 and chunk.host != NOWHERE:
                self._tiers.discard_host(chunk)  # or an empty chunk would be copied in
            sources[chunk.place] += valid
            if low + valid < high:
                # Ranges that touch become one: each will be a span of its own.
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

        Its first ``valid`` tokens are copied when the device has them and a page to spare beside the ``to_come`` chunks
        that this session still needs; otherwise they are missing and will be recomputed.
        """
        private = Chunk(shared.index, owners=[session])
        self._tiers.pin(private)
        session.chunks[shared.index] = private
        shared.owners.remove(session)
        session.cached -= shared.place is not Place.DROPPED
        spare = self._tiers.unpinned >= to_come
        if shared.device != NOWHERE and valid > 0 and spare:
            self._tiers.reserve(1, session.last_active)
            self._tiers.duplicate(shared, private)
            private.filled = valid
        # Only now: the reservation must not have evicted what is to be copied.
        self._tiers.unpin(shared)
        return private, private.filled

    def _bring_to_device(self, session: CachedSession, now: float) -> None:
        """Place every chunk of a session on the device that is not there; those that the host has are loaded."""
        absent = [chunk for chunk in session.chunks if chunk.device == NOWHERE]
        self._tiers.reserve(len(absent), now)
        for chunk in absent:
            if chunk.host != NOWHERE:
                self._tiers.load(chunk)
            else:
                self._tiers.place_on_device(chunk)
        self.index.touch(session)

    def _append(self, session: CachedSession) -> Chunk:
        """A new, pinned chunk at the end of a running session's list; it has no page yet."""
        chunk = Chunk(len(session.chunks), owners=[session])
        session.chunks.append(chunk)
        self._tiers.pin(chunk)
        return chunk

    def _cut_last(self, session: CachedSession) -> None:
        """Take the last chunk out of a session's list; free its pages when nobody else has it."""
        chunk = session.chunks.pop()
        session.cached -= chunk.place is not Place.DROPPED
        chunk.owners.remove(session)
        self.index.touch(session)
        if not chunk.owners:
            chunk.filled = 0  # given up on purpose: not counted as dropped for want of room
            self._tiers.discard(chunk)

    # -- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every page has exactly one owner and all counts agree."""
        check_cache(self.config.chunk_tokens, self._sessions, self._running, self._tiers, self.index)
