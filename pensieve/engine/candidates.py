"""The candidates of turns as the front end knows them: by request and number, until the next turn of their session."""

from __future__ import annotations

from pensieve.core import MAX_CANDIDATES, FinishReason, RequestKey, SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.groups import Group, candidate_key
from pensieve.engine.scheduler import Scheduler


class Candidates:
    """Which requests have several, and how each ended. What is cached of them is found by session."""

    def __init__(self, scheduler: Scheduler, cache: CacheManager) -> None:
        self._scheduler = scheduler
        self._batch = scheduler.batch
        self._cache = cache
        self._groups: dict[RequestKey, Group] = {}
        self._members: dict[RequestKey, tuple[RequestKey, int]] = {}
        """Request and number of each further candidate."""

    def submitted(self, key: RequestKey) -> None:
        """A request is queued."""
        group = self._batch.groups.get(key)
        if group is not None and group.beams is None:
            self._groups[key] = group

    def started(self, key: RequestKey) -> None:
        """A request was admitted; its candidates run."""
        if key in self._groups:
            for member in self._groups[key].members[1:]:
                self._members[member.key] = key, member.candidate

    def forget(self, key: RequestKey) -> None:
        """A request is over."""
        group = self._groups.pop(key, None)
        for member in group.members if group is not None else ():
            self._members.pop(member.key, None)

    def of(self, member: RequestKey) -> tuple[RequestKey, int]:
        """Whose candidate it is, and its number."""
        return self._members.get(member, (member, 0))

    def several(self, key: RequestKey) -> bool:
        """Whether the request has more than one."""
        return key in self._groups

    def ended(self, key: RequestKey, candidate: int, reason: FinishReason) -> FinishReason | None:
        """One has ended. Returns why the first did, when it was the last; None while others go on."""
        group = self._groups.get(key)
        if group is None:
            return reason
        group.ended[candidate] = reason
        return self._outcome(group)

    def stop(self, key: RequestKey, candidate: int, now: float) -> FinishReason | None:
        """Stop one candidate; returns as ``ended``."""
        group = self._groups.get(key)
        if group is None or candidate in group.ended:
            return None
        member = next((member for member in group.members if member.candidate == candidate), None)
        if member is group.leader and member.receipt is None:
            return None  # the others need it to begin with
        group.unwanted.add(candidate)
        if member is not None:
            self._batch.cancel(member.key, now)
        return self._outcome(group)

    def cancel(self, key: RequestKey, now: float) -> None:
        """Stop all candidates of a request."""
        group = self._groups.get(key)
        for member in reversed(group.members[1:] if group is not None else []):
            self._batch.cancel(member.key, now)
        self._batch.cancel(key, now)
        self.forget(key)

    def choose(self, session: SessionKey, candidate: int, now: float) -> None:
        """Let a candidate's KV be the session's. If it is gone, the next turn finds what it can by its address."""
        other = candidate_key(session, candidate)
        self._batch.hurry(session, now)
        self._batch.hurry(other, now)
        self._cache.replace(session, other)

    def drop(self, session: SessionKey, now: float) -> int:
        """Forget what is cached of those that were not chosen; returns the number of KV-tokens."""
        freed = 0
        for candidate in range(1, MAX_CANDIDATES):
            key = candidate_key(session, candidate)
            if self._cache.holds(key):
                self._batch.hurry(key, now)
                freed += self._cache.evict(key)
        return freed

    @staticmethod
    def _outcome(group: Group) -> FinishReason | None:
        return group.ended.get(0, FinishReason.CANCELLED) if group.over else None
