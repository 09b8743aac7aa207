"""A twin of ``CacheManager`` without page numbers and token ids, on one byte per chunk: 20 times faster.

It has the same rules, policies and order of decisions; tests compare both. For each plan the calls come in
this order: ``grow``, ``can_admit`` → ``admit``, ``save_ahead``, ``complete``; and ``release`` when a turn has
ended or is suspended. The chunks that generations grow by are counted for all of them together, and added to
each session when it is released.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from pensieve.config import CacheConfig
from pensieve.core import Hints
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.policy import Policy
from pensieve.engine.cost import CostModel
from pensieve.replay.load.workload import Piece
from pensieve.simulate.turns.sharing import Sharing
from pensieve.simulate.turns.victims import (
    ADMITTED,
    BOTH,
    BOTH_SAVING,
    CHOSEN,
    DEVICE,
    DROPPED,
    HOST,
    HOST_SAVING,
    IN_TRANSIT,
    RECLAIMED,
    SAVING,
    SETTLED,
    ChunkHolder,
    PlacesIndex,
    Ranking,
    Round,
    SharedHolder,
    SharingSession,
    VictimOrder,
    Victims,
    can_rank,
)

_DEVICE = bytes((DEVICE,))
_BOTH = bytes((BOTH,))
_SHARE = (SharedHolder, SharingSession)


class TurnCache:
    """The cached chunks of the two tiers.

    ``slack``: number of chunks that are ranked at a time and used up within ``FRESH_S``; an eighth of it is
    reclaimed or saved at a time. 0: rank at every need, and only as many, exactly as ``CacheManager``.
    """

    def __init__(self, config: CacheConfig, cost: CostModel, policy: Policy, slack: int = 0) -> None:
        self.config = config
        self.index = PlacesIndex(policy, cost)
        self.device_free = config.device_chunks
        self.host_free = config.host_chunks
        self._slack = slack
        self._batch = slack // 8
        self._can_rank = can_rank(self.index)
        self._rankings: dict[Reclaim, Ranking] = {}
        self._watermark = config.swap_watermark * config.device_chunks
        self._reclaimable = 0
        """Idle chunks that are in both tiers."""
        self._both: dict[ChunkHolder, None] = {}
        """Holders of such chunks, and some that no longer have any."""
        self._spares: dict[ChunkHolder, None] = {}
        """Running holders that may have needless host copies, in order of admission."""
        self._in_flight: dict[ChunkHolder, None] = {}
        self._size = config.chunk_tokens
        self.loading = 0
        """Chunks that the current plan copies in from the host."""
        self._sessions: dict[int, ChunkHolder] = {}
        self._running: dict[int, ChunkHolder] = {}
        self.unpinned = config.device_chunks
        """Device pages that no running turn holds."""
        self._admitted: list[tuple[ChunkHolder, Restore]] = []
        self._sharing = Sharing(self.index, self._size, self._both, self._spares, self._in_flight)

    def chunks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def can_admit(self, key: int, tokens: int, prefix: tuple[Piece, ...] = (), *, reserve: bool) -> bool:
        """Whether the current plan may admit a turn with a context of ``tokens``; as in ``CacheManager``.

        ``prefix``: shared beginning of the session's first input.
        """
        if self.is_copying(key, prefix):
            return False
        remaining = self.unpinned - self.chunks_for(tokens)
        if prefix:
            remaining += self._pinned_chunks(key, prefix)
        return (
            remaining > self.config.decode_reserve * self.config.device_chunks if reserve else remaining >= 0
        )

    def is_copying(self, key: int, prefix: tuple[Piece, ...] = ()) -> bool:
        """Whether the current plan copies chunks of this session, or saves some that it is about to share."""
        if not self._in_flight:
            return False
        session = self._sessions.get(key)
        if session in self._in_flight:
            return True
        if not prefix:
            return False
        if isinstance(session, SharingSession) and any(
            run in self._in_flight and not IN_TRANSIT.isdisjoint(run.places) for run in session.runs
        ):
            return True
        full, found = self._other_holders(session, prefix)
        return any(holder.places[index] in SAVING for index, holder in enumerate(found, full))

    def admit(
        self, key: int, history: int, tokens: int, now: float, prefix: tuple[Piece, ...] = ()
    ) -> Restore:
        """Pin a context and place all of its chunks on the device. ``prefix``: see ``can_admit``."""
        session = self._sessions.get(key) or self._add(key, prefix)
        runs = self._adopt_prefix(session, prefix) if isinstance(session, SharingSession) else ()
        before = session.places
        loading, both = before.count(HOST), before.count(BOTH)
        spare = loading or both
        restore = session.restore(history, tokens, self._size)
        more = self.chunks_for(tokens) - len(before)
        absent = before.count(DROPPED) + loading + more
        session.running = True
        session.places_before, session.places = before, before.translate(ADMITTED) + _DEVICE * more
        before[:] = bytes(len(before))  # no entry of a ranking may remain a candidate
        self._reclaimable -= both
        self._both.pop(session, None)
        self.index.on_turn_start(session, tokens - history, now)
        self.index.touch(session)
        self._running[key] = session
        self._in_flight[session] = None
        self.unpinned -= len(session.places) - session.own_start
        for run in runs:
            run.pins += 1
            if run.pins == 1:
                coming = run.places.count(HOST)
                absent += coming + run.places.count(DROPPED)
                loading += coming
                self._pin(run, spare=coming > 0)
        if spare:
            self._spares[session] = None
        self._take_device_pages(absent, now)
        self.loading += loading
        self._admitted.append((session, restore))
        return restore

    def grow(self, chunks: int, now: float) -> None:
        """Pin ``chunks`` more pages for all running turns together; at most ``unpinned``."""
        self.unpinned -= chunks
        self._take_device_pages(chunks, now)

    def complete(self) -> None:
        if not self._in_flight:
            return
        for session in self._in_flight:
            places = session.places
            if not session.running and (saved := places.count(BOTH_SAVING)):
                self._reclaimable += saved
                self._both[session] = None
            places[:] = places.translate(SETTLED)
        self.index.touch_all(self._in_flight)
        for session, restore in self._admitted:
            self._free_stale_copies(session, restore.missing)
        self._in_flight.clear()
        self._admitted.clear()
        self.loading = 0

    def save_ahead(self, now: float, limit: int) -> None:
        """As ``CacheManager.swap_out_ahead``."""
        short = self._watermark - self.device_free - self._reclaimable
        if short <= self._batch:
            return
        need = min(math.ceil(short), limit)
        # Nothing is dropped for it: chunks without room on the host stay on the device.
        while need > 0:
            room = self.host_free
            if room < need or not self.index.one_by_one:  # a group may be larger than the need
                room += sum([session.places.count(BOTH) for session in self._spares])
            chosen = (
                self._victims(Reclaim.SAVED_PAGE, now, need).move(min(need, room), BOTH_SAVING)
                if room
                else None
            )
            if not chosen:
                return
            need -= len(chosen)
            if len(chosen) > room:
                kept, chosen = chosen.part(room), chosen.part(0, room)
                kept.set_place(DEVICE)
                self.index.touch_all(kept.sessions)
            self._free_spare_copies(len(chosen) - self.host_free)
            self._take_host_pages(chosen)

    def release(
        self,
        key: int,
        tokens: int,
        stamp: float,
        missing: Sequence[Range] = (),
        hints: Hints | None = None,
    ) -> None:
        """Release a turn that has ended or is suspended; its ``tokens`` are cached, except ``missing``.

        ``stamp`` is the time from which its policy counts, ``hints`` describe the next turn.
        """
        session = self._running.pop(key)
        self._spares.pop(session, None)
        places = session.places
        grown = self.chunks_for(tokens) - len(places)
        places.extend(_DEVICE * grown)
        self.unpinned += len(places) - session.own_start
        session.tokens = tokens
        self.index.on_turn_end(session, stamp, hints)
        self.index.touch(session)
        if isinstance(session, SharingSession):
            self._unpin(session.runs)
        if missing:
            self._free_missing(session, missing)
        if stamp == session.last_active and len(places) >= len(session.places_before):
            # The policy sees no absence, so entries of rankings are valid again.
            session.places_before[:] = places
            session.places = places = session.places_before
        session.running = False
        session.last_active = stamp
        if both := places.count(BOTH):
            self._reclaimable += both
            self._both[session] = None
        if missing and isinstance(session, SharingSession):
            self._free_missing_shared(session, missing)
        elif places.count(DROPPED) == len(places):
            self._forget(session)

    def suspend(self, key: int, now: float) -> None:
        """Note that the turn released just now will go on; as ``CacheManager.suspend``."""
        if key in self._sessions:
            self.index.on_suspend(self._sessions[key], now)
        else:
            self.index.policy.on_return(key, now)

    def clear(self) -> None:
        for session in self._running.values():
            session.running = False
        for session in list(self._sessions.values()):
            self._forget(session)
        for state in (self._running, self._spares, self._in_flight, self._admitted, self._rankings):
            state.clear()
        self._reclaimable = self.loading = 0
        self.device_free = self.unpinned = self.config.device_chunks
        self.host_free = self.config.host_chunks

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, key: int, prefix: tuple[Piece, ...]) -> ChunkHolder:
        addresses = self._addresses(prefix)
        row = self.index.add_row()
        session = SharingSession(key, row, addresses=addresses) if addresses else ChunkHolder(key, row)
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _forget(self, session: ChunkHolder) -> None:
        del self._sessions[session.key]
        if isinstance(session, SharingSession):
            self._sharing.unregister(session, 0)
            self._sharing.disown(session, 0)
        self._both.pop(session, None)
        self.index.remove(session)

    def _free_stale_copies(self, session: ChunkHolder, missing: Sequence[Range]) -> None:
        """Free host copies of chunks that were written to: they are stale."""
        for start, _ in missing:
            index = start // self.config.chunk_tokens
            if session.places[index] == BOTH:  # only a range's first chunk can have held tokens
                session.places[index] = DEVICE
                self.host_free += 1

    def _free_missing(self, session: ChunkHolder, missing: Sequence[Range]) -> None:
        """Free the device pages of chunks that were never recomputed; the tokens before the last range stay."""
        size, places = self.config.chunk_tokens, session.places
        session.tokens = missing[-1][0]
        kept = max(self.chunks_for(session.tokens), session.own_start)
        self.device_free += len(places) - kept
        del places[kept:]
        for start, end in missing[:-1]:
            for index in range(max(start // size, session.own_start), end // size):
                self.host_free += places[index] == BOTH
                self.device_free += 1
                places[index] = DROPPED

    def _forget_empty(self, holders: list[ChunkHolder]) -> None:
        waiting = dict.fromkeys(reversed(holders))
        while waiting:  # in the order of their last chunks
            holder, _ = waiting.popitem()
            if holder.places.count(DROPPED) + holder.own_start < len(holder.places):
                continue
            if isinstance(holder, _SHARE):
                self._forget_empty_owners(holder, waiting)
            else:
                self._in_flight.pop(holder, None)
                self._forget(holder)

    # -- what sessions share -----------------------------------------------------------------------------------------

    def _addresses(self, prefix: tuple[Piece, ...]) -> tuple[int, ...]:
        return self._sharing.addresses(prefix) if prefix and self.config.prefix_sharing else ()

    def _other_holders(
        self, session: ChunkHolder | None, prefix: tuple[Piece, ...]
    ) -> tuple[int, list[SharingSession | SharedHolder]]:
        """Return the number of the session's own full chunks, and the holders of the chunks behind them."""
        full = 0 if session is None else session.tokens // self._size
        addresses = self._addresses(prefix)
        return full, self._sharing.find(addresses, full) if full < len(addresses) else []

    def _pinned_chunks(self, key: int, prefix: tuple[Piece, ...]) -> int:
        session = self._sessions.get(key)
        _, found = self._other_holders(session, prefix)
        shared = session.runs if isinstance(session, SharingSession) else ()
        return sum(run.num_chunks for run in shared if run.running) + sum(holder.running for holder in found)

    def _adopt_prefix(self, session: SharingSession, prefix: tuple[Piece, ...]) -> Sequence[SharedHolder]:
        """Make a session an owner of the cached chunks of its shared beginning; return its runs."""
        full, found = self._other_holders(session, prefix)
        if found:
            for place in session.places[full:]:  # a partly filled tail
                self.device_free += place in (DEVICE, BOTH)
                self.host_free += place in (HOST, BOTH)
                self._reclaimable -= place == BOTH
            del session.places[full:]
            self._sharing.adopt(session, found)
            session.tokens = session.own_start * self._size
        if full < len(session.addresses):
            self._sharing.register(session)
        return session.runs

    def _pin(self, run: SharedHolder, *, spare: bool) -> None:
        """Pin a run because an owner is admitted. ``spare``: some of its chunks are copied in."""
        before = run.places
        both = before.count(BOTH)
        run.places = before.translate(ADMITTED)
        before[:] = bytes(len(before))  # as in ``admit``
        run.running = True
        self._reclaimable -= both
        self._both.pop(run, None)
        self.index.touch(run)
        self._in_flight[run] = None
        self.unpinned -= run.num_chunks
        if both or spare:
            self._spares[run] = None

    def _unpin(self, runs: Sequence[SharedHolder]) -> None:
        for run in runs:
            run.pins -= 1
            if run.pins == 0:
                run.running = False
                self.unpinned += run.num_chunks
                self._spares.pop(run, None)
                self.index.touch(run)
                if both := run.places.count(BOTH):
                    self._reclaimable += both
                    self._both[run] = None

    def _free_missing_shared(self, session: SharingSession, missing: Sequence[Range]) -> None:
        """Free missing shared chunks, as ``_free_missing`` frees own ones; forget sessions that lost all chunks."""
        size = self._size
        lost: list[ChunkHolder] = []
        for run in session.runs:
            for start, end in missing:
                low, high = max(start // size, run.own_start), min(self.chunks_for(end), len(run.places))
                if low < high:
                    self.device_free += high - low
                    run.places[low:high] = bytes(high - low)
                    lost.append(run)
                    self.index.touch(run)
        self._forget_empty([*lost, session])
        if self._sessions.get(session.key) is session:
            full = session.tokens // size
            if full < session.own_start:
                self._sharing.disown(session, full)
                session.tokens = full * size
            self._sharing.unregister(session, full)
            self._forget_empty_owners(session, ())

    def _forget_empty_owners(
        self, holder: SharingSession | SharedHolder, waiting: Collection[ChunkHolder]
    ) -> None:
        """Forget the sessions without cached chunks, now that ``holder`` has lost its last one.

        Members of ``waiting`` are about to lose theirs but have not yet.
        """
        for session in list(holder.owners) if isinstance(holder, SharedHolder) else (holder,):
            if not session.running and not any(
                one in waiting or one.places.count(DROPPED) + one.own_start < len(one.places)
                for one in (session, *session.runs)
            ):
                self._in_flight.pop(session, None)
                self._forget(session)

    # -- room in the tiers: as ``engine.cache.tiers`` ---------------------------------------------------------------

    def _take_device_pages(self, pages: int, now: float) -> None:
        """Take device pages, evicting chunks if too few are free."""
        if self.device_free < pages:
            self._reserve(pages, now)
        self.device_free -= pages

    def _victims(self, reclaim: Reclaim, now: float, count: int) -> VictimOrder:
        """The next victims, ranked now, or recently if there is ``slack``."""
        if not self._can_rank:
            return Round(self.index, reclaim, now, count)
        ranking = self._rankings.get(reclaim)
        if not self._slack or ranking is None or not ranking.is_usable(now, count):
            ranking = self._rankings[reclaim] = Ranking(self.index, reclaim, now, max(count, self._slack))
        return ranking

    def _reserve(self, pages: int, now: float) -> None:
        """Make ``pages`` device pages free; with ``slack`` a few more."""
        if 0 < self._reclaimable <= pages + self._batch - self.device_free:
            self._reclaim_all()
        while (need := pages + self._batch - self.device_free) > 0 and self._reclaimable:
            reclaimed = len(self._victims(Reclaim.PAGE, now, need).move(need, HOST))
            self.device_free += reclaimed
            self._reclaimable -= reclaimed
        while self.device_free < pages:
            need = pages + self._batch - self.device_free
            chosen = self._victims(Reclaim.SAVED_PAGE, now, need).move(need, CHOSEN)
            assert chosen, f"{pages} device pages are needed, only {self.device_free} can be freed"
            self._evict(chosen, now)

    def _reclaim_all(self) -> None:
        """Free all reclaimable pages. All are needed, so their order does not matter."""
        for session in self._both:
            session.places[:] = session.places.translate(RECLAIMED)
        self.index.touch_all(self._both)
        self._both.clear()
        self.device_free += self._reclaimable
        self._reclaimable = 0

    def _evict(self, chosen: Victims, now: float) -> None:
        """Evict chunks from the device: save the most valuable, drop those without room on the host."""
        self.device_free += len(chosen)
        candidates = self._victims(Reclaim.HOST_COPY, now, len(chosen))
        while chosen and (
            pages := self._make_host_room(
                candidates, chosen.values[-1], len(chosen), ceiling=chosen.values[0]
            )
        ):
            saved = chosen.part(-pages)
            chosen = chosen.part(0, -pages)
            saved.set_place(HOST_SAVING)
            self._take_host_pages(saved)
        chosen.set_place(DROPPED)
        self._forget_empty(chosen.sessions[::-1])  # rows become free in the manager's order: they break ties

    def _make_host_room(
        self, candidates: VictimOrder, value: float, most: int, ceiling: float = np.inf
    ) -> int:
        """Free host pages for chunks, the first worth ``value``, none less than ``ceiling``; return how many.

        Needless copies are freed first, then chunks that are on the host alone and worth no more than any
        arriving chunk. If there are none, one that is worth no more than the first arriving chunk.
        """
        self._free_spare_copies(most - self.host_free)
        if self.host_free == 0:
            dropped = candidates.move(most, DROPPED, min(value, ceiling)) or candidates.move(
                1, DROPPED, value
            )
            self.host_free += len(dropped)
            self._forget_empty(dropped.sessions)
        return min(self.host_free, most)

    def _free_spare_copies(self, most: int) -> None:
        """Free up to ``most`` host pages by discarding copies of running chunks."""
        if most <= 0:
            return
        for session in list(self._spares):
            spare = session.places.count(BOTH)
            freed = min(spare, most)
            session.places = session.places.replace(_BOTH, _DEVICE, freed)
            self.host_free += freed
            most -= freed
            if freed < spare or most == 0:
                return
            if session not in self._in_flight:  # else its copies are being made
                del self._spares[session]

    def _take_host_pages(self, victims: Victims) -> None:
        """Give each victim a host page, which the current plan fills."""
        self.host_free -= len(victims)
        self._in_flight.update(dict.fromkeys(victims.sessions))
