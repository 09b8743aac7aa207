"""``CacheManager``: the only writer of chunk places, pins and pages. No torch.

One request's life here: ``can_admit`` → ``admit`` (its chunks are pinned and placed on the device, copies are planned)
→ per step ``extend`` and ``computed`` → ``release`` (its chunks are unpinned and stay). Between turns the chunks of a
session wander DEVICE → BOTH → HOST → DROPPED as ``Tiers`` needs room; the next ``admit`` brings them back.

Any chunk that no running request pins can be evicted, at worst by dropping it. So "does it fit" is one comparison with
the number of pinned chunks, and neither a full tier nor a share stops a request that fits an empty one.

Sessions of one scope share what they have in common (``sharing``). A request finds a chunk by its address, whoever had
it computed, and becomes one more owner. Two that arrive together meet in the same way: the first has its chunks in the
index before any KV is there, a plan computes them once, and the second reads them in that same plan.
"""

from __future__ import annotations

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.check import check_cache
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Restore, SharedRun, TierTokens
from pensieve.engine.cache.digests import Digests, Path
from pensieve.engine.cache.eviction import EvictionIndex
from pensieve.engine.cache.layout import Layout, ToBring
from pensieve.engine.cache.occupancy import Occupancy, PlannedCopies
from pensieve.engine.cache.policy import POLICIES, UNKNOWN, Policy
from pensieve.engine.cache.sharing import SharedChunks
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.cost.model import CostModel
from pensieve.engine.plan import PageTable


class CacheManager:
    """Two-tier chunk cache of all sessions. Not thread-safe: the engine's thread owns it.

    ``policy``: takes the place of the one that ``config`` names; simulations have more of them. ``model``: names the
    weights that the KV is computed with.
    """

    def __init__(
        self, config: CacheConfig, cost: CostModel, policy: Policy | None = None, model: str = ""
    ) -> None:
        if config.device_chunks < 1 or config.host_chunks < 0 or config.chunk_tokens < 1:
            raise ValueError(f"impossible cache sizes: {config}")
        self.config = config
        self.index = EvictionIndex(POLICIES[config.policy]() if policy is None else policy, cost)
        self._tiers = Tiers(config, self.index, self._emptied)
        self.shares = self._tiers.shares
        digests = Digests(model, config.chunk_tokens)
        self._shared = SharedChunks(self.index, self._tiers, digests, config.chunk_tokens)
        self._layout = Layout(self._tiers, self._shared, self.index, config.chunk_tokens)
        self._sessions: dict[SessionKey, CachedSession] = {}
        self._running: dict[SessionKey, CachedSession] = {}

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context the device tier can hold at all."""
        return self.config.device_chunks * self.config.chunk_tokens

    @property
    def sessions(self) -> dict[SessionKey, CachedSession]:
        return self._sessions

    @property
    def unpinned_pages(self) -> int:
        """Device pages that no running request holds: free, or to be had by an eviction."""
        return self._tiers.unpinned

    @property
    def swaps_in(self) -> bool:
        """Whether the plan in the making copies chunks in from the host."""
        return self._tiers.swaps_in

    def occupancy(self) -> Occupancy:
        """How full both tiers are, and what was dropped for want of room."""
        return self._tiers.occupancy()

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a context of this length has."""
        return -(-tokens // self.config.chunk_tokens)

    def path(self, key: SessionKey, scope: str, tokens: TokenArray) -> Path | None:
        """The addresses of a context, for ``can_admit`` and ``admit``; None: it shares nothing."""
        shares = scope and self.config.prefix_sharing
        return self._shared.path(self._sessions.get(key), scope, tokens) if shares else None

    def can_admit(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        *,
        reserve: bool,
        path: Path | None = None,
        branches: int = 0,
        tenant: str = "",
    ) -> bool:
        """Whether ``admit`` may be called now, and then ``branch`` for so many others.

        With ``reserve``, more than ``decode_reserve`` of all device pages must stay unpinned beside what other tenants
        keep: free, reclaimable, or evictable (by a copy in the plan that needs them, which saves a step).
        """
        session = self._sessions.get(key)
        if session is not None and (session.running or session.copying):
            return False
        shared = self._layout.shared_with_others(session, tokens, num_new, path)
        if any(chunk.saving for chunk in shared):
            return False  # the plan that copies them out cannot copy them in
        # Those that are pinned already cost this request no page.
        pinned = sum(chunk.pins > 0 for chunk in shared)
        left = self._tiers.unpinned - self.chunks_for(len(tokens)) - branches + pinned
        keep = self.config.decode_reserve * self.config.device_chunks + self.shares.kept_from(tenant)
        return left > keep if reserve else left >= 0

    def holds(self, key: SessionKey) -> bool:
        """Whether anything is known of a session."""
        return key in self._sessions

    def to_bring(
        self, key: SessionKey, tokens: TokenArray, path: Path | None = None, *, tenant: str = ""
    ) -> ToBring:
        """What ``admit`` would have to bring to the device for a session that does not run."""
        session = self._sessions.get(key)
        known = session if session is not None and session.scope == _scope(path) else None
        return self._layout.to_bring(known, tokens, path, self.shares.number(tenant))

    def page_table(self, key: SessionKey, tokens: int) -> PageTable:
        """Device pages of the first ``tokens`` positions of a running session; valid until it is released."""
        return self._running[key].table[: self.chunks_for(tokens)]

    def residency(self, key: SessionKey) -> TierTokens:
        """What is cached of a session, and where."""
        session = self._sessions.get(key)
        return TierTokens(0, 0) if session is None else session.residency()

    # -- one request -------------------------------------------------------------------------------------------------

    def admit(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        now: float,
        path: Path | None = None,
        *,
        warm: bool = False,
        tenant: str = "",
    ) -> Restore:
        """Pin the context ``tokens`` of a session and place every chunk of it on the device.

        The cached part is what the cached token ids and ``tokens`` agree on, and behind it all chunks that are found
        under their addresses (``path``); never the last token: something has to be computed to get logits. Without
        addresses it is never more than the history, which is the first ``len(tokens) - num_new``.

        ``warm``: it is no turn of the session, wants no logits, and its policy hears nothing of it.

        ====================================  =====================================  ================================
        positions                             state before                           what happens
        ====================================  =====================================  ================================
        ``[0, keep)``, chunk on the device    valid up to ``chunk.filled``           hit
        ``[0, keep)``, chunk on the host      valid up to ``chunk.filled``           page + planned copy
        ``[0, keep)``, dropped or unfilled    missing                                page, to be recomputed
        ``[keep, len(tokens))``               chunk freed, or its tail cut           page, to be computed
        ====================================  =====================================  ================================
        """
        session = self._sessions.get(key)
        belongs = _scope(path), self.shares.number(tenant)
        if session is None or (session.scope, session.tenant) != belongs:
            if session is not None:
                self._forget(session)
            session = self._add(key, *belongs)
        keep = self._layout.find(session, tokens, num_new, path)
        session.tokens = tokens.copy()
        session.running, session.warming = True, warm
        if not warm:
            self.index.came_back(session, num_new, now)
        self._running[key] = session
        # All before anything is evicted: a restore must not evict itself.
        for chunk in session.chunks:
            self._tiers.pin(chunk)
        if keep == len(tokens) and not warm:
            keep -= 1  # the last token's logits are needed, however much of its KV is cached
        restore = self._layout.lay_out(session, keep, len(tokens) - num_new, path)
        self._layout.bring_to_device(session, now)
        return restore

    def branch(self, source: SessionKey, target: SessionKey, tokens: TokenArray, now: float) -> int | None:
        """Let another request go on from the context of a running one, all but the last of its ``tokens``.

        Full chunks are shared, the partly filled one is copied as far as the device has it. The target may be running:
        then what it had beyond what both share is given up. Called while a plan is made, before the source's work for
        it is taken. Returns where the target's missing KV begins, provided the source's is computed first; None, and
        nothing has changed, when there is no page for the tail.
        """
        origin, session = self._running[source], self._running.get(target)
        if session is None:
            if not self._tiers.unpinned:
                return None
            if target in self._sessions:
                self._forget(self._sessions[target])
            session = self._running[target] = self._add(target, origin.scope, origin.tenant)
            session.aside = session.running = True
        return self._layout.follow(origin, session, tokens, now)

    def extend(self, key: SessionKey, tokens: int, now: float) -> bool:
        """Make room on the device for ``tokens`` positions of a running session; False when every page is pinned."""
        session = self._running[key]
        while len(session.chunks) < self.chunks_for(tokens):
            if not self._tiers.unpinned:
                return False
            chunk = self._layout.append(session)
            self._tiers.reserve(1, now, session.tenant)
            self._tiers.place_on_device(chunk)
            session.table = np.append(session.table, np.int32(chunk.device))
        return True

    def computed(self, key: SessionKey, start: int, end: int) -> None:
        """The plan in the making writes KV of positions ``[start, end)`` of a running session.

        Host copies of what it writes to are stale when it is launched. Whoever is admitted into the same plan finds the
        KV there: in each layer all writes of a step come before its reads.
        """
        session = self._running[key]
        size = self.config.chunk_tokens
        for index in range(start // size, self.chunks_for(end)):
            chunk = session.chunks[index]
            low, high = max(start - index * size, 0), min(end - index * size, size)
            assert chunk.filled == low, (
                f"{key} chunk {index}: filled {chunk.filled}, but {low} was computed next"
            )
            shared = chunk.shared
            assert not shared or (index + 1) * size <= len(session.tokens), (
                f"{key} chunk {index}: a shared chunk was written to by one whose context ends in it"
            )
            chunk.filled = high
            if shared or chunk.host != NOWHERE:  # a decode's chunk is neither
                self._tiers.written(chunk)

    def release(
        self,
        key: SessionKey,
        now: float,
        tokens: TokenArray | None = None,
        *,
        forget: bool = False,
        hints: Hints | None = None,
    ) -> None:
        """The request has ended. Its chunks stay, or go with ``forget``.

        ``tokens``: its context, where that has grown since ``admit``; or the part of it that its KV stands for.
        ``hints``: what its turn said of the next one.
        """
        session = self._running.pop(key)
        if tokens is not None:
            session.tokens = tokens
        for chunk in session.chunks:
            self._tiers.unpin(chunk)
        session.running = False
        session.last_active = now
        if session.aside:
            session.kind = UNKNOWN
        elif session.warming:
            self.index.told(session, hints)
        else:
            self.index.left(session, now, hints)
        self.index.touch(session)
        self._layout.clear_out(session, forget=forget)
        if session.scope and self._sessions.get(key) is session:
            self._shared.address(session)
        if not session.remembered:
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

    def replace(self, key: SessionKey, by: SessionKey) -> bool:
        """Let what is cached under one key be the session's of another; False when it is not there, or in use."""
        session, other = self._sessions.get(key), self._sessions.get(by)
        if other is None or other is session or other.running or (session is not None and session.running):
            return False
        if session is not None:
            other.last_active, other.new_tokens = session.last_active, session.new_tokens
            other.kind, other.hint = session.kind, session.hint
            self._forget(session)
        del self._sessions[by]
        other.key, other.aside = key, False
        self._sessions[key] = other
        self.index.touch(other)
        return True

    def evict(self, key: SessionKey | None = None) -> int:
        """Drop what idle sessions have cached (one, or all); returns the number of KV-tokens freed."""
        freed = 0
        for session in list(self._sessions.values()) if key is None else [self._sessions.get(key)]:
            if session is not None and not (session.running or session.copying):
                freed += sum(chunk.filled for chunk in session.own)
                self._forget(session)
        return freed

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, key: SessionKey, scope: str, tenant: int) -> CachedSession:
        session = CachedSession(key, self.index.add_row(), scope=scope, tenant=tenant)
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _forget(self, session: CachedSession) -> None:
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self._shared.cut(session, 0)
            self.index.remove(session)

    def _emptied(self, holder: CachedSession | SharedRun) -> None:
        """The last chunk of a holder is dropped: forget the sessions that have nothing left."""
        for session in [holder] if isinstance(holder, CachedSession) else list(holder.owners):
            if not session.running and not session.remembered:
                self._forget(session)

    # -- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every page has exactly one owner and all counts agree."""
        check_cache(
            self.config.chunk_tokens, self._sessions, self._running, self._tiers, self.index, self._shared
        )


def _scope(path: Path | None) -> str:
    return "" if path is None else path.scope
