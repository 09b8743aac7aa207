"""The requests that run: who joins them, who has to make room, and how members of a group branch off each other."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

from pensieve.config import SchedulerConfig
from pensieve.core import RequestKey, SessionKey
from pensieve.engine.cache.chunk import common_prefix
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.scheduling.queue import FairQueue
from pensieve.engine.scheduling.request import Group, Request
from pensieve.engine.scheduling.warming import WarmUps


class RunningSet:
    """Requests join from the queue, run, and leave or go back there. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, queue: FairQueue, warming: WarmUps
    ) -> None:
        self._config = config
        self._cache = cache
        self._queue = queue
        self._warming = warming
        self.requests: list[Request] = []
        """In order of arrival, priority counted in (``Request.queue_order``)."""
        self.suspensions = 0
        """How often a generation had to make room, since start."""
        self._by_key: dict[RequestKey, Request] = {}
        self._branching: list[Request] = []
        """Those that run and take over the KV of others in the next plan."""

    def get(self, key: RequestKey) -> Request | None:
        """A request that runs or waits, unless it warms a session or is still a fork."""
        return self._by_key.get(key)

    def enqueue(self, request: Request) -> None:
        """A new request is known from now on, and waits."""
        self._know(request)
        self._queue.add(request)

    # -- joining -----------------------------------------------------------------------------------------------------

    def fits(self, request: Request) -> bool:
        """Whether there is a place in the batch and room on the device for a request that waits, and for its forks.

        Changes nothing. Its addresses have been looked up (``Request.set_prefix_path``).
        """
        forks = self._forks(request)
        if len(self.requests) + 1 + len(forks) > self._config.max_running:
            return False
        if request.must_wait or any(fork.must_wait for fork in forks):
            return False
        size = self._cache.config.chunk_tokens
        return self._cache.can_admit(
            request.session,
            request.context,
            request.new_when_admitted,
            reserve=bool(self.requests),
            path=request.path,
            branches=sum(fork.pages_as_fork(size) for fork in forks),
            tenant=request.tenant,
        )

    def admit(self, request: Request, now: float) -> list[Request]:
        """Admit a request that fits, with its forks; returns all of them."""
        forks = self._forks(request)
        restore = self._cache.admit(
            request.session,
            request.context,
            request.new_when_admitted,
            now,
            request.path,
            tenant=request.tenant,
        )
        request.admit(restore, now)
        self.insert(request)
        # Before any work is taken: what the leader has of its last chunk now can be copied, what it computes not.
        for fork in forks:
            self._branch(fork, now)
            self._know(fork)
            self.insert(fork)
        return [request, *forks]

    def insert(self, request: Request) -> None:
        """Give an admitted request its place in the batch."""
        bisect.insort(self.requests, request, key=lambda other: other.queue_order)

    def branch(self, source: Request, target: Request) -> None:
        """Let a running member of a group take over the KV of another in the next plan. No source may be a target."""
        target.set_source(source)
        self._branching.append(target)

    def branch_all(self, now: float) -> bool:
        """Do what ``branch`` has asked for, once no more room has to be made. Returns whether it was anything.

        The pages are there: each target gives up one for the one that it takes.
        """
        targets, self._branching = self._branching, []
        for target in targets:
            self._branch(target, now)
        return bool(targets)

    def _branch(self, target: Request, now: float) -> None:
        assert target.source is not None
        common = common_prefix(target.source.context, target.context)
        start = self._cache.branch(target.source.session, target.session, target.context[: common + 1], now)
        complete = start is not None and self._cache.extend(target.session, target.length, now)
        assert start is not None and complete, (
            f"{target.session}: no page to branch off, though it was asked for"
        )
        target.on_branched(start)

    def _forks(self, source: Request) -> list[Request]:
        return [] if source.group is None else source.group.forks(source)

    def _know(self, request: Request) -> None:
        if request.key not in self._by_key:
            self._queue.arrive(request)
            self._by_key[request.key] = request

    # -- leaving -----------------------------------------------------------------------------------------------------

    def remove(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """Take a request out of the batch for good. Its KV stays cached, unless it is to be forgotten."""
        self.requests.remove(request)
        computed = request.cached_context
        request.leave_batch()
        self._drop(request)
        if request.warm:
            self._warming.on_end(request)
        free_kv = free_kv or self._config.stateless
        self._cache.release(request.session, now, computed, free_kv=free_kv, hints=request.hints)

    def retire(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """Take out a request that is not finished, whatever state it is in. Its KV stays cached, unless ``forget``.

        One that is finished leaves when its last token is cached.
        """
        is_fork = request.source is not None and not request.in_batch
        if request.finished is not None or (self.get(request.key) is not request and not is_fork):
            return
        group = request.group
        if request.in_batch:
            if group is not None and not group.guided:
                _bequeath(group, request)
            self.remove(request, now, free_kv=free_kv)
        elif is_fork:
            self._drop(request)
        else:
            self.remove_waiting(request)
        if group is not None and request is not group.leader:
            group.members.remove(request)

    def remove_waiting(self, request: Request) -> None:
        """A request that waits does not come back."""
        self._queue.remove(request)
        self._drop(request)

    def remove_finished(self, session: SessionKey | None, now: float) -> None:
        """Let the finished requests of one session, or of all, go without caching their last token."""
        self._warming.cancel(session)
        for request in list(self.requests):
            if request.finished is not None and session in (None, request.session):
                self.remove(request, now)

    def cancel_warm_ups(self, session: SessionKey, now: float) -> None:
        """A turn of ``session`` comes: running warm-ups make room, and what they have brought stays."""
        for warm in [other for other in self.requests if other.warm]:
            self.remove(warm, now)
        self._warming.cancel(session)

    def _drop(self, request: Request) -> None:
        """The request is not known any more."""
        if self._by_key.get(request.key) is request:
            del self._by_key[request.key]
            self._queue.depart(request)
        if request in self._branching:
            self._branching.remove(request)

    # -- making room -------------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> None:
        """Make sure that a generation's newest token has a place in a page, unless it has to go itself.

        The youngest of the tenant that takes most of the device go first, a group as a whole.
        """
        while not self._cache.extend(request.session, request.length, now):
            self._send_off(self._youngest(self._held()), now)
            if not request.in_batch:
                return

    def make_batch_room(self, now: float) -> None:
        """Let the next tenant have its share of the places of the batch, where another has more than its own.

        What is suspended for it stays cached as long as there is room, and comes back when a place is free.
        """
        queue = self._queue
        heads = [] if queue.is_for_one else queue.heads()
        if not heads:
            return
        mine, wanted = heads[0].tenant, 0
        held = Counter(request.tenant for request in self.requests if not request.warm)
        for request in queue.waiting_of(mine):
            places = 1 + len(self._forks(request))
            if held[mine] + wanted + places > queue.share(mine):
                break
            wanted += places
        while wanted and len(self.requests) + wanted > self._config.max_running:
            held = Counter(one.tenant for one in self.requests if one.tenant != mine and not one.warm)
            over = {one: held[one] / queue.weight(one) for one in held}
            most = max(over, key=lambda one: over[one], default=mine)
            if most == mine or held[most] <= queue.share(most):
                return
            self._send_off(self._youngest(over), now)

    def _held(self) -> dict[str, float]:
        """Tokens that each tenant's running requests have on the device, divided by its weight."""
        held: dict[str, float] = {}
        if self._queue.is_for_one:
            return held
        for request in self.requests:
            if not request.warm:
                held.setdefault(request.tenant, 0.0)
                held[request.tenant] += request.length / self._queue.weight(request.tenant)
        return held

    def _youngest(self, held: Mapping[str, float]) -> Request:
        """The youngest request of the tenant that holds most; a warm-up, which is younger than any, before all."""
        last = self.requests[-1]
        if last.warm or not held:
            return last
        most = max(held, key=lambda tenant: held[tenant])
        return next(request for request in reversed(self.requests) if request.tenant == most)

    def _send_off(self, request: Request, now: float) -> None:
        """Out of the batch with a request, and with its group."""
        group = request.group
        if request.finished is not None:
            self.remove(request, now)
        elif group is None:
            self._suspend(request, now)
        elif group.guided:
            self._park(group, now)
        else:
            # Alone on the device, candidates that have grown too large for it go on with the first, and the last wait.
            members = group.in_batch()
            alone = len(members) == len(self.requests)
            for member in [request] if alone else reversed(members):
                if member.finished is None:
                    self._suspend(member, now)

    def _suspend(self, request: Request, now: float) -> None:
        """Take a request out of the batch and back into the queue, at its place (EuroSys §4.3.5).

        Its chunks are unpinned; swap-out takes them like any others, and their recency keeps them for last.
        """
        self.requests.remove(request)
        self._cache.suspend(request.session, now, request.cached_context)
        request.suspend()
        self._queue.add(request)
        self.suspensions += 1

    def _park(self, group: Group, now: float) -> None:
        """Suspend a guided group. Its leader waits for all; the others give up what they do not share with it."""
        for member in reversed(group.in_batch()):
            if member in self._branching:
                self._branching.remove(member)
            if member is group.leader:
                self._suspend(member, now)
            else:
                self.requests.remove(member)
                member.park(group.leader)
                self._cache.release(member.session, now, member.context, free_kv=True)


def _bequeath(group: Group, leaver: Request) -> None:
    """A candidate leaves before its time. What the first had still to compute for all, the next one computes."""
    running = group.in_batch()
    if len(running) < 2 or leaver is not running[0] or leaver.output_tokens or not leaver.missing:
        return
    if running[1].missing:
        running[1].take_over_missing(leaver)
