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
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from pensieve.config import SchedulerConfig
from pensieve.core import FinishReason, RequestKey, SessionKey, TokenLogprob, packed_length
from pensieve.engine.cache.chunk import Range
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.messages import Submit, Warm
from pensieve.engine.plan import PageTable, Plan, SampleSpec, Span, StepResult
from pensieve.engine.scheduling.queue import FairQueue, max_min_shares
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.running import RunningSet
from pensieve.engine.scheduling.warming import WARM_TOKENS, WarmUps

SWAP_OUT_QUANTUM = 32
"""Chunks copied out ahead of time per step at most: background work must not stretch a step."""

_Work = dict[Request, list[Range]]
"""What a step computes: of each request in it, the ranges of tokens that lack KV."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One output token of a request, and whether it was its last; of a guided request what its driver decides by."""

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
        self.queue = FairQueue(config.max_running)
        self.admitted: list[Request] = []
        """Requests admitted for the first time by the latest ``plan``; of a group its first."""
        self._warming = WarmUps(cache)
        self._running = RunningSet(config, cache, self.queue, self._warming)
        self._tickets = 0
        self._steps = 0
        self._swap_out_backlog = 0
        """Chunks that launched plans swap out and that had not left when the latest result came."""

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """The requests in the batch, in order of arrival; warm-ups come last."""
        return self._running.requests

    @property
    def has_requests(self) -> bool:
        return bool(self._running.requests or self.queue or self._warming.has_pending)

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self.queue)

    def position(self, request: Request) -> int:
        """How many requests of its own tenant come before one that waits."""
        return self.queue.position(request)

    @property
    def suspensions(self) -> int:
        """How often a generation had to make room, since start."""
        return self._running.suspensions

    @property
    def warmed_tokens(self) -> int:
        """KV-tokens that warm-ups brought to the device, since start."""
        return self._warming.tokens

    def get(self, key: RequestKey) -> Request | None:
        """A request that runs or waits; one that has finished is known until its last token is cached."""
        return self._running.get(key)

    def refusal(self, submit: Submit, members: int = 1, pages: int | None = None) -> tuple[str, str] | None:
        """Why a request, with this many answers, is not served: a reason of ``Failed`` and a message; None when it is.

        ``pages``: most device pages that the answers need at once, where they cannot wait for each other.
        """
        tokens, limit, places = packed_length(submit.tokens), self.context_limit, self.config.max_running
        if not 0 <= submit.num_new <= tokens or not tokens:
            message = f"{submit.num_new} new of {tokens} tokens: there must be something to continue"
            return "ENGINE_FAILED", message
        # One that has finished may still be in the batch: its last token is cached by the step under way.
        if self.get(RequestKey(submit.request)) is not None:
            return "ENGINE_FAILED", "the request key is in use"
        misfit = None
        needed = self.cache.chunks_for(tokens + 1) + members - 1 if pages is None else pages
        if tokens >= limit:
            misfit = f"a context of {tokens} tokens leaves no room for an answer; the limit is {limit}"
        elif members > places:
            misfit = f"{members} generations at a time are more than the {places} that fit a step"
        elif needed > self.cache.config.device_chunks:
            misfit = (
                f"{members} answers to a context of {tokens} tokens need {needed} pages of the device tier; it has"
                f" {self.cache.config.device_chunks}: ask for fewer, or for shorter ones"
            )
        if misfit is not None:
            return "CONTEXT_LIMIT_EXCEEDED", misfit
        if self.queue.is_full(submit.qos.tenant, self.config.max_queued):
            return "SERVER_OVERLOADED", "the queue is full"
        return None

    # -- from the front end ------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float, *, members: int = 1, guided: bool = False) -> Request:
        """Queue a request, or a group of ``members`` that it leads. The caller has asked for its ``refusal``."""
        request = Request.from_submit(submit, self._tickets, now)
        self.cache.shares.set_share(request.tenant, request.qos.cache_share)
        if members > 1:
            request.lead(members, guided=guided)
        self._tickets += members
        self._running.cancel_warm_ups(request.session, now)
        self._running.enqueue(request)
        return request

    def warm(self, warm: Warm, now: float) -> str:
        """Bring a session's context to the device ahead of its turn; returns why not, as ``Warmed`` has it, or ""."""
        if self.config.stateless:
            return "nothing_to_do"
        if packed_length(warm.tokens) >= self.context_limit:
            return "no_room"
        self._tickets += 1
        self.cache.shares.set_share(warm.qos.tenant, warm.qos.cache_share)
        return self._warming.ask(warm, self._tickets - 1, now, chain(self.queue, self.running))

    def retire(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """Take a request out at once. What it has computed stays cached, unless it is to be forgotten.

        A finished request is not touched: it leaves when its last token is cached.
        """
        self._running.retire(request, now, free_kv=free_kv)

    def remove_finished(self, session: SessionKey | None, now: float) -> None:
        """Let the finished requests and warm-ups of one session, or of all, go as they are."""
        self._running.remove_finished(session, now)

    def branch(self, source: Request, target: Request) -> None:
        """Let a running guided request go on with the KV of another from the next plan on."""
        self._running.branch(source, target)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Choose this step's tokens and copies, and reserve the pages that they need."""
        self.admitted = []
        work: _Work = {}
        budget = self.config.max_batch_tokens
        self._running.make_batch_room(now)
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

    def on_launched(self, plan: Plan) -> None:
        """The worker has begun ``plan``: whatever is planned from now on comes after it."""
        self.cache.complete_copies()
        for span in plan.spans:
            if span.sample is not None:
                request = self._running.get(span.request)
                if request is not None:
                    request.on_launched()

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[OutputToken]:
        """Take in what the worker did with a launched plan; returns the new output tokens."""
        self._swap_out_backlog = result.swap_out_backlog
        tokens: list[OutputToken] = []
        for sampled in result.sampled:
            request = self._running.get(sampled.request)
            if request is None or request.finished is not None:
                continue  # it has ended, or was cancelled, while this step ran
            request.on_sampled(sampled.token_id, now)
            finished = None
            if not request.guided:
                finished = request.end_reason(sampled.token_id, self.context_limit, self.config.eos_token_ids)
            if finished is not None:
                request.finish(finished)
                if not request.in_batch:  # suspended while its last token was being sampled
                    self._running.remove_waiting(request)
            tokens.append(OutputToken(sampled.request, sampled.token_id, sampled.logprob, finished))
        for request in list(self._running.requests):
            if request.restored is None and not request.waits_for_history:
                request.history_present(now)
            # A finished request stays until a launched step computes the KV of its last token, for the next turn.
            # A stateless engine keeps nothing for it.
            if request.finished is not None and (self.config.stateless or not request.missing):
                self._running.remove(request, now)
        return tokens

    # -- inside plan -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, work: _Work, now: float) -> int:
        """One token of every generation, oldest first; the youngest are suspended when pages run out."""
        decoding = self._decoding()
        for request in decoding:
            if request.in_batch and request.source is None:
                self._running.make_room(request, now)
        # Only now: whoever has had to go while room was made computes nothing, and what is copied stays where it is.
        if self._running.branch_all(now):
            decoding = self._decoding()
        staying = [request for request in decoding if request.in_batch]
        for request in staying:
            newest = request.take_newest()
            self.cache.computed(request.session, *newest)
            work[request] = [newest]
        self.queue.charge_each(staying)
        return len(staying)

    def _decoding(self) -> list[Request]:
        """Those in the batch whose newest token a step can compute."""
        return [one for one in self._running.requests if one.decoding and not one.must_wait]

    def _caps(self, budget: int) -> dict[str, int]:
        """What each tenant may take of the budget for what it has begun, when several want some of it."""
        if self.queue.is_for_one:
            return {}
        demands: Counter[str] = Counter()
        for request in self._running.requests:
            if self._is_begun(request):
                demands[request.tenant] += request.num_missing
        head = self._next(demands)
        if head is not None and self._running.fits(head):
            demands[head.tenant] = head.length
        if len(demands) < 2:
            return {}
        return max_min_shares(
            max(budget, 0), demands, {tenant: self.queue.weight(tenant) for tenant in demands}
        )

    def _plan_spans(self, work: _Work, budget: int, capped: Mapping[str, int] | None = None) -> int:
        """Restores and prefills that have begun, oldest first, until the budget is used (chunked prefill).

        ``capped``: what each tenant may have of it at most.
        """
        used, left = 0, dict(capped or {})
        for request in self._running.requests:
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
        if not self.queue.is_for_one:
            busy = {one.tenant for one in self._running.requests if self._is_begun(one)}
        while left > 0 and self.queue:
            request = self._next(busy)
            if request is None or not self._running.fits(request):
                break
            self.queue.remove(request)
            if request.receipt is None:
                self.admitted.append(request)
            for one in self._running.admit(request, now):
                if left > 0:
                    left -= self._take(work, one, left)
        return budget - left

    def _next(self, busy: Container[str]) -> Request | None:
        """The next in the queue whose tenant is not busy with one before it. Its addresses are looked up."""
        request = next((one for one in self.queue.heads() if one.tenant not in busy), None)
        if request is not None and request.path is None:
            request.set_prefix_path(self.cache.prefix_path(request.session, request.scope, request.context))
        return request

    def _is_begun(self, request: Request) -> bool:
        return bool(request.missing) and not (request.warm or request.decoding)

    def _warm_up(self, work: _Work, now: float) -> None:
        """Let a warm-up begin, if nobody waits and whoever runs does not suffer."""
        if self.queue or len(self._running.requests) >= self.config.max_running:
            return
        request = self._warming.begin(now, self._running.requests)
        if request is not None:
            self._running.insert(request)
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
            self.queue.charge(request, taken)
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
                    and request.limit_reason(request.length, self.context_limit) is None
                )
                sample = self._sample_spec(request) if more else None
                spans.append(Span(request.key, start, request.tokens[start:end], len(tables) - 1, sample))
        return tuple(spans), tuple(tables)

    def _sample_spec(self, request: Request) -> SampleSpec:
        eos = self.config.eos_token_ids
        return SampleSpec(request.sampling, request.output_tokens, eos, *request.sampling_context)
