"""How the members of a group come into the batch and go on there: candidates at an admission, beams at each step."""

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
