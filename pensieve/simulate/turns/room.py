"""Room in two tiers of chunks: what a ``TurnCache`` reclaims, saves and drops for it: see ``engine.cache.tiers``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from pensieve.config import CacheConfig
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.policy import Policy
from pensieve.engine.cost.model import CostModel
from pensieve.simulate.turns.places import (
    BOTH,
    BOTH_SAVING,
    CHOSEN,
    DEVICE,
    DROPPED,
    HOST,
    HOST_SAVING,
    RECLAIMED,
    PlacesIndex,
    Resident,
)
from pensieve.simulate.turns.victims import Ranking, Round, VictimOrder, Victims, can_rank

_DEVICE = bytes((DEVICE,))
_BOTH = bytes((BOTH,))


class TierRoom(ABC):
    """The pages of both tiers, and who gives way. ``slack``: see ``TurnCache``."""

    def __init__(self, config: CacheConfig, cost: CostModel, policy: Policy, slack: int) -> None:
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
        self._both: dict[Resident, None] = {}
        """Whose they are, and some that have none left."""
        self._spares: dict[Resident, None] = {}
        """Those in use that may have such chunks, whose host copies nobody needs now; in order of admission."""
        self._in_flight: dict[Resident, None] = {}

    @abstractmethod
    def _dropped(self, residents: list[Resident]) -> None:
        """Each has one chunk fewer in any tier, in this order; some occur more than once."""

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
                kept.put(DEVICE)
                self.index.touch_all(kept.sessions)
            self._discard_spare_copies(len(chosen) - self.host_free)
            self._saved(chosen)

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
        if not self._slack or ranking is None or not ranking.serves(now, count):
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
            saved.put(HOST_SAVING)
            self._saved(saved)
        chosen.put(DROPPED)
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
