"""A twin of ``CacheManager`` for whole turns: the same rules, policies and order of decisions, without slot numbers,
token ids or shared chunks, on one byte per chunk. It is some twenty times faster; that both decide the same is tested.

One turn here: ``can_admit`` → ``admit`` (context and answer get their slots at once, everything is computed) →
``release``. Each ``admit`` is a plan that is complete when it returns.
"""

from __future__ import annotations

from pensieve.config import CacheConfig
from pensieve.engine.cache.index import Give
from pensieve.engine.cache.policy import Policy
from pensieve.engine.cache.restore import Range, Restore
from pensieve.engine.cost import CostModel
from pensieve.simulate.places import (
    ADMITTED,
    BOTH,
    BOTH_SAVING,
    CHOSEN,
    DEVICE,
    DROPPED,
    HOST,
    HOST_SAVING,
    SETTLED,
    PlacesIndex,
    PlacesRound,
    Resident,
)


class TurnCache:
    """Two tiers of chunks.

    ``slack``: clean device slots to reclaim, and chunks to save ahead, beyond what is needed now, so that sessions are
    ranked less often; 0: exactly as ``CacheManager``.
    """

    def __init__(self, config: CacheConfig, cost: CostModel, policy: Policy, slack: int = 0) -> None:
        self.config = config
        self.index = PlacesIndex(policy, cost)
        self.device_free = config.device_chunks
        self.host_free = config.host_chunks
        self.dropped_chunks = 0
        self.saved_chunks = 0
        self._slack = slack
        self._sessions: dict[int, Resident] = {}
        self._running: dict[int, Resident] = {}
        """In order of admission."""
        self._pinned = 0
        self._spare = 0
        """Chunks of running sessions that are in both tiers."""
        self._in_flight: dict[Resident, None] = {}

    def chunks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.chunk_tokens)

    def can_admit(self, total: int, *, reserve: bool) -> bool:
        """Whether a turn whose context and answer have ``total`` tokens may be admitted now."""
        left = self.config.device_chunks - self._pinned - self.chunks_for(total)
        return left > self.config.decode_reserve * self.config.device_chunks if reserve else left >= 0

    def admit(self, key: int, history: int, total: int, now: float) -> Restore:
        """Give every chunk of ``total`` tokens a device slot; ``missing`` of the result includes the answer."""
        session = self._sessions.get(key) or self._add(key)
        assert session.tokens <= history, f"session {key} has {session.tokens} tokens cached, history is {history}"
        places = session.places
        session.running = True
        self.index.touch(session)
        self._running[key] = session
        self._spare += places.count(BOTH)
        restore = self._count(session, history, total)
        places.extend(bytes(self.chunks_for(total) - len(places)))
        self._pinned += len(places)
        absent = places.count(DROPPED) + places.count(HOST)
        self._reserve(absent, now)
        self.device_free -= absent
        session.places = places = places.translate(ADMITTED)
        session.cached = len(places)
        self._in_flight[session] = None
        self.index.touch(session)
        self._save_ahead(now)
        self._settle()
        self._written(session, restore.missing)
        session.tokens = total
        return restore

    def release(self, key: int, stamp: float) -> None:
        """The turn has ended; ``stamp`` is the time that its policy will count from."""
        session = self._running.pop(key)
        self._pinned -= len(session.places)
        self._spare -= session.places.count(BOTH)
        session.running = False
        session.last_active = stamp
        self.index.touch(session)

    def clear(self) -> None:
        """Forget everything, running turns too."""
        for session in list(self._sessions.values()):
            self._forget(session)
        self._running.clear()
        self._in_flight.clear()
        self._pinned = self._spare = 0
        self.device_free, self.host_free = self.config.device_chunks, self.config.host_chunks

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, key: int) -> Resident:
        session = Resident(key, self.index.add_row())
        self._sessions[key] = session
        self.index.attach(session)
        return session

    def _forget(self, session: Resident) -> None:
        del self._sessions[session.key]
        self.index.remove(session)

    def _count(self, session: Resident, history: int, total: int) -> Restore:
        """Where the history is; missing ranges as ``CacheManager.admit`` gives them."""
        size = self.config.chunk_tokens
        missing: list[Range] = []
        device = host = 0
        for index, place in enumerate(session.places):
            low = index * size
            valid = min(session.tokens - low, size) if place != DROPPED else 0
            if place == HOST:
                host += valid
            elif place != DROPPED:
                device += valid
            high = min(low + size, total)
            if low + valid < high:
                _append(missing, low + valid, high)
        cached_end = len(session.places) * size
        if cached_end < total:
            _append(missing, cached_end, total)
        return Restore(tuple(missing), device, host, history - device - host)

    def _written(self, session: Resident, missing: tuple[Range, ...]) -> None:
        """Host copies of chunks that were written to are stale."""
        size = self.config.chunk_tokens
        for start, _ in missing:
            index = start // size
            if session.places[index] == BOTH:  # only a range's first chunk can have held something
                session.places[index] = DEVICE
                self.host_free += 1
                self._spare -= 1

    def _reserve(self, slots: int, now: float) -> None:
        wanted = slots + self._slack if self.device_free < slots else slots
        while self.device_free < wanted:
            victims = self.index.round(Give.SLOT, now, wanted - self.device_free)
            if not self._reclaim(victims, wanted):
                break
        while self.device_free < slots:
            victims = self.index.round(Give.SAVED_SLOT, now, slots - self.device_free)
            if not self._evict(victims, slots, now):
                break
        assert self.device_free >= slots, f"{slots} slots asked for, {self.device_free} could be had"

    def _reclaim(self, victims: PlacesRound, slots: int) -> bool:
        before = self.device_free
        while self.device_free < slots and (group := victims.take()):
            session, indices = group
            for index in indices:
                session.places[index] = HOST
            self.device_free += len(indices)
            self.index.touch(session)
            victims.put_back()
        return self.device_free > before

    def _evict(self, victims: PlacesRound, slots: int, now: float) -> bool:
        """All victims are chosen before the first is moved, as the most valuable are saved first."""
        chosen: list[tuple[float, Resident, int]] = []
        while self.device_free + len(chosen) < slots and (group := victims.take()):
            value = victims.peek()
            session, indices = group
            for index in indices:
                session.places[index] = CHOSEN
                chosen.append((value, session, index))
            victims.put_back()
        room: PlacesRound | None = None
        for value, session, index in reversed(chosen):
            room = room or self.index.round(Give.HOST_COPY, now, len(chosen))
            if self._make_host_room(room, value):
                self._save(session, index, HOST_SAVING)
            else:
                self._drop(session, index)
            self.device_free += 1
        return bool(chosen)

    def _make_host_room(self, room: PlacesRound, value: float) -> bool:
        while self.host_free == 0:
            if self._spare:
                self._discard_spare_copy()
                continue
            if room.peek() > value:
                return False
            group = room.take()
            if group is None:
                return False
            session, indices = group
            for index in indices:
                self.host_free += 1
                self._drop(session, index)
            room.put_back()
        return True

    def _discard_spare_copy(self) -> None:
        for session in self._running.values():
            index = session.places.find(BOTH)
            if index >= 0:
                session.places[index] = DEVICE
                self.host_free += 1
                self._spare -= 1
                return
        raise AssertionError(f"{self._spare} spare copies are counted, none was found")

    def _save(self, session: Resident, index: int, place: int) -> None:
        session.places[index] = place
        self.host_free -= 1
        self.saved_chunks += 1
        self._in_flight[session] = None
        self.index.touch(session)

    def _drop(self, session: Resident, index: int) -> None:
        session.places[index] = DROPPED
        self.dropped_chunks += 1
        session.cached -= 1
        self.index.touch(session)
        if session.cached == 0 and not session.running:
            self._in_flight.pop(session, None)
            self._forget(session)

    def _save_ahead(self, now: float) -> None:
        if self.config.host_chunks == 0:
            return
        low = self.config.swap_watermark * self.config.device_chunks - self.device_free
        need = 0 if low <= 0 else int(-(-(low - self.index.total(Give.SLOT)) // 1))
        if need <= 0:
            return
        need += self._slack
        victims = self.index.round(Give.SAVED_SLOT, now, need)
        room = self.index.round(Give.HOST_COPY, now, need)
        while need > 0 and (group := victims.take()):
            value = victims.peek()
            session, indices = group
            for index in indices:
                if not self._make_host_room(room, value):
                    return
                self._save(session, index, BOTH_SAVING)
                need -= 1
            victims.put_back()

    def _settle(self) -> None:
        """The plan with all these copies is complete."""
        for session in self._in_flight:
            before = session.places.count(BOTH)
            session.places = session.places.translate(SETTLED)
            if session.running:
                self._spare += session.places.count(BOTH) - before
            self.index.touch(session)
        self._in_flight.clear()


def _append(ranges: list[Range], start: int, end: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))
