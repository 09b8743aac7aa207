"""``CacheManager``: decides what each request finds, restores and leaves behind. No torch.

One request's life here: ``can_admit`` → ``admit`` (its chunks are pinned and placed on the device, copies are planned)
→ per step ``extend`` and ``computed`` → ``release`` (its chunks are unpinned and stay). Between turns the chunks of a
session wander DEVICE → BOTH → HOST → DROPPED as ``Evictor`` needs room; the next ``admit`` brings them back.

Each piece of state has one writer:

================  =================================================================  =============================
who               what it alone writes                                               its caller
================  =================================================================  =============================
``Tiers``         where a chunk is, what it holds, its pins; pages, planned copies   the other three
``SharedChunks``  who owns a chunk, its address; the chunk lists of sessions         ``CacheManager``
``Evictor``       nothing: it decides whose pages are taken                          ``CacheManager``
``CacheManager``  which sessions there are and run, their tokens and page tables     the engine
================  =================================================================  =============================

Any chunk that no running request pins can be evicted, at worst by dropping it. So "does it fit" is one comparison with
the number of pinned chunks, and neither a full tier nor a share stops a request that fits an empty one.

Sessions of one scope share what they have in common (``sharing``). A request finds a chunk by its address, whichever
session had it computed, and its session becomes one more owner. Two that arrive together meet in the same way: the
first has its chunks in the index before any KV is there, a plan computes them once, and the second reads them in that
plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.check import check_cache
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Range, Restore, TierTokens
from pensieve.engine.cache.eviction import EvictionIndex, reclaim_kind
from pensieve.engine.cache.evictor import Evictor
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.policy import POLICIES, UNKNOWN, Policy
from pensieve.engine.cache.sharing import PrefixPath, SharedChunks
from pensieve.engine.cache.tiers import Occupancy, PlannedCopies, Tiers
from pensieve.engine.cost.model import CostModel
from pensieve.engine.plan import PageTable


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What it takes to have a context on the device."""

    pages: int
    """Device pages, for what is on the host and what is in no tier."""
    needs_compute: bool
    """Whether anything has to be computed."""
    room: int
    """Device pages that can be had for it and cost nothing: free, or of others' chunks that the host has too."""


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
        self._size = config.chunk_tokens
        self._tiers = Tiers(config.device_chunks, config.host_chunks, self._size, self.index.touch)
        self._shared = SharedChunks(self.index, self._tiers, model)
        self._evictor = Evictor(config, self._tiers, self.index)
        self.shares = self._evictor.shares
        self._sessions: dict[SessionKey, CachedSession] = {}
        self._running: dict[SessionKey, CachedSession] = {}

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context the device tier can hold at all."""
        return self.config.device_chunks * self._size

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
        tiers, size = self._tiers, self._size
        return Occupancy(
            device_free=tiers.device.free * size,
            device_reclaimable=self._evictor.reclaimable() * size,
            device_used=tiers.device.used * size,
            host_free=tiers.host.free * size,
            host_used=tiers.host.used * size,
            dropped=tiers.dropped_tokens,
        )

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a context of this length has."""
        return -(-tokens // self._size)

    def prefix_path(self, key: SessionKey, scope: str, tokens: TokenArray) -> PrefixPath | None:
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
        path: PrefixPath | None = None,
        branches: int = 0,
        tenant: str = "",
    ) -> bool:
        """Whether ``admit`` may be called now, and then ``branch`` for ``branches`` others.

        With ``reserve``, more than ``decode_reserve`` of all device pages must stay unpinned beside what other tenants
        keep: free, reclaimable, or evictable (by a copy in the plan that needs them, which saves a step).
        """
        session = self._sessions.get(key)
        if session is not None and (session.running or session.copying):
            return False
        common = self._in_common(session, tokens, num_new, path)
        if any(chunk.saving for chunk in common):
            return False  # the plan that copies them out cannot copy them in
        # Those that are pinned already cost this request no page.
        pinned = sum(chunk.pins > 0 for chunk in common)
        left = self._tiers.unpinned - self.chunks_for(len(tokens)) - branches + pinned
        keep = self.config.decode_reserve * self.config.device_chunks + self.shares.pages_withheld_from(
            tenant
        )
        return left > keep if reserve else left >= 0

    def has_session(self, key: SessionKey) -> bool:
        """Whether anything is known of a session."""
        return key in self._sessions

    def restore_cost(
        self, key: SessionKey, tokens: TokenArray, path: PrefixPath | None = None, *, tenant: str = ""
    ) -> RestoreCost:
        """What ``admit`` would have to bring to the device for a session that does not run."""
        size = self._size
        keep, chunks = 0, list[Chunk]()
        session = self._sessions.get(key)
        if session is not None and session.scope == _scope(path):
            keep = self._kept(session, tokens, 0, path)
            chunks = session.chunks[: self.chunks_for(keep)]
        found = [] if path is None else self._shared.find(path.digests, keep // size)
        if found:
            chunks = chunks[: keep // size] + found
            keep = len(chunks) * size
        pages = self.chunks_for(len(tokens)) - len(chunks)
        computing, clean = keep < len(tokens), 0
        for chunk in chunks:
            low = chunk.index * size
            copied = chunk.shared and low + size > keep  # on write, or recomputed
            pages += copied or chunk.device == NOWHERE
            computing |= copied or min(chunk.filled, keep - low) < min(size, len(tokens) - low)
            clean += reclaim_kind(chunk) is Reclaim.PAGE
        reclaimable = self._evictor.reclaimable(self.shares.number(tenant))
        return RestoreCost(pages, computing, self._tiers.device.free + max(reclaimable - clean, 0))

    def page_table(self, key: SessionKey, tokens: int) -> PageTable:
        """Device pages of the first ``tokens`` positions of a running session; valid until it is released."""
        return self._running[key].table[: self.chunks_for(tokens)]

    def residency(self, key: SessionKey) -> TierTokens:
        """What is cached of a session, and where."""
        session = self._sessions.get(key)
        return TierTokens(0, 0) if session is None else session.residency()

    def _kept(self, session: CachedSession, tokens: TokenArray, num_new: int, path: PrefixPath | None) -> int:
        """How many leading ``tokens`` the session has itself; without addresses never more than the history."""
        known = session.matching_tokens(tokens)
        return known if path is not None else min(known, len(tokens) - num_new)

    def _in_common(
        self, session: CachedSession | None, tokens: TokenArray, num_new: int, path: PrefixPath | None
    ) -> list[Chunk]:
        """The chunks that a context would have in common with others."""
        mine: list[Chunk] = []
        full = addressed = 0
        if session is not None and session.scope == _scope(path):
            full = self._kept(session, tokens, num_new, path) // self._size
            addressed = self._shared.count_addressed(session, full)
            mine = session.chunks[: min(full, session.shared)]
        others = [] if path is None else self._shared.find(path.digests, addressed)
        # If there are doubles of its own chunks that have no address yet, these give way to them.
        return mine[: addressed if others else full] + others

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        now: float,
        path: PrefixPath | None = None,
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
                self._remove(session)
            session = self._add(key, *belongs)
        keep = self._find(session, tokens, num_new, path)
        session.tokens = tokens.copy()
        session.running, session.warming = True, warm
        if not warm:
            self.index.on_turn_start(session, num_new, now)
        self._running[key] = session
        self._tiers.pin(session.chunks)  # all before anything is evicted: a restore must not evict itself
        if keep == len(tokens) and not warm:
            keep -= 1  # the last token's logits are needed, however much of its KV is cached
        restore = self._lay_out(session, keep, len(tokens) - num_new, path)
        self._bring_to_device(session, now)
        return restore

    def _find(self, session: CachedSession, tokens: TokenArray, num_new: int, path: PrefixPath | None) -> int:
        """Cut a session to what it has of ``tokens`` and let it own what others have behind that; returns to where."""
        size = self._size
        keep = self._kept(session, tokens, num_new, path)
        if path is None:
            self._shared.truncate(session, self.chunks_for(keep))
            return keep
        addressed = self._shared.assign_addresses(session)
        if addressed < keep // size:  # what could not be folded into its double gives way to it
            keep = addressed * size
        full = keep // size
        self._shared.truncate(session, self.chunks_for(keep))
        found = self._shared.find(path.digests, full)
        if found:
            self._shared.truncate(session, full)  # a partly filled tail, to one that may hold more
            self._shared.adopt(session, found)
            keep = (full + len(found)) * size
        return keep

    def _lay_out(self, session: CachedSession, keep: int, history: int, path: PrefixPath | None) -> Restore:
        """Make the chunk list cover the session's tokens, pinned; count sources and collect what is missing.

        The first ``keep`` tokens are those that the chunks in the list stand for.
        """
        size, total = self._size, len(session.tokens)
        chunks, held = self.chunks_for(total), len(session.chunks)
        if held * size > keep:
            self._own_tail(session, keep, chunks)
        self._tiers.pin(self._shared.append(session, chunks - held))
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
        valid = max(keep - tail.index * self._size, 0)
        if tail.shared:
            self._own_copy(session, tail, min(tail.filled, valid), total)
        else:
            self._shared.unregister(tail)
            self._tiers.truncate(tail, valid)

    def _own_copy(self, session: CachedSession, shared: Chunk, valid: int, total: int) -> None:
        """Copy on write: replace the shared chunk at the end of a running session's list, which will have ``total``
        chunks.

        Its first ``valid`` tokens are copied when the device has them and a page to spare beside those that this
        session still needs; otherwise they are missing and will be recomputed.
        """
        self._shared.disown(session, shared.index)
        (own,) = self._shared.append(session, 1)
        self._tiers.pin((own,))
        spare = self._tiers.unpinned >= total - len(session.chunks)
        if valid > 0 and spare and self._tiers.can_copy(shared):
            self._evictor.reserve(1, session.last_active, session.tenant)
            self._tiers.copy(shared, own, valid)
        # Only now: the reservation must not have evicted what is to be copied.
        self._tiers.unpin((shared,))

    def _bring_to_device(self, session: CachedSession, now: float) -> None:
        """Place every chunk of a session on the device that is not there; those that the host has are loaded."""
        absent = [chunk for chunk in session.chunks if chunk.device == NOWHERE]
        self._reserve(len(absent), now, session.tenant)
        for chunk in absent:
            if chunk.host != NOWHERE:
                self._tiers.load(chunk)
            else:
                self._tiers.place(chunk)
        session.table = _page_table(session)
        self.index.touch(session)

    def _reserve(self, pages: int, now: float, tenant: int) -> None:
        """Make device pages free, which the caller knows can be had, and remove the sessions that this empties."""
        self._evictor.reserve(pages, now, tenant)
        self._remove_emptied()

    # -- a running request -------------------------------------------------------------------------------------------

    def branch(self, source: SessionKey, target: SessionKey, tokens: TokenArray, now: float) -> int | None:
        """Let another request go on from the context of a running one, all but the last of its ``tokens``.

        Full chunks are shared, the partly filled one is copied as far as the device has it. The target may be running:
        then what it had beyond what both share is freed. Called while a plan is made, before the source's work for
        it is taken. Returns where the target's missing KV begins, provided the source's is computed first; None, and
        nothing has changed, when there is no page for the tail.
        """
        origin, session = self._running[source], self._running.get(target)
        if session is None:
            if not self._tiers.unpinned:
                return None
            if target in self._sessions:
                self._remove(self._sessions[target])
            session = self._running[target] = self._add(target, origin.scope, origin.tenant)
            session.is_candidate = session.running = True
        tiers = self._tiers
        full, filled = divmod(len(tokens) - 1, self._size)
        common = _common_chunks(session, origin, full)
        tiers.unpin(session.chunks[common:])
        self._shared.truncate(session, common)
        self._shared.adopt(session, origin.chunks[common:full])
        tiers.pin(session.chunks[common:])
        session.tokens, session.new_tokens = tokens.copy(), origin.new_tokens
        (tail,) = self._shared.append(session, 1)
        tiers.pin((tail,))
        self._reserve(1, now, session.tenant)
        last = origin.chunks[full] if full < len(origin.chunks) else None
        if last is not None and min(last.filled, filled) and tiers.can_copy(last):
            tiers.copy(last, tail, min(last.filled, filled))
        else:
            tiers.place(tail)
        session.table = _page_table(session)
        return full * self._size + tail.filled

    def extend(self, key: SessionKey, tokens: int, now: float) -> bool:
        """Make room on the device for ``tokens`` positions of a running session; False when every page is pinned."""
        session = self._running[key]
        while len(session.chunks) < self.chunks_for(tokens):
            if not self._tiers.unpinned:
                return False
            (chunk,) = self._shared.append(session, 1)
            self._tiers.pin((chunk,))
            self._reserve(1, now, session.tenant)
            self._tiers.place(chunk)
            session.table = np.append(session.table, np.int32(chunk.device))
        return True

    def computed(self, key: SessionKey, start: int, end: int) -> None:
        """The plan in the making writes KV of positions ``[start, end)`` of a running session.

        Host copies of what it writes to are stale when it is launched. A request that is admitted into the same plan
        finds the KV there: in each layer all writes of a step come before its reads.
        """
        session = self._running[key]
        first, last = start // self._size, self.chunks_for(end)
        assert session.shared <= first or min(last, session.shared) * self._size <= len(session.tokens), (
            f"{key}: its context ends in a shared chunk that it writes to, of {first} to {last - 1}"
        )
        self._tiers.fill(session.chunks[first:last], start, end)

    def release(
        self,
        key: SessionKey,
        now: float,
        tokens: TokenArray | None = None,
        *,
        free_kv: bool = False,
        hints: Hints | None = None,
    ) -> None:
        """The request has ended. Its chunks stay, or go with ``forget``.

        ``tokens``: its context, where that has grown since ``admit``; or the part of it that its KV stands for.
        ``hints``: what its turn said of the next one.
        """
        session = self._running.pop(key)
        if tokens is not None:
            session.tokens = tokens
        self._tiers.unpin(session.chunks)
        session.running = False
        session.last_active = now
        if session.is_candidate:
            session.kind = UNKNOWN
        elif session.warming:
            self.index.set_hints(session, hints)
        else:
            self.index.on_turn_end(session, now, hints)
        self.index.touch(session)
        self._trim(session, 0 if free_kv else self.chunks_for(len(session.tokens)))
        if session.scope and self._sessions.get(key) is session:
            self._shared.assign_addresses(session)
        if not session.has_cached_chunks:
            self._remove(session)

    def _trim(self, session: CachedSession, most: int) -> None:
        """Cut an idle session to ``most`` chunks and to those that hold KV of it; truncate its tokens to match."""
        size, tokens = self._size, len(session.tokens)
        for chunk in session.chunks:
            if chunk.filled == 0 and chunk.cached and not chunk.pins:
                self._tiers.drop(chunk)  # its recomputation never came: nothing worth copying out
        self._remove_emptied()
        keep = min(len(session.chunks), most)
        if session.shared < keep:
            tail = session.chunks[keep - 1]
            self._tiers.truncate(tail, tokens - tail.index * size)
        while keep and not self._has_kv(session.chunks[keep - 1]):
            keep -= 1
        if keep < len(session.chunks):
            self._shared.truncate(session, keep)  # at once: what others share with it is not cut to pieces
        last = session.chunks[-1] if session.chunks else None
        known = 0 if last is None else last.index * size + last.filled
        session.tokens = session.tokens[:known].copy()
        if last is not None and last.filled < size:
            self._shared.unregister(last)

    def _has_kv(self, last: Chunk) -> bool:
        """Whether a session's last chunk holds KV of it: what is partly filled and shared, another is computing."""
        return last.filled > 0 and not (last.shared and last.filled < self._size)

    def suspend(self, key: SessionKey, now: float, tokens: TokenArray) -> None:
        """``release`` a request that goes on later: its session is not idle, so the policy learns nothing from it."""
        session = self._running[key]
        self.release(key, now, tokens)
        self.index.on_suspend(session, now)

    # -- everything else that changes the cache ----------------------------------------------------------------------

    def swap_out_ahead(self, now: float, limit: int) -> None:
        """Below the watermark, plan background copies of the least valuable chunks (EuroSys §4.3.2)."""
        self._evictor.save_ahead(now, limit)

    def take_copies(self) -> PlannedCopies:
        """What was planned since the last call."""
        return self._tiers.take_copies()

    def complete_copies(self) -> None:
        """The plan with the copies of the last ``take_copies`` was launched."""
        self._tiers.complete()
        self._remove_emptied()

    def replace(self, key: SessionKey, by: SessionKey) -> bool:
        """Replace a session's cached chunks with another's; False when that is not there, or either is in use."""
        session, other = self._sessions.get(key), self._sessions.get(by)
        if other is None or other is session or other.running or (session is not None and session.running):
            return False
        if session is not None:
            other.last_active, other.new_tokens = session.last_active, session.new_tokens
            other.kind, other.hint = session.kind, session.hint
            self._remove(session)
        del self._sessions[by]
        other.key, other.is_candidate = key, False
        self._sessions[key] = other
        self.index.touch(other)
        return True

    def evict(self, key: SessionKey | None = None) -> int:
        """Remove idle sessions (one, or all); returns the number of KV-tokens freed."""
        freed = 0
        for session in list(self._sessions.values()) if key is None else [self._sessions.get(key)]:
            if session is not None and not (session.running or session.copying):
                freed += sum(chunk.filled for chunk in session.own_chunks)
                self._remove(session)
        return freed

    def _add(self, key: SessionKey, scope: str, tenant: int) -> CachedSession:
        session = CachedSession(key, self.index.add_row(), scope=scope, tenant=tenant)
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _remove(self, session: CachedSession) -> None:
        """Remove a session, and free the chunks that no other owns."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self._shared.truncate(session, 0)
            self.index.remove(session)

    def _remove_emptied(self) -> None:
        """Remove the idle sessions whose last cached chunk was dropped, in the order in which they lost it.

        A session may have lost chunks of several holders, and counts by the last of them: see ``Tiers.take_dropped``.
        """
        losers: dict[CachedSession, None] = {}
        for holder in self._tiers.take_dropped():
            for session in [holder] if isinstance(holder, CachedSession) else holder.owners:
                losers.pop(session, None)
                losers[session] = None
        for session in losers:
            if not session.running and not session.has_cached_chunks:
                self._remove(session)

    # -- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every page has exactly one owner and all counts agree."""
        check_cache(self._sessions, self._running, self._tiers, self.index, self._shared)


def _scope(path: PrefixPath | None) -> str:
    return "" if path is None else path.scope


def _page_table(session: CachedSession) -> PageTable:
    return np.fromiter((chunk.device for chunk in session.chunks), np.int32, len(session.chunks))


def _common_chunks(session: CachedSession, origin: CachedSession, full: int) -> int:
    """How many of another's first ``full`` chunks a session has."""
    common = 0
    for mine, other in zip(session.chunks, origin.chunks[:full], strict=False):
        if mine is not other:
            break
        common += 1
    return common


def _add(ranges: list[Range], start: int, end: int) -> None:
    """Append a range; ranges that touch become one, as each will be a span of its own."""
    if start >= end:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))
