"""A twin of ``CacheManager`` without page numbers and token ids, on one byte per chunk: the same rules, policies and
order of decisions, some twenty times faster. That both decide the same is tested.

For one plan it is called in this order: ``grow``, ``can_admit`` → ``admit``, ``save_ahead``, ``complete``; and
``release`` when a turn has ended or is suspended. The chunks that generations grow by are counted for all of them
together, and added to each session when it is released.
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
from pensieve.engine.cost.model import CostModel
from pensieve.replay.load.workload import Piece
from pensieve.simulate.turns.places import (
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
    SharedRun,
    SharingSession,
)
from pensieve.simulate.turns.sharing import Sharing
from pensieve.simulate.turns.victims import Ranking, Round, VictimOrder, Victims, can_rank

_DEVICE = bytes((DEVICE,))
_BOTH = bytes((BOTH,))
_SHARE = (SharedRun, SharingSession)


class TurnCache:
    """Two tiers of chunks.

    ``slack``: how many chunks are ranked at a time, to be used up within ``FRESH_S``, and eight times as many as are
    reclaimed or saved at a time; 0: at every need and no more than that, exactly as ``CacheManager``.
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
        """Sessions and runs with such chunks, and some that have none left."""
        self._spares: dict[ChunkHolder, None] = {}
        """Sessions and runs in use that may have such chunks, whose host copies nothing needs; by admission."""
        self._in_flight: dict[ChunkHolder, None] = {}
        self._size = config.chunk_tokens
        self.loading = 0
        """Chunks that the plan in hand copies in from the host."""
        self._sessions: dict[int, ChunkHolder] = {}
        self._running: dict[int, ChunkHolder] = {}
        self.unpinned = config.device_chunks
        """Device pages that no running turn holds."""
        self._admitted: list[tuple[ChunkHolder, Restore]] = []
        self._sharing = Sharing(self.index, self._size, self._both, self._spares, self._in_flight)

    def chunks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def can_admit(self, key: int, tokens: int, prefix: tuple[Piece, ...] = (), *, reserve: bool) -> bool:
        """Whether a turn with a context of ``tokens`` may be admitted in this plan: as ``CacheManager`` has it.

        ``prefix``: what its session's first input begins with.
        """
        if self.is_copying(key, prefix):
            return False
        left = self.unpinned - self.chunks_for(tokens)
        if prefix:
            left += self._pinned(key, prefix)
        return left > self.config.decode_reserve * self.config.device_chunks if reserve else left >= 0

    def is_copying(self, key: int, prefix: tuple[Piece, ...] = ()) -> bool:
        """Whether the plan in hand copies chunks of this session, or saves some that it is about to share."""
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
        full, found = self._others(session, prefix)
        return any(holder.places[index] in SAVING for index, holder in enumerate(found, full))

    def admit(
        self, key: int, history: int, tokens: int, now: float, prefix: tuple[Piece, ...] = ()
    ) -> Restore:
        """Pin a context and place every chunk of it on the device. ``prefix``: see ``can_admit``."""
        session = self._sessions.get(key) or self._add(key, prefix)
        runs = self._meet(session, prefix) if isinstance(session, SharingSession) else ()
        before = session.places
        loading, both = before.count(HOST), before.count(BOTH)
        spare = loading or both
        restore = session.restore(history, tokens, self._size)
        more = self.chunks_for(tokens) - len(before)
        absent = before.count(DROPPED) + loading + more
        session.running = True
        session.places_before, session.places = before, before.translate(ADMITTED) + _DEVICE * more
        before[:] = bytes(len(before))  # nothing that a ranking has of it can be a victim now
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
        self._reclaim(absent, now)
        self.loading += loading
        self._admitted.append((session, restore))
        return restore

    def grow(self, chunks: int, now: float) -> None:
        """Pin so many more pages for all running turns together; at most ``unpinned``."""
        self.unpinned -= chunks
        self._reclaim(chunks, now)

    def complete(self) -> None:
        """The plan in hand was executed."""
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
            self._written(session, restore.missing)
        self._in_flight.clear()
        self._admitted.clear()
        self.loading = 0

    def save_ahead(self, now: float, limit: int) -> None:
        """As ``CacheManager.swap_out_ahead``."""
        short = self._watermark - self.device_free - self._reclaimable
        if short <= self._batch:
            return
        need = min(math.ceil(short), limit)
        # Nothing is dropped for it: what the host has no room for stays where it is.
        while need > 0:
            room = self.host_free
            if room < need or not self.index.one_by_one:  # a group may be larger than what is needed
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
            self._discard_spare_copies(len(chosen) - self.host_free)
            self._saved(chosen)

    def release(
        self,
        key: int,
        tokens: int,
        stamp: float,
        missing: Sequence[Range] = (),
        hints: Hints | None = None,
    ) -> None:
        """A turn has ended, or is suspended: ``tokens`` of its context are cached, but for what is still ``missing``.

        ``stamp`` is the time that its policy will count from, ``hints`` what its client says of the next turn.
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
            self._give_up(session, missing)
        if stamp == session.last_active and len(places) >= len(session.places_before):
            # To a policy it has not been away, and what rankings have of it is true again.
            session.places_before[:] = places
            session.places = places = session.places_before
        session.running = False
        session.last_active = stamp
        if both := places.count(BOTH):
            self._reclaimable += both
            self._both[session] = None
        if missing and isinstance(session, SharingSession):
            self._give_up_shared(session, missing)
        elif places.count(DROPPED) == len(places):
            self._forget(session)

    def suspend(self, key: int, now: float) -> None:
        """The turn that was released in this moment will go on: as ``CacheManager.suspend``."""
        if key in self._sessions:
            self.index.on_suspend(self._sessions[key], now)
        else:
            self.index.policy.on_return(key, now)

    def clear(self) -> None:
        """Forget everything, running turns too."""
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

    def _written(self, session: ChunkHolder, missing: Sequence[Range]) -> None:
        """Host copies of chunks that were written to are stale."""
        for start, _ in missing:
            index = start // self.config.chunk_tokens
            if session.places[index] == BOTH:  # only a range's first chunk can have held something
                session.places[index] = DEVICE
                self.host_free += 1

    def _give_up(self, session: ChunkHolder, missing: Sequence[Range]) -> None:
        """Chunks whose recomputation never came leave the device; of the last range, what came before it stays."""
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

    def _dropped(self, residents: list[ChunkHolder]) -> None:
        waiting = dict.fromkeys(reversed(residents))
        while waiting:  # in the order of their last chunks
            resident, _ = waiting.popitem()
            if resident.places.count(DROPPED) + resident.own_start < len(resident.places):
                continue
            if isinstance(resident, _SHARE):
                self._forget_owners(resident, waiting)
            else:
                self._in_flight.pop(resident, None)
                self._forget(resident)

    # -- what sessions share -----------------------------------------------------------------------------------------

    def _addresses(self, prefix: tuple[Piece, ...]) -> tuple[int, ...]:
        return self._sharing.addresses(prefix) if prefix and self.config.prefix_sharing else ()

    def _others(
        self, session: ChunkHolder | None, prefix: tuple[Piece, ...]
    ) -> tuple[int, list[SharingSession | SharedRun]]:
        """How many full chunks the session has itself, and who has those behind them."""
        full = 0 if session is None else session.tokens // self._size
        addresses = self._addresses(prefix)
        return full, self._sharing.find(addresses, full) if full < len(addresses) else []

    def _pinned(self, key: int, prefix: tuple[Piece, ...]) -> int:
        """Chunks of a session's context that running sessions pin already."""
        session = self._sessions.get(key)
        _, found = self._others(session, prefix)
        shared = session.runs if isinstance(session, SharingSession) else ()
        return sum(run.num_chunks for run in shared if run.running) + sum(holder.running for holder in found)

    def _meet(self, session: SharingSession, prefix: tuple[Piece, ...]) -> Sequence[SharedRun]:
        """Let a session own what others have of its beginning; returns its runs."""
        full, found = self._others(session, prefix)
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

    def _pin(self, run: SharedRun, *, spare: bool) -> None:
        """An owner of an idle run is admitted. ``spare``: some of its chunks are copied in."""
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

    def _unpin(self, runs: Sequence[SharedRun]) -> None:
        """One running owner less; those that have none left are idle."""
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

    def _give_up_shared(self, session: SharingSession, missing: Sequence[Range]) -> None:
        """As ``_give_up`` did with the session's own chunks; those who have nothing left are forgotten."""
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
        self._dropped([*lost, session])
        if self._sessions.get(session.key) is session:
            full = session.tokens // size
            if full < session.own_start:
                self._sharing.disown(session, full)
                session.tokens = full * size
            self._sharing.unregister(session, full)
            self._forget_owners(session, ())

    def _forget_owners(self, resident: SharingSession | SharedRun, waiting: Collection[ChunkHolder]) -> None:
        """Forget the sessions that have nothing left, now that this one has lost its last chunk.

        ``waiting``: those who are about to have lost theirs, but have not yet.
        """
        for session in list(resident.owners) if isinstance(resident, SharedRun) else (resident,):
            if not session.running and not any(
                one in waiting or one.places.count(DROPPED) + one.own_start < len(one.places)
                for one in (session, *session.runs)
            ):
                self._in_flight.pop(session, None)
                self._forget(session)

    # -- room in the tiers: as ``engine.cache.tiers`` ---------------------------------------------------------------

    def _reclaim(self, pages: int, now: float) -> None:
        """Take device pages, after making them free."""
        if self.device_free < pages:
            self._reserve(pages, now)
        self.device_free -= pages

    def _victims(self, reclaim: Reclaim, now: float, count: int) -> VictimOrder:
        """The chunks that give way next: ranked now, or with ``slack`` not long ago."""
        if not self._can_rank:
            return Round(self.index, reclaim, now, count)
        ranking = self._rankings.get(reclaim)
        if not self._slack or ranking is None or not ranking.is_usable(now, count):
            ranking = self._rankings[reclaim] = Ranking(self.index, reclaim, now, max(count, self._slack))
        return ranking

    def _reserve(self, pages: int, now: float) -> None:
        """Make so many device pages free, with ``slack`` a few more."""
        if 0 < self._reclaimable <= pages + self._batch - self.device_free:
            self._reclaim_all()
        while (need := pages + self._batch - self.device_free) > 0 and self._reclaimable:
            reclaimed = len(self._victims(Reclaim.PAGE, now, need).move(need, HOST))
            self.device_free += reclaimed
            self._reclaimable -= reclaimed
        while self.device_free < pages:
            need = pages + self._batch - self.device_free
            chosen = self._victims(Reclaim.SAVED_PAGE, now, need).move(need, CHOSEN)
            assert chosen, f"{pages} device pages asked for, {self.device_free} could be had"
            self._evict(chosen, now)

    def _reclaim_all(self) -> None:
        """Make all reclaimable pages free. All are needed, so their order does not matter."""
        for session in self._both:
            session.places[:] = session.places.translate(RECLAIMED)
        self.index.touch_all(self._both)
        self._both.clear()
        self.device_free += self._reclaimable
        self._reclaimable = 0

    def _evict(self, chosen: Victims, now: float) -> None:
        """Take chunks off the device: the most valuable are saved, what the host has no room for is dropped."""
        self.device_free += len(chosen)
        room = self._victims(Reclaim.HOST_COPY, now, len(chosen))
        while chosen and (
            rooms := self._make_host_room(room, chosen.values[-1], len(chosen), ceiling=chosen.values[0])
        ):
            saved = chosen.part(-rooms)
            chosen = chosen.part(0, -rooms)
            saved.set_place(HOST_SAVING)
            self._saved(saved)
        chosen.set_place(DROPPED)
        self._dropped(chosen.sessions[::-1])  # rows become free in the manager's order: they break ties

    def _make_host_room(self, room: VictimOrder, value: float, most: int, ceiling: float = np.inf) -> int:
        """Free host pages for chunks, the first worth ``value`` and none less than ``ceiling``; returns for how many.

        Spare copies go first. Then go chunks on the host alone that are worth no more than any of those to come; when
        there is none, one that is worth no more than the first of them.
        """
        self._discard_spare_copies(most - self.host_free)
        if self.host_free == 0:
            dropped = room.move(most, DROPPED, min(value, ceiling)) or room.move(1, DROPPED, value)
            self.host_free += len(dropped)
            self._dropped(dropped.sessions)
        return min(self.host_free, most)

    def _discard_spare_copies(self, most: int) -> None:
        """Free up to so many host pages by forgetting copies of chunks in use."""
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
            if session not in self._in_flight:  # else its copies are just coming
                del self._spares[session]

    def _saved(self, victims: Victims) -> None:
        """Each gets a host page, which the plan in hand fills."""
        self.host_free -= len(victims)
        self._in_flight.update(dict.fromkeys(victims.sessions))
