"""Who waits, who runs and who has to make room: the queue and the running set of ``Scheduler``."""

from __future__ import annotations

import bisect

from pensieve.core import RequestKey, SessionKey, TokenArray
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.groups import Group
from pensieve.engine.request import Request
from pensieve.engine.warm_ups import WarmUps


class Roster:
    """Not thread-safe: the engine's thread owns it. ``stateless``: nothing stays cached of a request that leaves."""

    def __init__(self, cache: CacheManager, warming: WarmUps, *, stateless: bool) -> None:
        self._cache = cache
        self._warming = warming
        self._stateless = stateless
        self.waiting: list[Request] = []
        """In order of arrival."""
        self.running: list[Request] = []
        """In order of arrival."""
        self.groups: dict[RequestKey, Group] = {}
        """The group that each of its members belongs to."""
        self.suspensions = 0
        """How often a generation had to make room, since start."""
        self._by_key: dict[RequestKey, Request] = {}

    def get(self, key: RequestKey) -> Request | None:
        """A request that is somebody's, running or waiting."""
        return self._by_key.get(key)

    def add(self, request: Request, group: Group | None = None) -> None:
        """From now on the request is known, and a member of its group."""
        self._by_key[request.key] = request
        if group is not None:
            self.groups[request.key] = group

    def wait(self, request: Request) -> None:
        """Into the queue, at its place by arrival."""
        bisect.insort(self.waiting, request, key=lambda other: other.arrival)

    def join(self, request: Request) -> None:
        """Into the batch."""
        bisect.insort(self.running, request, key=lambda other: other.arrival)
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
        self._by_key.pop(request.key, None)
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

        The youngest go first, a group as a whole.
        """
        while not self._cache.extend(request.session, request.length, now):
            youngest = self.running[-1]
            if youngest.finished is not None:
                self.leave(youngest, now)
            else:
                self.suspend_group(youngest, now)
            if not request.in_batch:
                return

    def branching(self) -> list[Group]:
        """The searches in the batch some of whose beams are to take over the KV of others."""
        return list(dict.fromkeys(group for group in self.groups.values() if group.branches))

    def make_room_for_branches(self, now: float) -> None:
        """Make sure that each beam that joins a search has a page. One that is in the batch gives up one for it."""
        while (
            sum(not target.in_batch for group in self.branching() for _, target in group.branches)
            > self._cache.unpinned_pages
        ):
            youngest = self.running[-1]
            if youngest.finished is not None:
                self.leave(youngest, now)
            else:
                self.suspend_group(youngest, now)

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
        """Take a request out of the batch and back into the queue, at its place by arrival (EuroSys §4.3.5).

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
