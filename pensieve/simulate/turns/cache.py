"""A twin of ``CacheManager`` without slot numbers, token ids or shared chunks, on one byte per chunk: the same rules,
policies and order of decisions, some twenty times faster. That both decide the same is tested.

One plan here: ``grow``, ``can_admit`` → ``admit``, ``save_ahead``, ``complete``; ``release`` when a turn has ended or
is suspended. What generations grow by is counted for all of them together, and given to each when it is released.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve.config import CacheConfig
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.policy import UNKNOWN, Policy
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.turns.places import (
    ADMITTED,
    BOTH,
    BOTH_SAVING,
    CHOSEN,
    DEVICE,
    DROPPED,
    HOST,
    HOST_SAVING,
    RECLAIMED,
    SETTLED,
    PlacesIndex,
    Resident,
)
from pensieve.simulate.turns.victims import Ranking, Round, Victim, Victims, can_rank


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
        self.loading = 0
        """Chunks that the plan in hand copies in from the host."""
        self.dropped_chunks = 0
        self.saved_chunks = 0
        self._cost = cost
        self._slack = slack
        self._batch = slack // 8
        self._can_rank = can_rank(self.index)
        self._rankings: dict[Reclaim, Ranking] = {}
        self._watermark = config.swap_watermark * config.device_chunks
        self._sessions: dict[int, Resident] = {}
        self._running: dict[int, Resident] = {}
        self._pinned = 0
        self._reclaimable = 0
        """Chunks of idle sessions that are in both tiers."""
        self._both: dict[Resident, None] = {}
        """The sessions that these are of, and some that have none left."""
        self._spares: dict[Resident, None] = {}
        """Running sessions that may have such chunks, whose host copies nobody needs now; in order of admission."""
        self._in_flight: dict[Resident, None] = {}
        self._admitted: list[tuple[Resident, Restore]] = []

    # -- questions: change nothing -----------------------------------------------------------------------------------

    def chunks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.chunk_tokens)

    @property
    def unpinned(self) -> int:
        """Device slots that no running turn holds."""
        return self.config.device_chunks - self._pinned

    def can_admit(self, key: int, tokens: int, *, reserve: bool) -> bool:
        """Whether a turn with a context of ``tokens`` may be admitted in this plan: as ``CacheManager`` has it."""
        if self.copying(key):
            return False
        left = self.unpinned - self.chunks_for(tokens)
        return left > self.config.decode_reserve * self.config.device_chunks if reserve else left >= 0

    def copying(self, key: int) -> bool:
        """Whether the plan in hand copies chunks of this session."""
        return bool(self._in_flight) and self._sessions.get(key) in self._in_flight

    # -- a plan ------------------------------------------------------------------------------------------------------

    def admit(self, key: int, history: int, tokens: int, now: float) -> Restore:
        """Pin a context and give every chunk of it a device slot."""
        session = self._sessions.get(key) or self._add(key)
        places = session.places
        self._reclaimable -= places.count(BOTH)
        self._both.pop(session, None)
        session.running = True
        self.index.came_back(session, tokens - history, now)
        self._running[key] = session
        self._in_flight[session] = None
        restore = self._count(session, history, tokens)
        places.extend(bytes(self.chunks_for(tokens) - len(places)))
        self._pinned += len(places)
        loading = places.count(HOST)
        if loading or places.count(BOTH):
            self._spares[session] = None
        absent = places.count(DROPPED) + loading
        self._reclaim(absent, now)
        self.loading += loading
        session.places = places.translate(ADMITTED)
        session.cached = len(places)
        self._admitted.append((session, restore))
        return restore

    def grow(self, chunks: int, now: float) -> None:
        """Reclaim running turns so many more slots, all together; at most ``unpinned``."""
        self._pinned += chunks
        self._reclaim(chunks, now)

    def save_ahead(self, now: float, limit: int) -> None:
        """As ``CacheManager.swap_out_ahead``."""
        need = -(-(self._watermark - self.device_free - self._reclaimable) // 1)
        if need <= self._batch:
            return
        need = min(int(need), limit)
        # Nothing is dropped for it: what the host has no room for stays where it is.
        room = self.host_free + sum(session.places.count(BOTH) for session in self._spares)
        while (count := min(need, room)) > 0:
            chosen = self._victims(Reclaim.SAVED_PAGE, now, need).move(count, BOTH_SAVING)
            if not chosen:
                return
            saved, kept = chosen[:room], chosen[room:]  # a group may be larger than the room
            self._discard_spare_copies(len(saved) - self.host_free)
            self._saved(saved)
            self._put(kept, DEVICE)
            need -= len(chosen)
            room -= len(saved)

    def complete(self) -> None:
        """The plan in hand was executed."""
        for session in self._in_flight:
            if not session.running and (saved := session.places.count(BOTH_SAVING)):
                self._reclaimable += saved
                self._both[session] = None
            session.places = session.places.translate(SETTLED)
            self.index.touch(session)
        for session, restore in self._admitted:
            self._written(session, restore.missing)
        self._in_flight.clear()
        self._admitted.clear()
        self.loading = 0

    def release(self, key: int, tokens: int, stamp: float, missing: Sequence[Range] = ()) -> None:
        """A turn has ended, or is suspended: ``tokens`` of its context are cached, but for what is still ``missing``.

        ``stamp`` is the time that its policy will count from.
        """
        session = self._running.pop(key)
        self._spares.pop(session, None)
        places = session.places
        grown = self.chunks_for(tokens) - len(places)
        places.extend(bytes((DEVICE,)) * grown)
        self._pinned -= len(places)
        session.tokens = tokens
        self.index.left(session, stamp)
        if missing:
            self._give_up(session, missing)
        session.cached = len(places) - places.count(DROPPED)
        session.running = False
        session.last_active = stamp
        if both := places.count(BOTH):
            self._reclaimable += both
            self._both[session] = None
        if session.cached == 0:
            self._forget(session)

    def suspended(self, key: int, now: float) -> None:
        """The turn that was released in this moment will go on: as ``CacheManager.suspend``."""
        self.index.policy.came_back(key, now)
        if key in self._sessions:
            self._sessions[key].kind = UNKNOWN

    def clear(self) -> None:
        """Forget everything, running turns too."""
        for session in list(self._sessions.values()):
            self._forget(session)
        for state in (self._running, self._spares, self._in_flight, self._admitted, self._rankings):
            state.clear()
        self._pinned = self._reclaimable = self.loading = 0
        self.device_free, self.host_free = self.config.device_chunks, self.config.host_chunks

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, key: int) -> Resident:
        session = Resident(key, self.index.add_row())
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _forget(self, session: Resident) -> None:
        del self._sessions[session.key]
        self._both.pop(session, None)
        self.index.remove(session)

    def _count(self, session: Resident, history: int, total: int) -> Restore:
        """Where the history is; missing ranges as ``CacheManager.admit`` gives them."""
        size, places = self.config.chunk_tokens, session.places
        known = min(session.tokens, total - 1)  # something has to be computed to get a token
        missing: list[Range] = []
        lost = 0
        first = places.find(DROPPED)
        while first >= 0:
            last = len(places) - len(places[first:].lstrip(bytes((DROPPED,))))
            low, high = first * size, min(last * size, known)
            missing.append((low, high))
            lost += high - low
            first = places.find(DROPPED, last)
        if missing and missing[-1][1] == known:
            missing[-1] = missing[-1][0], total
        else:
            missing.append((known, total))
        beyond = len(places) * size - known if places and places[-1] == HOST else 0
        host = places.count(HOST) * size - beyond
        device = known - lost - host
        return Restore(tuple(missing), device, host, history - device - host)

    def _written(self, session: Resident, missing: Sequence[Range]) -> None:
        """Host copies of chunks that were written to are stale."""
        for start, _ in missing:
            index = start // self.config.chunk_tokens
            if session.places[index] == BOTH:  # only a range's first chunk can have held something
                session.places[index] = DEVICE
                self.host_free += 1

    def _give_up(self, session: Resident, missing: Sequence[Range]) -> None:
        """Chunks whose recomputation never came leave the device; of the last range, what came before it stays."""
        size, places = self.config.chunk_tokens, session.places
        session.tokens = missing[-1][0]
        kept = self.chunks_for(session.tokens)
        self.device_free += len(places) - kept
        del places[kept:]
        for start, end in missing[:-1]:
            for index in range(start // size, end // size):
                self.host_free += places[index] == BOTH
                self.device_free += 1
                places[index] = DROPPED

    # -- room --------------------------------------------------------------------------------------------------------

    def _reclaim(self, slots: int, now: float) -> None:
        """Take device slots, after making them free."""
        if self.device_free < slots:
            self._reserve(slots, now)
        self.device_free -= slots

    def _victims(self, reclaim: Reclaim, now: float, count: int) -> Victims:
        """Who gives way next: ranked now, or with ``slack`` not long ago."""
        if not self._can_rank:
            return Round(self.index, reclaim, now, count)
        ranking = self._rankings.get(reclaim)
        if not self._slack or ranking is None or not ranking.serves(now, count):
            ranking = self._rankings[reclaim] = Ranking(
                self.index, self._cost, reclaim, now, max(count, self._slack)
            )
        return ranking

    def _reserve(self, slots: int, now: float) -> None:
        """Make so many device slots free."""
        if 0 < self._reclaimable <= slots + self._batch - self.device_free:
            self._reclaim_all()
        while (need := slots + self._batch - self.device_free) > 0 and self._reclaimable:
            reclaimed = len(self._victims(Reclaim.PAGE, now, need).move(need, HOST))
            self.device_free += reclaimed
            self._reclaimable -= reclaimed
        while self.device_free < slots:
            need = slots + self._batch - self.device_free
            chosen = self._victims(Reclaim.SAVED_PAGE, now, need).move(need, CHOSEN)
            assert chosen, f"{slots} slots asked for, {self.device_free} could be had"
            self._evict(chosen, now)

    def _reclaim_all(self) -> None:
        """Make all reclaimable slots free. All are needed, so their order does not matter."""
        for session in self._both:
            session.places = session.places.translate(RECLAIMED)
            self.index.touch(session)
        self._both.clear()
        self.device_free += self._reclaimable
        self._reclaimable = 0

    def _evict(self, chosen: list[Victim], now: float) -> None:
        """Off the device: the most valuable are saved first, what the host has no room for is dropped."""
        self.device_free += len(chosen)
        room = self._victims(Reclaim.HOST_COPY, now, len(chosen))
        while chosen and (
            rooms := self._make_host_room(room, chosen[-1][0], len(chosen), ceiling=chosen[0][0])
        ):
            saved = chosen[-rooms:]
            del chosen[-rooms:]
            self._put(saved, HOST_SAVING)
            self._saved(saved)
        self._put(chosen, DROPPED)
        self._dropped(chosen[::-1])  # rows become free in the manager's order: they break ties

    def _make_host_room(self, room: Victims, value: float, most: int, ceiling: float = np.inf) -> int:
        """Free host slots for chunks, the first worth ``value`` and none less than ``ceiling``; returns for how many.

        Spare copies go, then what is on the host alone and worth no more than any of them, or else one victim for one.
        """
        self._discard_spare_copies(most - self.host_free)
        if self.host_free == 0:
            dropped = room.move(most, DROPPED, min(value, ceiling)) or room.move(1, DROPPED, value)
            self.host_free += len(dropped)
            self._dropped(dropped)
        return min(self.host_free, most)

    def _discard_spare_copies(self, most: int) -> None:
        """Free up to so many host slots by forgetting copies of chunks in use."""
        for session in list(self._spares) if most > 0 else ():
            while (index := session.places.find(BOTH)) >= 0:
                if most <= 0:
                    return
                session.places[index] = DEVICE
                self.host_free += 1
                most -= 1
            if session not in self._in_flight:  # else its copies are just coming
                del self._spares[session]

    def _put(self, victims: Sequence[Victim], place: int) -> None:
        for _, session, chunk in victims:
            session.places[chunk] = place
            self.index.touch(session)

    def _saved(self, victims: Sequence[Victim]) -> None:
        """They have a host slot each, to be filled by the plan in hand."""
        self.host_free -= len(victims)
        self.saved_chunks += len(victims)
        for _, session, _ in victims:
            self._in_flight[session] = None

    def _dropped(self, victims: Sequence[Victim]) -> None:
        """They are in no tier any more."""
        self.dropped_chunks += len(victims)
        for _, session, _ in victims:
            session.cached -= 1
            if session.cached == 0:
                self._in_flight.pop(session, None)
                self._forget(session)
