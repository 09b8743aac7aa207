"""``CacheManager``: decides what each request finds, restores and leaves in the cache. No torch.

The life of a request here: ``can_admit`` → ``admit`` (its chunks are pinned and placed on the device, copies are
planned) → ``extend`` and ``computed`` in each step → ``release`` (its chunks are unpinned and stay). Between turns a
session's chunks move DEVICE → BOTH → HOST → DROPPED as ``Evictor`` needs room. The next ``admit`` brings them back.

Each piece of state has one writer:

================  =================================================================  =============================
class             state that only it writes                                          its caller
================  =================================================================  =============================
``Tiers``         a chunk's pages, fill level and pins; planned copies               the other three
``SharedChunks``  a chunk's owners and address; the chunk lists of sessions          ``CacheManager``
``Evictor``       nothing: it decides whose pages are taken                          ``CacheManager``
``Tails``         which slices of a second KV group are pinned, leftover or freed    ``CacheManager``
``Resizer``       the limits of an elastic device tier                               ``ElasticTier``
``CacheManager``  the set of sessions, which of them run, their tokens, page tables  the engine
================  =================================================================  =============================

Any chunk that is not pinned can be evicted, at worst by dropping it. So whether a request fits depends only on what
is pinned or promised, and neither a full tier nor a tenant's share stops a request that fits an empty cache.

With two KV groups (``model.groups``), a request needs few slices of the second one: see ``tails``.
Sessions of one scope share the chunks of common beginnings (``sharing``), also those that a plan still computes.
"""

from __future__ import annotations

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.check import check_cache
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Range, Restore, TierTokens
from pensieve.engine.cache.eviction import EvictionIndex, reclaim_kind
from pensieve.engine.cache.evictor import Evictor
from pensieve.engine.cache.finding import NO_BRANCHES, Branches, Finder, RestoreCost, scope_of
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.policy import POLICIES, UNKNOWN, Policy
from pensieve.engine.cache.resizing import Resizer
from pensieve.engine.cache.restore import SpanPart, restore_of
from pensieve.engine.cache.sharing import PrefixPath, SharedChunks
from pensieve.engine.cache.tails import Tails
from pensieve.engine.cache.tiers import Occupancy, Pages, PlannedCopies, Tiers
from pensieve.engine.cost import CostModel
from pensieve.engine.plan import Chain, PageTable


class CacheManager:
    """Two-tier chunk cache of all sessions. Not thread-safe: the engine's thread owns it.

    ``policy`` overrides the one that ``config`` names. ``model`` names the weights that KV is computed with.
    """

    def __init__(
        self, config: CacheConfig, cost: CostModel, policy: Policy | None = None, model: str = ""
    ) -> None:
        if config.device_chunks < 1 or config.host_chunks < 0 or config.chunk_tokens < 1:
            raise ValueError(f"impossible cache sizes: {config}")
        self.config = config
        page_bytes = [group.page_bytes for group in config.groups]
        self.index = EvictionIndex(POLICIES[config.policy]() if policy is None else policy, cost, page_bytes)
        self._size = config.chunk_tokens
        self._tiers = Tiers(config, self.index.touch)
        self._shared = SharedChunks(self.index, self._tiers, model)
        self._finder = Finder(self._shared, self._size)
        self._evictor = Evictor(config, self._tiers, self.index)
        self.shares = self._evictor.shares
        self._tails = Tails(config.groups, self._tiers, self._reserve) if len(config.groups) > 1 else None
        is_elastic = config.device_floor_bytes is not None
        self.resizer = Resizer(self._tiers, self._evictor, self._remove_emptied) if is_elastic else None
        self.sessions: dict[SessionKey, CachedSession] = {}
        self._running: dict[SessionKey, CachedSession] = {}

    # -- questions: change nothing -----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context that fits the device tier, in tokens; an elastic one at its floor."""
        return self._tails.capacity_tokens() if self._tails is not None else self.device_pages * self._size

    @property
    def device_pages(self) -> int:
        """Pages of the first group that an empty device tier holds; an elastic one at its floor."""
        return self._tiers.least_pages(self.config.device_chunks)

    def has_pages(self, pages: int, *, free_only: bool = False) -> bool:
        """Whether running requests can take ``pages`` more of the first group, with ``free_only`` without evictions."""
        free = self._tiers.device.free() if free_only else pages
        return free >= pages and self._tiers.unpinned_bytes((pages, 0)) >= 0

    def can_hold(self, pages: int, requests: int, tokens: int) -> bool:
        """Whether an empty device tier holds ``pages`` pages of the first group, for ``requests`` requests of up to
        ``tokens`` tokens that run together."""
        if self._tails is not None:
            return self._tails.can_hold(pages, requests, tokens)
        return pages <= self.device_pages

    @property
    def swaps_in(self) -> bool:
        return self._tiers.swaps_in

    def occupancy(self) -> Occupancy:
        """Return how full both tiers are, in tokens, and how many tokens were dropped."""
        return self._tiers.occupancy(self._evictor.reclaimable())

    def chunks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def prefix_path(self, key: SessionKey, scope: str, tokens: TokenArray) -> PrefixPath | None:
        """Return the addresses of a context for ``can_admit`` and ``admit``; None: it shares nothing."""
        shares = scope and self.config.prefix_sharing
        return self._shared.path(self.sessions.get(key), scope, tokens) if shares else None

    def can_admit(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        *,
        path: PrefixPath | None = None,
        branches: Branches = NO_BRANCHES,
        reserve_for: str | None = None,
    ) -> bool:
        """Whether ``admit`` may be called now, and then ``branch`` for others.

        ``reserve_for``: the session's tenant, where more than ``decode_reserve`` of all device pages must stay unpinned
        besides those kept for other tenants: free, reclaimable, or evictable (the plan that needs them copies them
        out, which saves a step). None: no page must stay unpinned.
        """
        pages = self.pages_to_pin(key, tokens, num_new, path=path, branches=branches)
        if pages is None:
            return False
        remaining = self._tiers.unpinned_bytes(pages)
        if reserve_for is None:
            return remaining >= 0
        kept = self.config.decode_reserve * self._tiers.device.size_bytes
        return remaining > kept + self.shares.bytes_withheld_from(reserve_for)

    def pages_to_pin(
        self,
        key: SessionKey,
        tokens: TokenArray,
        num_new: int,
        *,
        path: PrefixPath | None = None,
        branches: Branches = NO_BRANCHES,
    ) -> Pages | None:
        """Return how many more pages an admission pins or promises; None: a plan or another request must end first."""
        session = self.sessions.get(key)
        if session is not None and (session.running or session.copying):
            return None
        common = self._finder.in_common(session, tokens, num_new, path)
        if any(chunk.saving for chunk in common):
            return None  # no plan can copy one chunk both out and in
        # Chunks that are pinned already cost this request no page, but it copies that of its last token.
        pages = self.chunks_for(len(tokens)) + branches.pages
        pages -= sum(chunk.pins > 0 for chunk in common if chunk.index < (len(tokens) - 1) // self._size)
        if self._tails is None:
            return pages, 0
        chunks, found = self._finder.found(session, tokens, num_new, path)
        missing, parts = self._tails.find(chunks, keep := min(found, len(tokens) - 1), len(tokens))
        if not self._tails.can_read(parts):
            return None
        promised = branches.requests * self._tails.claim(len(tokens))
        return pages, self._tails.cost(missing, parts, keep, len(tokens)) + promised

    def has_session(self, key: SessionKey) -> bool:
        return key in self.sessions

    def restore_cost(
        self, key: SessionKey, tokens: TokenArray, path: PrefixPath | None = None, *, tenant: str = ""
    ) -> RestoreCost:
        """Return what ``admit`` would have to bring to the device for a session that does not run."""
        size, tiers = self._size, self._tiers
        chunks, keep = self._finder.found(self.sessions.get(key), tokens, 0, path)
        pages, others = self.chunks_for(len(tokens)) - len(chunks), 0
        computing, clean = keep < len(tokens), 0
        for chunk in chunks:
            low = chunk.index * size
            copied = chunk.shared and low + size > keep  # on write, or recomputed
            pages += copied or chunk.device == NOWHERE
            computing |= copied or min(chunk.filled, keep - low) < min(size, len(tokens) - low)
            clean += reclaim_kind(chunk) is Reclaim.PAGE
        clean_bytes = tiers.bytes_of((clean, 0))
        if self._tails is not None:
            missing, parts = self._tails.find(chunks, keep, len(tokens))
            others = sum(part.device == NOWHERE for part in parts)
            others += self._tails.claim(len(tokens)) if missing or keep < len(tokens) else 0
            computing |= bool(missing)
            clean_bytes += tiers.bytes_of((0, sum(reclaim_kind(part) is Reclaim.PAGE for part in parts)))
        reclaimable = self._evictor.reclaimable(self.shares.number(tenant))
        room = tiers.device.free_bytes + max(reclaimable - clean_bytes, 0)
        return RestoreCost(tiers.bytes_of((pages, others)), computing, room)

    def page_table(self, key: SessionKey, tokens: int) -> PageTable:
        """Return the device pages of the first ``tokens`` positions of a running session; valid until its release."""
        session = self._running[key]
        if session.table_moves != self._tiers.moves:
            self._set_table(session)
        return session.table[: self.chunks_for(tokens)]

    def second_group(
        self, key: SessionKey, tokens: int, first_span: int
    ) -> tuple[list[SpanPart], PageTable | None, list[Chain]]:
        """Return what the plan being made computes of a running session, in a model with two groups: its pieces, the
        page table of its windows (None without windows), and its chains. ``first_span``: number of the first piece."""
        session, tails = self._running[key], self._tails
        assert tails is not None
        table = None if tails.has_states else tails.table(session, tokens)
        return tails.pieces(session), table, list(tails.chains(session, first_span))

    @property
    def has_states(self) -> bool:
        """Whether a request cannot go on from any token that another has computed, but only from some states."""
        return self._tails is not None and self._tails.has_states

    @property
    def two_groups(self) -> bool:
        return self._tails is not None

    def reach(self, key: SessionKey, tokens: int) -> int:
        """Return how many of ``tokens`` missing tokens of a running session the plan being made can compute."""
        return tokens if self._tails is None else self._tails.reach(self._running[key], tokens)

    def residency(self, key: SessionKey) -> TierTokens:
        session = self.sessions.get(key)
        return TierTokens(0, 0) if session is None else session.residency()

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
        """Pin the context ``tokens`` of a session and give every chunk of it a device page.

        The cached part is the common prefix of the cached token ids and ``tokens``, followed by all chunks
        that are found by address (``path``). It never includes the last token, which must be computed for its
        logits. Without addresses it is at most the history, the first ``len(tokens) - num_new`` tokens.

        ``warm``: this is not a turn. It needs no logits, and the policy learns nothing from it.

        ====================================  =====================================  ================================
        positions                             state before                           what happens
        ====================================  =====================================  ================================
        ``[0, keep)``, chunk on the device    valid up to ``chunk.filled``           hit
        ``[0, keep)``, chunk on the host      valid up to ``chunk.filled``           page + planned copy
        ``[0, keep)``, dropped or unfilled    missing                                page, to be recomputed
        ``[keep, len(tokens))``               chunk freed, or its tail cut           page, to be computed
        ====================================  =====================================  ================================
        """
        asked = None if self._tails is None else self.pages_to_pin(key, tokens, num_new, path=path)
        session = self.sessions.get(key)
        owner = scope_of(path), self.shares.number(tenant)
        if session is None or (session.scope, session.tenant) != owner:
            if session is not None:
                self._remove(session)
            session = self._add(key, *owner)
        keep = self._finder.take(session, tokens, num_new, path)
        session.tokens, session.length = tokens.copy(), len(tokens)
        session.running, session.warming = True, warm
        if not warm:
            self.index.on_turn_start(session, num_new, now)
        self._running[key] = session
        self._tiers.pin(session.chunks)  # all before any eviction: a restore must not evict its own chunks
        if keep == len(tokens) and not warm:
            keep -= 1  # the last token must be computed for its logits, even if its KV is cached
        if not warm and num_new:
            session.resume_points = (len(tokens) - num_new, len(tokens) - 1)
        restore = self._lay_out(session, keep, len(tokens) - num_new, path, asked)
        self._bring_to_device(session, now)
        return restore

    def _lay_out(
        self, session: CachedSession, keep: int, history: int, path: PrefixPath | None, asked: Pages | None
    ) -> Restore:
        """Make the chunk list, which stands for the first ``keep`` tokens, cover the session's tokens, all pinned."""
        size, total = self._size, len(session.tokens)
        chunks, held = self.chunks_for(total), len(session.chunks)
        if held * size > keep:
            self._own_tail(session, keep, chunks)
        self._tiers.pin(self._shared.append(session, chunks - held))
        if path is not None:
            first = held - 1 if held and not session.chunks[held - 1].digest else held
            for index in range(first, len(path.digests)):
                self._shared.register(session.chunks[index], path.digests[index])
        if self._tails is not None:
            return self._tails.lay_out(session, held, keep, history, 0 if asked is None else asked[1])
        return restore_of(session.chunks[:held], history, total, size)

    def _own_tail(self, session: CachedSession, keep: int, total: int) -> None:
        """Make a running session's last chunk its own, limited to the first ``keep`` tokens: others will follow."""
        tail = session.chunks[-1]
        valid = max(keep - tail.index * self._size, 0)
        if tail.shared:
            self._own_copy(session, tail, min(tail.filled, valid), total)
        else:
            self._shared.unregister(tail)
            self._truncate(tail, valid)

    def _truncate(self, chunk: Chunk, valid: int) -> None:
        """Limit all slices of an unpinned chunk to its first ``valid`` tokens."""
        self._tiers.truncate(chunk, valid)
        if self._tails is not None:
            self._tails.truncate(chunk, valid)

    def _own_copy(self, session: CachedSession, shared: Chunk, valid: int, total: int) -> None:
        """Copy on write: replace the shared last chunk of a running session that will have ``total`` chunks.

        The first ``valid`` tokens are copied if the device has them and a page is left besides those that the
        session still needs. Otherwise they are missing and will be recomputed.
        """
        self._shared.disown(session, shared.index)
        (own,) = self._shared.append(session, 1)
        self._tiers.pin((own,))
        parts = [] if self._tails is None else self._tails.on_device(session)
        others = 0 if self._tails is None else max(self._tails.claim(total * self._size), len(parts))
        spare = self._tiers.unpinned_bytes((total - len(session.chunks), others)) >= 0
        if valid > 0 and spare and self._tiers.can_copy(shared):
            self._tiers.pin(parts)  # one that is saved for this could not be loaded by the same plan
            self._evictor.reserve((1, 0), session.last_active, session.tenant)
            self._tiers.copy(shared, own, valid)
            self._tiers.unpin(parts)
        # Only now, or the reservation might have evicted the source of the copy.
        self._tiers.unpin((shared,))

    def _bring_to_device(self, session: CachedSession, now: float) -> None:
        """Give every chunk of a session a device page, and load those that the host has."""
        absent = [chunk for chunk in session.chunks if chunk.device == NOWHERE]
        others = [] if self._tails is None else self._tails.absent(session)
        self._reserve((len(absent), len(others)), now, session.tenant)
        for chunk in absent:
            self._tiers.bring(chunk)
        for part in others:
            self._tiers.load(part)
        self._set_table(session)
        self.index.touch(session)

    def _set_table(self, session: CachedSession) -> None:
        session.table = np.fromiter((chunk.device for chunk in session.chunks), np.int32, len(session.chunks))
        session.table_moves = self._tiers.moves

    def _reserve(self, pages: Pages, now: float, tenant: int) -> None:
        """Make device pages free, as the caller knows to be possible, and remove sessions that lose their
        last chunk."""
        self._evictor.reserve(pages, now, tenant)
        self._remove_emptied()

    # -- a running request -------------------------------------------------------------------------------------------

    def promise_branch(self, source: SessionKey, target: SessionKey, tokens: int, common: int) -> bool:
        """Promise a running target the room of the second group that ``branch`` will take; False when there is none."""
        origin, session, tails = self._running[source], self._running[target], self._tails
        return tails is None or tails.promise_branch(session, origin, common // self._size, tokens)

    def branch(
        self, source: SessionKey, target: SessionKey, tokens: TokenArray, common: int, now: float
    ) -> tuple[Range, ...] | None:
        """Let another request, whose context is ``tokens``, go on from the first ``common`` of them, fewer than all,
        which a running one has too. Call ``extend`` next.

        Full chunks are shared. The partly filled one is copied as far as the device has it. A running target, which
        frees its other chunks, needs ``promise_branch`` before. Call it before the plan being made takes any of the
        source's work. Returns what the target has to compute after that work; None, with nothing changed, when there is
        no page for the tail.
        """
        origin, session = self._running[source], self._running.get(target)
        if session is None:
            others = 0 if self._tails is None else self._tails.claim(len(tokens))
            if self._tiers.unpinned_bytes((1, others)) < 0:
                return None
            if target in self.sessions:
                self._remove(self.sessions[target])
            session = self._running[target] = self._add(target, origin.scope, origin.tenant)
            session.is_candidate = session.running = True
        full, filled = divmod(common, self._size)
        kept = session.common_chunks(origin, full)
        if self._tails is not None:
            self._tails.let_go(session)
        self._tiers.unpin(session.chunks[kept:])
        self._shared.truncate(session, kept)
        self._shared.adopt(session, origin.chunks[kept:full])
        self._tiers.pin(session.chunks[kept:])
        session.tokens, session.new_tokens, session.length = tokens.copy(), origin.new_tokens, len(tokens)
        session.resume_points = origin.resume_points
        (tail,) = self._shared.append(session, 1)
        self._tiers.pin((tail,))
        if self._tails is not None:
            self._tails.begin_branch(session, origin, tail)
        last = origin.chunks[full] if full < len(origin.chunks) else None
        start = full * self._size + self._copy_or_place(last, tail, filled, now)
        ranges = self._tails.branch(session, origin, tail, start, now) if self._tails is not None else None
        self._set_table(session)
        return tuple(ranges or [(start, len(tokens))])

    def _copy_or_place(self, source: Chunk | None, tail: Chunk, filled: int, now: float) -> int:
        """Give a pinned chunk a device page, with a copy of the first ``filled`` tokens of ``source`` as far as the
        device has them; return how many that are."""
        self._reserve((1, 0), now, tail.holder.tenant)
        filled = 0 if source is None or not self._tiers.can_copy(source) else min(source.filled, filled)
        if source is not None and filled:
            self._tiers.copy(source, tail, filled)
        else:
            self._tiers.place(tail)
        return filled

    def extend(self, key: SessionKey, tokens: int, now: float, *, free_only: bool = False) -> bool:
        """Make room on the device for ``tokens`` positions of a running session; False when every page is pinned, or
        with ``free_only`` when none is free. It keeps the pages that it has got."""
        session = self._running[key]
        while len(session.chunks) * self._size < tokens:
            others = 0 if self._tails is None else self._tails.growth(session, tokens)
            if self._tiers.unpinned_bytes((1, others)) < 0 or (free_only and not self._tiers.device.free()):
                return False
            (chunk,) = self._shared.append(session, 1)
            self._tiers.pin((chunk,))
            self._reserve((1, 0), now, session.tenant)
            self._tiers.place(chunk)
            session.table = np.append(session.table, np.int32(chunk.device))
        session.length = tokens
        if self._tails is not None:
            self._tails.keep_promise(session)
        return True

    def take_back(self, key: SessionKey, tokens: int) -> None:
        """Free the pages of a running session after its first ``tokens`` positions, which hold nothing valid."""
        session, keep = self._running[key], self.chunks_for(tokens)
        self._tiers.unpin(session.chunks[keep:])
        self._shared.truncate(session, keep)
        session.table, session.length = session.table[:keep], tokens

    def computed(self, key: SessionKey, start: int, end: int, now: float = 0.0) -> None:
        """Record that the plan being made writes KV of positions ``[start, end)`` of a running session.

        Host copies of these chunks are stale once it is launched. A request admitted into the same plan can
        use the KV: in each layer all writes of a step come before its reads.
        """
        session = self._running[key]
        first, last = start // self._size, self.chunks_for(end)
        assert session.shared <= first or min(last, session.shared) * self._size <= len(session.tokens), (
            f"{key}: its context ends in a shared chunk that it writes to, of {first} to {last - 1}"
        )
        if self._tails is None:
            self._tiers.fill(session.chunks[first:last], start, end)
        else:
            self._tails.computed(session, start, end, now)

    def take_over(self, key: SessionKey, leaver: SessionKey) -> None:
        """Let a running session compute what another still had to compute of their common beginning."""
        if self._tails is not None:
            self._tails.take_over(self._running[key], self._running[leaver])

    def release(
        self,
        key: SessionKey,
        now: float,
        tokens: TokenArray | None = None,
        *,
        free_kv: bool = False,
        hints: Hints | None = None,
    ) -> None:
        """Unpin the chunks of a request that ended. They stay cached, unless ``free_kv``.

        ``tokens``: its context, if that has grown since ``admit``, or the part of it that its KV stands for.
        ``hints``: the turn's hints about the next one.
        """
        session = self._running.pop(key)
        if tokens is not None:
            session.tokens = tokens
        session.length = len(session.tokens)
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
        if self._tails is not None:
            self._tails.let_go(session)
        self._trim(session, 0 if free_kv else self.chunks_for(len(session.tokens)))
        if session.scope and self.sessions.get(key) is session:
            self._shared.assign_addresses(session)
        if self._tails is not None and self.sessions.get(key) is session:
            self._tails.sort(session)
        if not session.has_cached_chunks:
            self._remove(session)

    def _trim(self, session: CachedSession, most: int) -> None:
        """Trim an idle session to ``most`` chunks and to those that hold its KV; truncate its tokens to match."""
        size, tokens = self._size, len(session.tokens)
        for chunk in session.chunks:
            if chunk.filled == 0 and chunk.cached and not chunk.pins:
                self._tiers.drop(chunk)  # it was never recomputed: there is nothing to copy out
        self._remove_emptied()
        keep = min(len(session.chunks), most)
        if session.shared < keep:
            tail = session.chunks[keep - 1]
            self._truncate(tail, tokens - tail.index * size)
        while keep and not self._has_kv(session.chunks[keep - 1]):
            keep -= 1
        if keep < len(session.chunks):
            self._shared.truncate(session, keep)  # at once, so that a run shared with others is split once
        last = session.chunks[-1] if session.chunks else None
        known = 0 if last is None else last.index * size + last.filled
        session.tokens, session.length = session.tokens[:known].copy(), known
        if last is not None and last.filled < size:
            self._shared.unregister(last)

    def _has_kv(self, last: Chunk) -> bool:
        """Whether a session's last chunk holds KV of it. Another computes a shared chunk that is partly filled."""
        return last.filled > 0 and not (last.shared and last.filled < self._size)

    def suspend(self, key: SessionKey, now: float, tokens: TokenArray) -> None:
        """Release a request that will resume: its session is not idle, so the policy learns nothing from it."""
        session = self._running[key]
        self.release(key, now, tokens)
        self.index.on_suspend(session, now)

    # -- everything else that changes the cache ----------------------------------------------------------------------

    def swap_out_ahead(self, now: float, limit: int) -> None:
        """Plan copies of the least valuable chunks while below the watermark (EuroSys §4.3.2)."""
        self._evictor.save_ahead(now, limit)

    def take_copies(self) -> PlannedCopies:
        """See ``Tiers.take_copies``."""
        return self._tiers.take_copies()

    def complete_copies(self) -> None:
        """Record the launch of the plan with the copies of the last ``take_copies``."""
        self._tiers.complete()
        if self._tails is not None:
            self._tails.complete()
        self._remove_emptied()

    def replace(self, key: SessionKey, by: SessionKey) -> bool:
        """Replace a session's cached chunks with another's; False if the other is not cached or either is running."""
        session, other = self.sessions.get(key), self.sessions.get(by)
        if other is None or other is session or other.running or (session is not None and session.running):
            return False
        if session is not None:
            other.last_active, other.new_tokens = session.last_active, session.new_tokens
            other.kind, other.hint = session.kind, session.hint
            self._remove(session)
        del self.sessions[by]
        other.key, other.is_candidate = key, False
        self.sessions[key] = other
        self.index.touch(other)
        return True

    def evict(self, key: SessionKey | None = None) -> int:
        """Remove idle sessions (one, or all); return the number of KV-tokens freed."""
        freed = 0
        for session in list(self.sessions.values()) if key is None else [self.sessions.get(key)]:
            if session is not None and not (session.running or session.copying):
                freed += sum(chunk.filled for chunk in session.own_chunks)
                self._remove(session)
        return freed

    def _add(self, key: SessionKey, scope: str, tenant: int) -> CachedSession:
        session = CachedSession(key, self.index.add_row(), scope=scope, tenant=tenant)
        self.sessions[key] = session
        self.index.attach(session)
        return session

    def _remove(self, session: CachedSession) -> None:
        """Remove a session and free the chunks that no other owns."""
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
            self._shared.truncate(session, 0)
            self.index.remove(session)

    def _remove_emptied(self) -> None:
        """Remove idle sessions without cached chunks, in the order of the last drop of each
        (``Tiers.take_dropped``)."""
        losers: dict[CachedSession, None] = {}
        for holder in self._tiers.take_dropped():
            for session in [holder] if isinstance(holder, CachedSession) else holder.owners:
                losers.pop(session, None)
                losers[session] = None
        for session in losers:
            if not session.running and not session.has_cached_chunks:
                self._remove(session)

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and all counts agree."""
        check_cache(self.sessions, self._running, self._tiers, self.index, self._shared)
        if self.resizer is not None:
            self.resizer.check()
