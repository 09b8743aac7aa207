"""Decides what the next step computes, moves and samples. No torch, no clock of its own, no I/O.

There is no prefill phase and no decode phase: each request has tokens that still need KV, and a step computes some of
them, for all running requests at once (EuroSys §4.2). ``plan`` decides and reserves, the worker executes, ``launched``
takes in everything about a step that does not depend on the sampled values, ``commit`` takes in the values. Nothing
else advances a request.

Between ``launched`` and ``commit`` of a step the next one may be planned: what the first samples is ``PENDING`` there,
and the worker puts the value in. Only a request whose sampling looks at its own output has to sit that step out. A
generation that turns out to have ended has then already computed the KV of its last token in the step that was
planned meanwhile, which it needs anyway; what that step sampled for it is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from pensieve.config import SchedulerConfig
from pensieve.core import (
    ALONE,
    FinishReason,
    Hints,
    RequestKey,
    Sampling,
    SessionKey,
    Standing,
    TokenArray,
    TokenLogprob,
)
from pensieve.engine.beams import Hypothesis
from pensieve.engine.branching import Branching, finish_reason, limit_reason
from pensieve.engine.cache.chunk import Range
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.plan import PageTable, Plan, SampleSpec, Span, StepResult
from pensieve.engine.request import Request
from pensieve.engine.roster import Roster
from pensieve.engine.shares import caps
from pensieve.engine.warm_ups import WARM_TOKENS, WarmUps

SWAP_OUT_QUANTUM = 32
"""Chunks copied out ahead of time per step at most: background work must not stretch a step."""

_Work = dict[Request, list[Range]]
"""What a step computes: of each request in it, the ranges of tokens that lack KV."""


@dataclass(frozen=True, slots=True)
class Token:
    """One output token of a request, and whether it was its last."""

    request: RequestKey
    token_id: int
    logprob: TokenLogprob | None
    finished: FinishReason | None


class Scheduler:
    """Queue and running set of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self.context_limit = min(config.context_limit, cache.capacity_tokens)
        """No context grows beyond what model and device tier can hold."""
        self.warming = WarmUps(cache)
        self.batch = Roster(cache, self.warming, places=config.max_running, stateless=config.stateless)
        self.branching = Branching(config, cache, self.batch, self.context_limit)
        self.admitted: list[Request] = []
        """Requests admitted for the first time by the latest ``plan``; of a group its first."""
        self._tickets = 0
        self._steps = 0
        self._swap_out_backlog = 0
        """Chunks that launched plans swap out and that had not left when the latest result came."""

    # -- from the front end ------------------------------------------------------------------------------------------

    def submit(
        self,
        key: RequestKey,
        session: SessionKey,
        tokens: TokenArray,
        num_new: int,
        sampling: Sampling,
        now: float,
        scope: str = "",
        hints: Hints | None = None,
        standing: Standing = ALONE,
    ) -> Request:
        """Queue a request. The caller has seen that it is no misfit (``Branching.misfit``)."""
        if not 0 < len(tokens) < self.context_limit or not 0 <= num_new <= len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {num_new} of them new, limit {self.context_limit}")
        request = Request(key, session, self._tickets, tokens.copy(), len(tokens), num_new, sampling, now)
        request.scope, request.hints, request.standing = scope, hints, standing
        self.cache.shares.allot(standing.tenant, standing.cache_share)
        group = self.branching.group_of(request)
        self._tickets += 1 if group is None else group.size
        self.batch.end_warming(session, now)
        self.batch.add(request, group)
        self.batch.wait(request)
        return request

    def warm(
        self, session: SessionKey, tokens: TokenArray, scope: str, now: float, standing: Standing = ALONE
    ) -> str:
        """Bring a session's context to the device ahead of its turn; returns why not, as ``Warmed`` has it, or ""."""
        if self.config.stateless:
            return "nothing_to_do"
        if len(tokens) >= self.context_limit:
            return "no_room"
        self._tickets += 1
        self.cache.shares.allot(standing.tenant, standing.cache_share)
        queues = self.batch.waiting, self.batch.running
        return self.warming.ask(session, tokens, scope, standing, self._tickets - 1, now, *queues)

    @property
    def has_requests(self) -> bool:
        return bool(self.batch.waiting or self.batch.running or self.warming.has_pending)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Choose this step's tokens and copies, and reserve the pages that they need."""
        self.admitted = []
        work: _Work = {}
        budget = self.config.max_batch_tokens
        self.batch.make_place(now)
        if self.config.unified_batch:
            # Generations first, one token each: whoever reads along must not wait for another's prefill. Then what was
            # begun, and with the rest of the budget whoever is next.
            budget -= self._plan_decodes(work, now)
        capped = self._caps(budget)
        budget -= self._plan_spans(work, budget, capped)
        budget -= self._admit(work, budget, now)
        if capped:  # what one tenant has left of its part is another's
            self._plan_spans(work, budget)
        if not self.config.unified_batch and not work:
            self._plan_decodes(work, now)
        self._warm_up(work, now)
        # A swap-in holds up its step and should have the link for itself; copying out ahead of time can wait.
        if not (self.config.swap_in_first and self.cache.swaps_in):
            self.cache.swap_out_ahead(now, SWAP_OUT_QUANTUM - self._swap_out_backlog)
        spans, tables = self._spans(work)
        self._steps += 1
        return Plan(self._steps, spans, tables, *self.cache.take_copies())

    def launched(self, plan: Plan) -> None:
        """The worker has begun ``plan``: whatever is planned from now on comes after it."""
        self.cache.complete_copies()
        for span in plan.spans:
            request = self.batch.get(span.request)
            if span.sample is None or request is None:
                continue
            if request.is_beam:
                # What comes next is for all of them to say.
                self.batch.beams(request).awaited.add(request.key)
            else:
                request.expect()

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[Token]:
        """Take in what the worker did with a launched plan; returns the new output tokens."""
        self._swap_out_backlog = result.swap_out_backlog
        tokens: list[Token] = []
        for sampled in result.sampled:
            request = self.batch.get(sampled.request)
            if request is None or request.finished is not None:
                continue  # it has ended, or was cancelled, while this step ran
            if request.first_token is None:
                request.first_token = now
            if request.is_beam:
                group = self.batch.groups[request.key]
                found = self.branching.beam_row(group, request, sampled, now)
                tokens.extend(self._answer(group.leader, found) if found is not None else ())
                continue
            request.settle(sampled.token_id)
            finished = finish_reason(request, sampled.token_id, self.context_limit, self.config.eos_token_ids)
            if finished is not None:
                self._finish(request, finished)
            tokens.append(Token(sampled.request, sampled.token_id, sampled.logprob, finished))
        for request in list(self.batch.running):
            if request.restored is None and not request.waits_for_history:
                request.restored = now
            # A finished request stays until a launched step computes the KV of its last token, for the next turn.
            # A stateless engine keeps nothing for it.
            if request.finished is not None and (self.config.stateless or not request.missing):
                self.batch.leave(request, now)
        return tokens

    # -- inside plan -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, work: _Work, now: float) -> int:
        """One token of every generation, oldest first; the youngest are suspended when pages run out."""
        targets = {target for group in self.batch.branching() for _, target in group.branches}
        decoding = self._decoding()
        for request in decoding:
            if request.in_batch and request not in targets:
                self.batch.make_room(request, now)
        # Only now: whoever has had to go while room was made computes nothing, and what is copied stays where it is.
        if targets:
            self.batch.make_room_for_branches(now)
            self.branching.branch_beams(now)
            decoding = self._decoding()
        staying = [request for request in decoding if request.in_batch]
        for request in staying:
            newest = request.missing.popleft()
            self.cache.computed(request.session, *newest)
            work[request] = [newest]
        self.batch.waiting.charge_each(staying)
        return len(staying)

    def _decoding(self) -> list[Request]:
        """Those in the batch whose newest token a step can compute."""
        return [one for one in self.batch.running if one.decoding and not self.branching.must_wait(one)]

    def _caps(self, budget: int) -> dict[str, int]:
        """What each tenant may take of the budget for what it has begun, when several want some of it."""
        if self.batch.waiting.is_for_one:
            return {}
        demands: Counter[str] = Counter()
        for request in self.batch.running:
            if self._is_begun(request):
                demands[request.tenant] += request.num_missing
        head = self._next(demands)
        if head is not None and self.branching.fits(head):
            demands[head.tenant] = head.length
        if len(demands) < 2:
            return {}
        return caps(
            max(budget, 0), demands, {tenant: self.batch.waiting.weight(tenant) for tenant in demands}
        )

    def _plan_spans(self, work: _Work, budget: int, capped: Mapping[str, int] | None = None) -> int:
        """Restores and prefills that have begun, oldest first, until the budget is used (chunked prefill).

        ``capped``: what each tenant may have of it at most.
        """
        used, left = 0, dict(capped or {})
        for request in self.batch.running:
            if used >= budget:
                break
            if request.missing and not request.decoding and not (request.warm and request in work):
                most = min(budget - used, left.get(request.tenant, budget))
                if most > 0:
                    taken = self._take(work, request, min(most, WARM_TOKENS) if request.warm else most)
                    used += taken
                    if request.tenant in left:
                        left[request.tenant] -= taken
        return used

    def _admit(self, work: _Work, budget: int, now: float) -> int:
        """The next in the queue joins while pages and budget allow; nobody overtakes it. Returns what was used.

        A tenant that has a restore or a prefill under way goes on with that first: whoever is admitted never waits
        for shared KV that another has begun to compute and not finished.
        """
        left = budget
        busy = set[str]()
        # One alone has nothing under way that the budget would not have ended.
        if not self.batch.waiting.is_for_one:
            busy = {one.tenant for one in self.batch.running if self._is_begun(one)}
        while left > 0 and self.batch.waiting:
            request = self._next(busy)
            if request is None or not self.branching.fits(request):
                break
            self.batch.waiting.remove(request)
            if request.receipt is None:
                self.admitted.append(request)
            for one in self.branching.join(request, now):
                if left > 0:
                    left -= self._take(work, one, left)
        return budget - left

    def _next(self, busy: Container[str]) -> Request | None:
        """The next in the queue whose tenant is not busy with one before it."""
        return next((request for request in self.batch.waiting.heads() if request.tenant not in busy), None)

    def _is_begun(self, request: Request) -> bool:
        return bool(request.missing) and not (request.warm or request.decoding)

    def _warm_up(self, work: _Work, now: float) -> None:
        """Let a warm-up begin, if nobody waits and whoever runs does not suffer."""
        if self.batch.waiting or len(self.batch.running) >= self.config.max_running:
            return
        request = self.warming.begin(now, self.batch.running)
        if request is not None:
            self.batch.join(request)
            self._take(work, request, min(self.config.max_batch_tokens, WARM_TOKENS))

    def _take(self, work: _Work, request: Request, budget: int) -> int:
        """Remove up to ``budget`` tokens from the front of what a request lacks; they are computed in this plan.

        The cache hears of it at once. A restore that was begun goes on until it is complete before another of its
        tenant begins, so whoever is admitted after this never waits for KV that a third one has begun to compute and
        not finished. Returns how many tokens those are.
        """
        ranges = request.take_missing(budget)
        taken = 0
        for start, end in ranges:
            self.cache.computed(request.session, start, end)
            taken += end - start
        if taken:
            self.batch.waiting.charge(request, taken)
            before = work.get(request, [])
            if before and before[-1][1] == ranges[0][0]:
                ranges[0] = before.pop()[0], ranges[0][1]
            work[request] = before + ranges if before else ranges
        return taken

    def _spans(self, work: _Work) -> tuple[tuple[Span, ...], tuple[PageTable, ...]]:
        spans: list[Span] = []
        tables: list[PageTable] = []
        for request, ranges in work.items():
            tables.append(self.cache.page_table(request.session, request.length))
            for start, end in ranges:
                # A token is sampled after the newest one only, and not when that is known to be the last.
                last = end == request.length and not request.missing
                more = (
                    last
                    and request.finished is None
                    and limit_reason(request, request.length, self.context_limit) is None
                )
                sample = self._sample_spec(request) if more else None
                spans.append(Span(request.key, start, request.tokens[start:end], len(tables) - 1, sample))
        return tuple(spans), tuple(tables)

    def _sample_spec(self, request: Request) -> SampleSpec:
        if request.is_beam:
            return SampleSpec(self.batch.beams(request).sampling, request.output_tokens)
        eos = self.config.eos_token_ids
        return SampleSpec(request.sampling, request.output_tokens, eos, *request.looked_at)

    # -- inside commit -----------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish(reason)
        if not request.in_batch:  # suspended while its last token was being sampled
            self.batch.waiting.remove(request)
            self.batch.drop(request)

    def _answer(self, leader: Request, found: Hypothesis) -> list[Token]:
        """What a search has found, all of it at once."""
        eos = self.config.eos_token_ids
        if found.ended:
            reason = finish_reason(leader, found.tokens[-1], self.context_limit, eos)
        else:
            reason = limit_reason(leader, leader.length, self.context_limit)
        *others, last = [Token(leader.key, token, None, None) for token in found.tokens]
        return [*others, replace(last, finished=reason or FinishReason.CONTEXT_FULL)]
