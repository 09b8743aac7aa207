"""The batch: admission, suspension to make room, and branching within groups."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

from pensieve.config import SchedulerConfig
from pensieve.core import RequestKey, SessionKey, common_prefix
from pensieve.engine.cache.finding import Branches
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.tiers import Pages
from pensieve.engine.scheduling.queue import FairQueue
from pensieve.engine.scheduling.request import Group, Request
from pensieve.engine.scheduling.warming import WarmUps


class RunningSet:
    """The requests in the batch. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, queue: FairQueue, warming: WarmUps
    ) -> None:
        self._config = config
        self._cache = cache
        self._queue = queue
        self._warming = warming
        self.requests: list[Request] = []
        """In order of arrival, adjusted by priority (``Request.queue_order``)."""
        self.suspensions = 0
        self._by_key: dict[RequestKey, Request] = {}
        self._branching: list[Request] = []
        """Running requests that take over another's KV in the next plan."""

    def get(self, key: RequestKey) -> Request | None:
        """Return a running or waiting request. Warm-ups and forks are not found."""
        return self._by_key.get(key)

    def enqueue(self, request: Request) -> None:
        self._register(request)
        self._queue.add(request)

    # -- joining -----------------------------------------------------------------------------------------------------

    def fits(self, request: Request) -> bool:
        """Whether the batch has places and the device has room for a waiting request and its forks.

        Changes nothing. The request's addresses must have been set (``Request.set_prefix_path``).
        """
        forks = self._forks(request)
        if len(self.requests) + self.waiting_forks + 1 + len(forks) > self._config.max_running:
            return False
        if request.must_wait or any(fork.must_wait for fork in forks):
            return False
        return self._cache.can_admit(
            request.session,
            request.context,
            request.new_when_admitted,
            path=request.path,
            branches=self._branches(forks),
            reserve_for=request.tenant if self.requests else None,
        )

    def needs(self, request: Request) -> tuple[Pages, int]:
        """Return what a waiting request needs of the device: pages of each group to be pinned, and bytes of the pages
        that it does not have there. Nothing while it waits for something else. See ``fits``."""
        pages = self._cache.pages_to_pin(
            request.session,
            request.context,
            request.new_when_admitted,
            path=request.path,
            branches=self._branches(self._forks(request)),
        )
        if pages is None:
            return (0, 0), 0
        cost = self._cache.restore_cost(request.session, request.context, request.path, tenant=request.tenant)
        return pages, cost.num_bytes

    def _branches(self, forks: list[Request]) -> Branches:
        size = self._cache.config.chunk_tokens
        return Branches(len(forks), sum(fork.pages_as_fork(size) for fork in forks))

    def admit(self, request: Request, now: float) -> list[Request]:
        """Admit a request that fits, with its forks; return all of them."""
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
        if self._cache.has_states:
            for fork in forks:
                self._register(fork)
                self._branching.append(fork)
            return [request]
        # Before any work is taken: only KV that the leader already has in its last chunk can be copied.
        for fork in forks:
            self._branch(fork, now)
            self._register(fork)
            self.insert(fork)
        return [request, *forks]

    def insert(self, request: Request) -> None:
        bisect.insort(self.requests, request, key=lambda other: other.queue_order)

    def branch(self, source: Request, target: Request) -> None:
        """Let a running group member take over another's KV in the next plan. No source may be a target."""
        target.set_source(source)
        self._branching.append(target)

    def branch_all(self, now: float) -> bool:
        """Carry out the branches asked for, once no more room has to be made; return whether there were any."""
        targets, self._branching = self._branching, []
        for target in targets:
            if target.in_batch:
                self._branch(target, now)
            elif not self._branch_late(target, now):
                self._branching.append(target)
        return len(self._branching) < len(targets)

    @property
    def waiting_forks(self) -> int:
        """Forks that wait for their leader's prompt: with states, nothing of it can be shared before it is computed."""
        return sum(not target.in_batch for target in self._branching)

    def _branch_late(self, fork: Request, now: float) -> bool:
        """Let a fork branch off a leader that has computed its prompt, or go on alone if the leader has gone. Return
        whether it need not wait any longer."""
        leader = fork.source
        assert leader is not None
        if (leader.finished is not None and not leader.in_batch) or self.get(leader.key) is not leader:
            fork.leave_source()
            self._queue.add(fork)
            return True
        if not leader.in_batch or not leader.output_tokens or leader.num_missing > 1:
            return False
        if len(self.requests) >= self._config.max_running:
            return False
        ranges = self._cache.branch(leader.session, fork.session, fork.context, fork.length - 1, now)
        if ranges is None:
            return False
        fork.on_branched(ranges)
        self.insert(fork)
        return True

    def _branch(self, target: Request, now: float) -> None:
        assert target.source is not None
        ranges = self._cache.branch(
            target.source.session, target.session, target.context, _in_common(target.source, target), now
        )
        complete = ranges is not None and self._cache.extend(target.session, target.length, now)
        assert ranges is not None and complete, (
            f"{target.session}: no page to branch off, although one was reserved"
        )
        target.on_branched(ranges)

    def _forks(self, source: Request) -> list[Request]:
        """Return the requests that branch off a waiting one when it is admitted.

        Not those that have waited since its first admission, because it was suspended before they could branch off.
        They have places, and find pages of their own (``_branch_late``). An empty device may be too small for them
        beside the leader, which has grown.
        """
        if source.group is None:
            return []
        return [fork for fork in source.group.forks(source) if fork not in self._branching]

    def _register(self, request: Request) -> None:
        if request.key not in self._by_key:
            self._queue.arrive(request)
            self._by_key[request.key] = request

    # -- leaving -----------------------------------------------------------------------------------------------------

    def remove(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """Remove a request from the batch for good. Its KV stays cached, unless ``free_kv``."""
        self.requests.remove(request)
        computed = request.cached_context
        request.leave_batch()
        self._unregister(request)
        if request.warm:
            self._warming.on_end(request)
        free_kv = free_kv or self._config.stateless
        self._cache.release(request.session, now, computed, free_kv=free_kv, hints=request.hints)

    def retire(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """Remove an unfinished request in any state. Its KV stays cached, unless ``free_kv``.

        A finished request is left alone: it leaves when its last token is cached. So is one that was retired before.
        """
        group = request.group
        is_fork = request.source is not None and not request.in_batch
        if group is not None and request not in group.members:
            return
        if request.finished is not None or (self.get(request.key) is not request and not is_fork):
            return
        if request.in_batch:
            if group is not None and not group.guided:
                self._transfer_missing(group, request)
            self.remove(request, now, free_kv=free_kv)
        elif is_fork:
            self._unregister(request)
        else:
            self.remove_waiting(request)
        if group is not None and request is not group.leader:
            group.members.remove(request)

    def remove_waiting(self, request: Request) -> None:
        self._queue.remove(request)
        self._unregister(request)

    def remove_finished(self, session: SessionKey | None, now: float) -> None:
        """Remove the finished requests of one session, or of all, without caching their last token."""
        self._warming.cancel(session)
        for request in list(self.requests):
            if request.finished is not None and session in (None, request.session):
                self.remove(request, now)

    def cancel_warm_ups(self, session: SessionKey, now: float) -> None:
        """End all running warm-ups, and any pending one of ``session``, for a new turn. KV that they brought stays."""
        for warm in [other for other in self.requests if other.warm]:
            self.remove(warm, now)
        self._warming.cancel(session)

    def _unregister(self, request: Request) -> None:
        if self._by_key.get(request.key) is request:
            del self._by_key[request.key]
            self._queue.depart(request)
        if request in self._branching:
            self._branching.remove(request)

    # -- making room -------------------------------------------------------------------------------------------------

    def make_room(self, request: Request, now: float) -> None:
        """Make room for a generation's newest token, unless the request itself has to go.

        Suspends the youngest requests of the tenant that holds most of the device, a group as a whole.
        """
        length = request.latest_length if request.guesses else request.length
        while not self._cache.extend(request.session, length, now):
            self._make_leave(self._youngest(self._device_tokens()), now)
            if not request.in_batch:
                return

    def make_branch_room(self, now: float) -> None:
        """Make room for all that running group members take when they branch off others, as ``make_room`` does."""
        for target in list(self._branching):
            source = target.source
            assert source is not None
            while target.in_batch and not self._cache.promise_branch(
                source.session, target.session, target.length, _in_common(source, target)
            ):
                self._make_leave(self._youngest(self._device_tokens()), now)

    def make_batch_room(self, now: float) -> None:
        """Give the next tenant its share of the batch, by suspending requests of tenants with more than theirs.

        Suspended requests stay cached while there is room, and resume when a place is free.
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
            self._make_leave(self._youngest(over), now)

    def _device_tokens(self) -> dict[str, float]:
        """Return the tokens that each tenant's running requests have on the device, divided by its weight."""
        held: dict[str, float] = {}
        if self._queue.is_for_one:
            return held
        for request in self.requests:
            if not request.warm:
                held.setdefault(request.tenant, 0.0)
                held[request.tenant] += request.length / self._queue.weight(request.tenant)
        return held

    def _youngest(self, held: Mapping[str, float]) -> Request:
        """Return the youngest request of the tenant that holds most. A warm-up, younger than any turn, goes first."""
        last = self.requests[-1]
        if last.warm or not held:
            return last
        most = max(held, key=lambda tenant: held[tenant])
        return next(request for request in reversed(self.requests) if request.tenant == most)

    def _make_leave(self, request: Request, now: float) -> None:
        """Take a request and its group out of the batch."""
        group = request.group
        if request.finished is not None:
            self.remove(request, now)
        elif group is None:
            self._suspend(request, now)
        elif group.guided:
            self._park(group, now)
        else:
            # If only these candidates run and they outgrow the device, the first ones continue and the last
            # ones wait.
            members = group.in_batch()
            alone = len(members) == len(self.requests)
            for member in [request] if alone else reversed(members):
                if member.finished is None:
                    self._suspend(member, now)

    def _suspend(self, request: Request, now: float) -> None:
        """Return a request from the batch to its place in the queue (EuroSys §4.3.5).

        Its chunks are unpinned and swapped out like any others; their recency keeps them for last.
        """
        self.requeue(request, now)
        self.suspensions += 1

    def requeue(self, request: Request, now: float) -> None:
        """Return a request from the batch to its place in the queue. Its KV stays cached while there is room."""
        assert not request.guesses, "where its context ends is not known"
        self.requests.remove(request)
        self._cache.suspend(request.session, now, request.cached_context)
        request.suspend()
        self._queue.add(request)

    def _park(self, group: Group, now: float) -> None:
        """Suspend a guided group. The leader waits for all; the others free their own chunks."""
        for member in reversed(group.in_batch()):
            if member in self._branching:
                self._branching.remove(member)
            if member is group.leader:
                self._suspend(member, now)
            else:
                self.requests.remove(member)
                member.park(group.leader)
                self._cache.release(member.session, now, member.context, free_kv=True)

    def _transfer_missing(self, group: Group, leaver: Request) -> None:
        """Before a candidate leaves: let the next one compute what the first still had to compute for all."""
        running = group.in_batch()
        if len(running) < 2 or leaver is not running[0] or leaver.output_tokens or not leaver.missing:
            return
        if running[1].missing:
            running[1].take_over_missing(leaver)
            self._cache.take_over(running[1].session, leaver.session)


def _in_common(source: Request, target: Request) -> int:
    """Return how many tokens of its context a target takes over from its source; its last one is computed."""
    return min(common_prefix(source.context, target.context), target.length - 1)
