"""How requests come into the batch, and the members of a group go on there: candidates at an admission, beams at each
step."""

from __future__ import annotations

from collections import deque

from pensieve.config import SchedulerConfig
from pensieve.core import FinishReason, Sampling
from pensieve.engine.beams import BeamSearch, Hypothesis, pages_at_most
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.groups import Group, member_of, search_of
from pensieve.engine.plan import Sampled
from pensieve.engine.request import Request
from pensieve.engine.roster import Roster


class Branching:
    """The part of ``Scheduler`` that knows of groups. ``context_limit``: no context grows beyond that."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, batch: Roster, context_limit: int
    ) -> None:
        self._config = config
        self._cache = cache
        self._batch = batch
        self._context_limit = context_limit

    def misfit(self, tokens: int, sampling: Sampling) -> str | None:
        """Why a context of this length, and at least one token of output, can never be served; None when it can."""
        if tokens >= self._context_limit:
            return f"a context of {tokens} tokens leaves no room for an answer; the limit is {self._context_limit}"
        members = max(sampling.candidates, sampling.beam_width)
        if members > self._config.max_running:
            return f"{members} generations at a time are more than the {self._config.max_running} that fit a step"
        if sampling.beam_width > 1:
            output = min(sampling.max_output_tokens or 1, self._context_limit - tokens)
            pages = self._beam_pages(tokens, sampling.beam_width, output)
        else:
            pages = self._cache.chunks_for(tokens + 1) + sampling.candidates - 1
        if pages > self._cache.config.device_chunks:
            return (
                f"{members} answers to a context of {tokens} tokens need {pages} pages of the device tier; it has"
                f" {self._cache.config.device_chunks}: ask for fewer, or for shorter ones"
            )
        return None

    def group_of(self, request: Request) -> Group | None:
        """The group that a new request leads, if it asks for one."""
        sampling = request.sampling
        if sampling.beam_width > 1:
            return search_of(request, self._search(request))
        return Group(request, sampling.candidates) if sampling.candidates > 1 else None

    def _search(self, request: Request) -> BeamSearch:
        """The search of a request, no longer than what the device tier can hold of it."""
        width, length = request.sampling.beam_width, self._context_limit
        while (
            self._beam_pages(request.length, width, length - request.length)
            > self._cache.config.device_chunks
        ):
            length -= 1
        return BeamSearch.of(request.sampling, request.length, length, self._config.eos_token_ids)

    def _beam_pages(self, tokens: int, width: int, output: int) -> int:
        return pages_at_most(tokens, width, output, self._cache.config.chunk_tokens)

    def fits(self, request: Request) -> bool:
        """Whether there is a place in the batch and room on the device for a request that waits."""
        if len(self._batch.running) + self._batch.places(request) > self._config.max_running:
            return False
        group = self._batch.groups.get(request.key)
        others = group.to_branch if group is not None else []
        # For a request that returns from suspension all it has is history, what it computed itself included.
        num_new = request.num_new if request.receipt is None else 0
        if request.path is None:
            request.path = self._cache.path(request.session, request.scope, request.context)
        further = group.further_pages(self._cache.config.chunk_tokens) if group is not None else 0
        return not self.must_wait(request) and self._cache.can_admit(
            request.session,
            request.context,
            num_new,
            reserve=bool(self._batch.running),
            path=request.path,
            branches=len(others) + further,
            tenant=request.tenant,
        )

    def join(self, request: Request, now: float) -> list[Request]:
        """A request that fits comes into the batch, with its group; returns all that do."""
        group = self._batch.groups.get(request.key)
        others = group.to_branch if group is not None else []
        num_new = request.num_new if request.receipt is None else 0
        restore = self._cache.admit(
            request.session, request.context, num_new, now, request.path, tenant=request.tenant
        )
        request.admit(restore, now)
        self._batch.join(request)
        # Before any work is taken: what the leader has of its last chunk now can be copied, what it computes not.
        joined = [request, *(self.branch(request, candidate, now) for candidate in others)]
        if group is not None and group.beams is not None:
            group.beams.rows.clear()  # of a step that was not complete when the search was parked
            members = [member for member in group.beams.slots if member is not request]
            joined += [self.unpark(group, member, now) for member in members]
        return joined

    def must_wait(self, request: Request) -> bool:
        """Whether it takes the newest token to go on, and that is not known yet: because the sampling looks at its own
        output, or because all beams of a search have to say."""
        if request.is_beam:
            leader = self._batch.groups[request.key].leader
            restores = leader.missing and not leader.decoding  # what the others share with it
            return bool(self._batch.beams(request).awaited or (request is not leader and restores))
        return request.pending and request.sampling.needs_context

    def branch(self, leader: Request, candidate: int, now: float) -> Request:
        """Another candidate of a group whose first was just admitted, in the batch."""
        member = member_of(leader, candidate)
        start = self._cache.branch(leader.session, member.session, member.context, now)
        assert start is not None, f"{leader.key}: no page for candidate {candidate}, though it was asked for"
        member.missing = deque([(start, member.length)])
        group = self._batch.groups[leader.key]
        group.members.append(member)
        self._batch.add(member, group)
        self._batch.join(member)
        return member

    def branch_beams(self, now: float) -> None:
        """Give each beam that branched in the latest step the KV of its parent; the pages are there."""
        for group in self._batch.branching():
            assert group.beams is not None
            for source, target in group.beams.branches:
                start = self._cache.branch(source.session, target.session, target.context, now)
                assert start is not None, f"{group.leader.key}: no page for a beam, though room was made"
                self._place(group, target, start)
            group.beams.branches.clear()

    def unpark(self, group: Group, member: Request, now: float) -> Request:
        """A beam of a search that goes on: it has the KV that it shares with the leader, and computes the rest."""
        common = member.context[: group.shared_with_leader(member) + 1]
        start = self._cache.branch(group.leader.session, member.session, common, now)
        assert start is not None and self._cache.extend(member.session, member.length, now), (
            "no page for a beam"
        )
        self._place(group, member, start)
        return member

    def _place(self, group: Group, member: Request, start: int) -> None:
        """A beam is in the batch, with KV up to ``start``."""
        member.missing = deque([(start, member.length)])
        if not member.in_batch:
            self._batch.add(member, group)
            self._batch.join(member)

    def beam_row(self, group: Group, request: Request, sampled: Sampled, now: float) -> Hypothesis | None:
        """A beam was computed. When that ends the search, its members leave, and the leader has the answer."""
        found = group.take_row(request, sampled)
        if found is not None:
            self._batch.end_beams(group, group.nearest(found), now)
            group.leader.answer(found.tokens)
        return found


def finish_reason(
    request: Request, token: int, context_limit: int, eos_token_ids: tuple[int, ...]
) -> FinishReason | None:
    """Why the generation ends with ``token``, its newest known one."""
    sampling = request.sampling
    if request.settled - request.prompt_tokens > sampling.min_output_tokens:
        if token in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if token in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
    return limit_reason(request, request.settled, context_limit)


def limit_reason(request: Request, length: int, context_limit: int) -> FinishReason | None:
    """Why a request's context may not grow beyond ``length`` tokens, output included; None when it may."""
    most = request.sampling.max_output_tokens
    if most is not None and length - request.prompt_tokens >= max(most, 1):
        return FinishReason.LENGTH
    if length >= context_limit:
        return FinishReason.CONTEXT_FULL
    return None
