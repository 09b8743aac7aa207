"""Who waits, who runs and who has to make room: the queue and the running set of ``Scheduler``."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

from pensieve.core import RequestKey, SessionKey, TokenArray
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.groups import Beams, Group
from pensieve.engine.request import Request
from pensieve.engine.shares import FairQueue
from pensieve.engine.warm_ups import WarmUps


class Roster:
    """Not thread-safe: the engine's thread owns it.

    ``places``: how many may run. ``stateless``: nothing stays cached of a request that leaves.
    """

    def __init__(self, cache: CacheManager, warming: WarmUps, *, places: int, stateless: bool) -> None:
        self._cache = cache
        self._warming = warming
        self._places = places
        self._stateless = stateless
        self.waiting = FairQueue(places)
        self.running: list[Request] = []
        """In order of arrival, priority counted in (``Request.place``)."""
        self.groups: dict[RequestKey, Group] = {}
        """The group that each of its members belongs to."""
        self.suspensions = 0
        """How often a generation had to make room, since start."""
        self._by_key: dict[RequestKey, Request] = {}

    def get(self, key: RequestKey) -> Request | None:
        """A request that is somebody's, running or waiting."""
        return self._by_key.get(key)

    def beams(self, request: Request) -> Beams:
        """The search that one is a beam of (``Request.is_beam``)."""
        beams = self.groups[request.key].beams
        assert beams is not None
        return beams

    def add(self, request: Request, group: Group | None = None) -> None:
        """From now on the request is known, and a member of its group."""
        if request.key not in self._by_key:
            self.waiting.arrive(request)
        self._by_key[request.key] = request
        if group is not None:
            self.groups[request.key] = group

    def wait(self, request: Request) -> None:
        """Into the queue, at its place."""
        self.waiting.add(request)

    def join(self, request: Request) -> None:
        """Into the batch."""
        bisect.insort(self.running, request, key=lambda other: other.place)
        request.in_batch = True

    def leave(self, request: Request, now: float, *, forget: bool = False) -> None:
        """Out of the batch for good. Its KV stays cached, unless it is to be forgotten."""
        self.running.remove(request)
        request.in_batch = False
        computed = self._computed(request)
        self.drop(request)
        if request.warm:
            self._warming.left(request)
        forget = forget or self._stateless
        self._cache.release(request.session, now, computed, forget=forget, hints=request.hints)

    def drop(self, request: Request) -> None:
        """The request is nobody's any more."""
        if self._by_key.pop(request.key, None) is not None:
            self.waiting.depart(request)
        self.groups.pop(request.key, None)

    def cancel(self, key: RequestKey, now: float) -> bool:
        """Take a request out at once; False when it is not known (any more). What it computed stays cached.

        A finished request is no longer anybody's to cancel: it leaves when its last token is cached. The beams of a
        search go with the request that they belong to.
        """
        request = self._by_key.get(key)
        if request is None or request.finished is not None:
            return False
        group = self.groups.get(key)
        if group is not None and group.beams is not None:
            self.end_beams(group, request, now)
        elif not request.in_batch:
            self.waiting.remove(request)
            self.drop(request)
        else:
            if group is not None:
                group.bequeath(request)
            self.leave(request, now)
        return True

    def hurry(self, session: SessionKey | None, now: float) -> None:
        """Let the finished requests of one session, or of all, go without caching their last token."""
        self._warming.forget(session)
        for request in list(self.running):
            if request.finished is not None and session in (None, request.session):
                self.leave(request, now)

    def end_warming(self, session: SessionKey, now: float) -> None:
        """A turn of a session comes: who was only warmed makes room, and what that has brought stays."""
        for warm in [other for other in self.running if other.warm]:
            self.leave(warm, now)
        self._warming.forget(session)

    def end_beams(self, group: Group, best: Request, now: float) -> None:
        """A search is over: its members leave, and what ``best`` has cached is the session's."""
        for member in group.members:
            if member.in_batch:
                self.leave(member, now, forget=member is not best)
            else:
                self.drop(member)
        if group.leader in self.waiting:
            self.waiting.remove(group.leader)
        if best is not group.leader:
            self._cache.replace(group.leader.session, best.session)

    # -- making room -------------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> None:
        """Make sure that a generation's newest token has a place in a page, unless it has to go itself.

        The youngest of the tenant that takes most of the device go first, a group as a whole.
        """
        while not self._cache.extend(request.session, request.length, now):
            self._send_off(self._youngest(self._held()), now)
            if not request.in_batch:
                return

    def places(self, request: Request) -> int:
        """How many places of the batch a request takes that is admitted now, with all of its group."""
        group = self.groups.get(request.key)
        if group is None:
            return 1
        return group.size if group.beams is not None else 1 + len(group.to_branch)

    def make_place(self, now: float) -> None:
        """Let the next tenant have its share of the places of the batch, where another has more than its own.

        What is suspended for it stays cached as long as there is room, and comes back when a place is free.
        """
        heads = [] if self.waiting.is_for_one else self.waiting.heads()
        if not heads:
            return
        mine, wanted = heads[0].tenant, 0
        held = Counter(request.tenant for request in self.running if not request.warm)
        for request in self.waiting.line(mine):
            if held[mine] + wanted + self.places(request) > self.waiting.share(mine):
                break
            wanted += self.places(request)
        while wanted and len(self.running) + wanted > self._places:
            held = Counter(one.tenant for one in self.running if one.tenant != mine and not one.warm)
            over = {one: held[one] / self.waiting.weight(one) for one in held}
            most = max(over, key=lambda one: over[one], default=mine)
            if most == mine or held[most] <= self.waiting.share(most):
                return
            self._send_off(self._youngest(over), now)

    def _held(self) -> dict[str, float]:
        """Tokens that each tenant's running requests have on the device, divided by its weight."""
        held: dict[str, float] = {}
        if self.waiting.is_for_one:
            return held
        for request in self.running:
            if not request.warm:
                held.setdefault(request.tenant, 0.0)
                held[request.tenant] += request.length / self.waiting.weight(request.tenant)
        return held

    def _youngest(self, held: Mapping[str, float]) -> Request:
        """The youngest request of the tenant that holds most; a warm-up, which is younger than any, before all."""
        last = self.running[-1]
        if last.warm or not held:
            return last
        most = max(held, key=lambda tenant: held[tenant])
        return next(request for request in reversed(self.running) if request.tenant == most)

    def _send_off(self, request: Request, now: float) -> None:
        """Out of the batch with a request, and with its group."""
        if request.finished is not None:
            self.leave(request, now)
        else:
            self.suspend_group(request, now)

    def branching(self) -> list[Group]:
        """The searches in the batch some of whose beams are to take over the KV of others."""
        return list(dict.fromkeys(group for group in self.groups.values() if group.branches))

    def make_room_for_branches(self, now: float) -> None:
        """Make sure that each beam that joins a search has a page. One that is in the batch gives up one for it."""
        while (
            sum(not target.in_batch for group in self.branching() for _, target in group.branches)
            > self._cache.unpinned_pages
        ):
            self._send_off(self._youngest(self._held()), now)

    def suspend_group(self, request: Request, now: float) -> None:
        """Suspend a request, and with it the others of its group as long as there is anybody else.

        Alone on the device candidates that have grown too large for it go on with the first, and the last wait. Beams
        have to go on together; a search is refused that could grow too large.
        """
        group = self.groups.get(request.key)
        if group is None:
            self._suspend(request, now)
        elif group.beams is not None:
            self._park(group, now)
        else:
            members = group.in_batch()
            alone = len(members) == len(self.running)
            for member in [request] if alone else reversed(members):
                if member.finished is None:
                    self._suspend(member, now)

    def _suspend(self, request: Request, now: float) -> None:
        """Take a request out of the batch and back into the queue, at its place (EuroSys §4.3.5).

        Its chunks are unpinned; swap-out takes them like any others, and their recency keeps them for last.
        """
        self.running.remove(request)
        request.in_batch = False
        self._cache.suspend(request.session, now, self._computed(request))
        request.missing.clear()
        request.path = None
        self.wait(request)
        self.suspensions += 1

    def _computed(self, request: Request) -> TokenArray:
        """What a running request's KV stands for: of a beam that is about to take over another's, the prompt alone."""
        group = self.groups.get(request.key)
        if group is not None and any(target is request for _, target in group.branches):
            return request.context[: request.prompt_tokens]
        return request.context

    def _park(self, group: Group, now: float) -> None:
        """Suspend a search. Its leader waits for all; the other beams give up what they do not share with it."""
        for member in reversed(group.in_batch()):
            if member is group.leader:
                self._suspend(member, now)
            else:
                self.running.remove(member)
                member.in_batch = False
                member.missing.clear()
                self._cache.release(member.session, now, member.context, forget=True)
        assert group.beams is not None
        group.beams.branches.clear()
