"""Decides what the next step computes, copies and samples. No torch, no clock of its own, no I/O.

There are no prefill and decode phases: each request has tokens that need KV, and a step computes some of
them, for all running requests at once (EuroSys §4.2). ``plan`` decides and reserves pages, and the worker
executes. ``on_launched`` takes in everything about a step that does not depend on sampled values, ``commit``
the values. Nothing else advances a request.

The next step may be planned between ``on_launched`` and ``commit`` of a step. Tokens that the first step
samples are ``PENDING`` in it, and the worker fills them in. A choice that depends on such a token, or on a mask
made from it, comes late: ``late_specs`` completes it after the first step's ``commit``. If a generation turns
out to have ended, the step planned meanwhile has computed the KV of its last token, which is needed anyway; the
token it sampled is discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain, islice
from typing import Final

import msgspec
import numpy as np

from pensieve.config import SchedulerConfig
from pensieve.core import FinishReason, RequestKey, SessionKey, TokenArray, TokenLogprob, packed_length
from pensieve.engine.cache.chunk import Range
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.resizing import Ends
from pensieve.engine.elastic import ElasticTier, Need
from pensieve.engine.messages import Submit, Warm
from pensieve.engine.plan import Chain, PageTable, Plan, SampleSpec, Span, StepResult, TokenMask
from pensieve.engine.scheduling.drafting import Drafting
from pensieve.engine.scheduling.queue import FairQueue, max_min_shares
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.running import RunningSet
from pensieve.engine.scheduling.warming import WARM_TOKENS, WarmUps

SWAP_OUT_QUANTUM = 32
"""Most chunks copied out ahead of time per step: background work must not stretch a step."""
IDLE_QUANTUM = 4 * SWAP_OUT_QUANTUM
"""Most chunks of each group that a shrinking device tier copies out, and moves, in a plan that computes nothing."""

NO_DRAFTS: Final[TokenArray] = np.empty(0, np.int32)

_Work = dict[Request, list[Range]]
"""The ranges of tokens without KV that a step computes, by request."""


class OutputToken(msgspec.Struct, frozen=True):
    """An output token of a request. ``finished``: why it was the last. For a guided request, input of its driver."""

    request: RequestKey
    token_id: int
    logprob: TokenLogprob | None
    finished: FinishReason | None


class Scheduler:
    """Queue and running set of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, elastic: ElasticTier | None = None
    ) -> None:
        self.config = config
        self.cache = cache
        self.elastic = elastic
        """Only with an elastic device tier."""
        self.context_limit = min(config.context_limit, cache.capacity_tokens)
        """Longest context that both the model and the device tier can hold, in tokens."""
        self.queue = FairQueue(config.max_running)
        self.admitted: list[Request] = []
        """Requests that the latest ``plan`` admitted for the first time; of a group, the leader."""
        self._warming = WarmUps(cache)
        self._running = RunningSet(config, cache, self.queue, self._warming)
        self._tickets = 0
        self._steps = 0
        self.drafting = Drafting(config, cache, self.context_limit)
        self._swap_out_backlog = 0
        """Chunks of launched plans not yet copied out when the latest result came."""
        self.mask_expected: Callable[[RequestKey, int], bool] = lambda key, output_index: True
        """Whether the mask for a token of a request with a grammar is there, or expected in time. If not, the request
        sits out the step."""

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """The requests in the batch, in order of arrival; warm-ups come last."""
        return self._running.requests

    @property
    def has_requests(self) -> bool:
        running = self._running
        return bool(running.requests or running.waiting_forks or self.queue or self._warming.has_pending)

    @property
    def queued(self) -> int:
        return len(self.queue)

    def position(self, request: Request) -> int:
        return self.queue.position(request)

    @property
    def suspensions(self) -> int:
        return self._running.suspensions

    @property
    def warmed_tokens(self) -> int:
        return self._warming.tokens

    @property
    def computed_ahead(self) -> Mapping[str, int]:
        """Tokens that warm-ups have computed, by tenant."""
        return self._warming.computed

    def get(self, key: RequestKey) -> Request | None:
        """Return a running or waiting request. A finished one is found until its last token is cached."""
        return self._running.get(key)

    def refusal(
        self, submit: Submit, members: int = 1, search: tuple[int, int] | None = None
    ) -> tuple[str, str] | None:
        """Return why a request is refused, as (reason in ``Failed``, message); None when it is accepted.

        ``members``: generations that run at a time. ``search``: if they are a beam search, of which none can wait: the
        device pages that they need at once, and the length of their longest context.
        """
        tokens, limit, places = packed_length(submit.tokens), self.context_limit, self.config.max_running
        if not 0 <= submit.num_new <= tokens or not tokens:
            message = (
                f"num_new is {submit.num_new} of {tokens} tokens: it must fit a context of at least one token"
            )
            return "ENGINE_FAILED", message
        # A finished request may still be in the batch: the step under way caches its last token.
        if self.get(RequestKey(submit.request)) is not None:
            return "ENGINE_FAILED", "the request key is in use"
        problem = None
        needed, longest = search or (self.cache.chunks_for(tokens + 1) + members - 1, tokens + 1)
        if tokens >= limit:
            problem = f"a context of {tokens} tokens leaves no room for an answer; the limit is {limit}"
        elif search is not None and self.cache.has_states:
            problem = "beam search is not supported for a model with recurrent layers"
        elif members > places:
            problem = f"{members} generations at a time exceed the {places} that fit a step"
        elif not self.cache.can_hold(needed, members, longest):
            problem = (
                f"{members} answers to a context of {tokens} tokens need {needed} pages of the device tier; it has"
                f" {self.cache.device_pages}: ask for fewer, or for shorter ones"
            )
        if problem is not None:
            return "CONTEXT_LIMIT_EXCEEDED", problem
        if self.queue.is_full(submit.qos.tenant, self.config.max_queued):
            return "SERVER_OVERLOADED", "the queue is full"
        return None

    # -- from the front end ------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float, *, members: int = 1, guided: bool = False) -> Request:
        """Queue a request, or a group of ``members`` that it leads. The caller must have checked ``refusal``."""
        request = Request.from_submit(submit, self._tickets, now)
        self.cache.shares.set_share(request.tenant, request.qos.cache_share)
        if members > 1:
            request.lead(members, guided=guided)
        self._tickets += members
        self._running.cancel_warm_ups(request.session, now)
        self._running.enqueue(request)
        return request

    def warm(self, warm: Warm, now: float) -> str:
        """Bring a session's context to the device ahead of its turn; return "" or ``Warmed.refused``."""
        if self.config.stateless:
            return "nothing_to_do"
        if packed_length(warm.tokens) >= self.context_limit:
            return "no_room"
        self._tickets += 1
        self.cache.shares.set_share(warm.qos.tenant, warm.qos.cache_share)
        return self._warming.ask(warm, self._tickets - 1, now, chain(self.queue, self.running))

    def retire(self, request: Request, now: float, *, free_kv: bool = False) -> None:
        """See ``RunningSet.retire``."""
        self._running.retire(request, now, free_kv=free_kv)

    def remove_finished(self, session: SessionKey | None, now: float) -> None:
        """See ``RunningSet.remove_finished``."""
        self._running.remove_finished(session, now)

    def branch(self, source: Request, target: Request) -> None:
        """See ``RunningSet.branch``."""
        self._running.branch(source, target)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Choose this step's tokens and copies, and reserve the pages that they need."""
        self.admitted = []
        work: _Work = {}
        budget = self.config.max_batch_tokens
        self._running.make_batch_room(now)
        if self.config.unified_batch:
            # Decodes first, one token each: a streaming reader must not wait for another request's prefill.
            # Then restores and prefills under way, then the next in the queue with the rest of the budget.
            budget -= self._plan_decodes(work, now)
        running = len(self._running.requests)
        capped = self._caps(budget)
        budget -= self._plan_spans(work, budget, now, capped)
        budget -= self._admit(work, budget, now)
        if capped:  # give one tenant's leftover to the others
            budget -= self._plan_spans(work, budget, now)
        # Not after an admission, even of a request that waits for its mask and computes nothing: it may have taken the
        # last page, and could not give back one that this plan loads.
        if not self.config.unified_batch and not work and len(self._running.requests) == running:
            budget -= self._plan_decodes(work, now)
        self._warm_up(work, now)
        drafts = self.drafting.plan(work, budget, now, self._may_suspend)
        memory = None if self.elastic is None else self._resize(self.elastic, work, now)
        # A step waits for its swap-in, which should have the link to itself. Ahead-of-time copies can wait.
        is_settled = self.elastic is None or self.elastic.is_settled(now)
        if is_settled and not (self.config.swap_in_first and self.cache.swaps_in):
            self.cache.swap_out_ahead(now, SWAP_OUT_QUANTUM - self._swap_out_backlog)
        self._steps += 1
        if self.cache.two_groups:
            plan = self._plan_two_groups(work, memory)
        else:
            plan = self._plan_one_group(work, drafts, memory)
        if plan.is_empty:  # a warm-up may have found all of its context: no step ends that could remove it
            self._remove_ended(now)
        return plan

    def on_launched(self, plan: Plan) -> None:
        """Record that the worker has begun ``plan``: later plans come after it."""
        self.cache.complete_copies()
        self.drafting.on_launched()
        for span in plan.spans:
            if span.sample is not None:
                request = self._running.get(span.request)
                if request is not None:
                    request.on_launched()

    def late_specs(
        self, plan: Plan, masks: Mapping[RequestKey, TokenMask], now: float
    ) -> list[SampleSpec | None]:
        """Return how to choose each token of the launched ``plan``, now that all steps before it are committed.

        A request that needs a mask and has none in ``masks`` gets no token. It goes back to the queue and computes its
        newest token again in a later step, which its KV does not show. None also stands for a request that has ended.
        """
        specs: list[SampleSpec | None] = []
        for span in plan.spans:
            if span.sample is None:
                continue
            request = self._running.get(span.request)
            if not span.sample.late:
                specs.extend(span.specs)
            elif request is None or request.finished is not None:
                specs.extend([None] * span.num_chosen)
            elif request.sampling.grammar is not None and request.key not in masks:
                request.on_no_choice()
                self._running.requeue(request, now)
                specs.append(None)
            else:
                # The token that this step chooses, however many drafts were accepted.
                index = request.output_tokens - 1
                prompt, output = request.sampling_context(index)
                mask = masks.get(request.key)
                spec = msgspec.structs.replace(
                    span.sample, output_index=index, prompt=prompt, output=output, mask=mask
                )
                specs.extend(msgspec.structs.replace(span, sample=spec).specs)
        return specs

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[OutputToken]:
        """Take in the result of a launched plan; return the new output tokens."""
        self._swap_out_backlog = result.swap_out_backlog
        if self.elastic is not None and plan.memory is not None:
            self.elastic.on_result(result.memory, now)
        tokens: list[OutputToken] = []
        drafted = [span for span in plan.spans if span.drafts]
        # The drafts of each request that were not accepted yet, the next one last.
        drafts = {span.request: span.tokens[: -span.drafts - 1 : -1].tolist() for span in drafted}
        ended = set[RequestKey]()  # their next draft was wrong, or they have no more
        for sampled in result.sampled:
            request = self._running.get(sampled.request)
            if request is None or request.finished is not None:
                continue  # it finished or was cancelled while this step ran
            left = drafts.get(request.key)
            if left is not None and request.key in ended:
                continue  # a draft before it was wrong
            request.on_sampled(sampled.token_id, now)
            finished = None
            if not request.guided:
                finished = request.end_reason(sampled.token_id, self.context_limit, self.config.eos_token_ids)
            if left and left[-1] == sampled.token_id:
                left.pop()
                self._accept(request, now, is_last=finished is not None)
            elif left is not None:
                ended.add(request.key)
            if finished is not None:
                request.finish(finished)
                if not request.in_batch:  # suspended while its last token was being sampled
                    self._running.remove_waiting(request)
            tokens.append(OutputToken(sampled.request, sampled.token_id, sampled.logprob, finished))
        for span in drafted:
            accepted = span.drafts - len(drafts[span.request])
            self.drafting.end(self._running.get(span.request), accepted, span.drafts)
        for request in self._running.requests:
            if request.restored is None and not request.waits_for_history:
                request.history_present(now)
        self._remove_ended(now)
        return tokens

    def _remove_ended(self, now: float) -> None:
        """Remove the requests for which nothing is left to do."""
        for request in list(self._running.requests):
            # A finished request stays until a launched step computes the KV of its last token, for the next
            # turn. A stateless engine keeps no KV, so it does not wait.
            if request.finished is not None and (self.config.stateless or not request.missing):
                self._running.remove(request, now)

    def _accept(self, request: Request, now: float, *, is_last: bool) -> None:
        """Record that the newest known token was a draft, whose KV the step has computed. The step has chosen the
        token after it as well, which counts unless this one ``is_last``."""
        self.queue.charge(request, 1)
        # A step planned meanwhile counts one token of this request: this one, or the one that would follow.
        planned = request.num_known < request.length
        if not (planned and is_last):
            self.cache.computed(request.session, *request.take_newest(), now)
        if not is_last:
            request.on_launched()

    # -- a step with drafts that runs ----------------------------------------------------------------------------------

    def should_wait(self) -> bool:
        """Whether the next plan must wait for the tokens of the step that runs, since that has drafts."""
        if not self.drafting.requests or not any(request.guesses for request in self._running.requests):
            return False
        return self._may_suspend() or self._lacks_draft_pages()

    def _may_suspend(self) -> bool:
        """Whether the next plan may have to take a request out of the batch, or to move its pages. Nothing tells where
        the context of one with drafts ends, and pages that only drafts use look empty."""
        running = self._running.requests
        competing = self.queue and not self.queue.is_for_one
        guided = any(request.guided for request in running)
        return competing or guided or self.elastic is not None or not self.cache.has_pages(len(running))

    def _lacks_draft_pages(self) -> bool:
        """Whether others may need the pages that only drafts use, in the next plan."""
        if not self.drafting.pages:
            return False
        running = len(self._running.requests)
        places = self.config.max_running - running
        waiting = sum(self.cache.chunks_for(one.length + 1) for one in islice(self.queue, places))
        return self._warming.has_pending or not self.cache.has_pages(running + waiting, free_only=True)

    # -- inside plan -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, work: _Work, now: float) -> int:
        """Plan one token of every generation, oldest first; suspend the youngest when pages run out."""
        waiting = self._without_mask()
        decoding = self._decoding(waiting)
        for request in decoding:
            if request.in_batch and request.source is None:
                self._running.make_room(request, now)
        self._running.make_branch_room(now)
        # Only now: a request suspended to make room computes nothing, and branches off nothing.
        if self._running.branch_all(now):
            decoding = self._decoding(waiting)
        staying = [request for request in decoding if request.in_batch]
        for request in staying:
            newest = request.take_newest()
            self.cache.computed(request.session, *newest, now)
            work[request] = [newest]
        self.queue.charge_each(staying)
        return len(staying)

    def _decoding(self, waiting: Container[Request]) -> list[Request]:
        """Return the requests whose newest token can be computed in this step, without those ``waiting``."""
        return [
            one for one in self._running.requests if one.decoding and not one.must_wait and one not in waiting
        ]

    def _without_mask(self) -> set[Request]:
        """Return the running requests that wait for a mask. Ask once in a plan: a thread may complete a mask
        meanwhile, and the plan has made no room for its request."""
        following = [one for one in self._running.requests if one.sampling.grammar is not None]
        return {one for one in following if one.decoding and not self._has_mask(one)}

    def _has_mask(self, request: Request) -> bool:
        """Whether the request's next token can be chosen in this step, as far as its mask is concerned."""
        return request.sampling.grammar is None or self.mask_expected(request.key, request.output_tokens)

    def _caps(self, budget: int) -> dict[str, int]:
        """Return each tenant's part of the budget for restores and prefills, when several tenants compete; else {}."""
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
        tenants = self.queue.least_served_first(demands)
        return max_min_shares(
            max(budget, 0),
            {tenant: demands[tenant] for tenant in tenants},
            {tenant: self.queue.weight(tenant) for tenant in tenants},
        )

    def _plan_spans(
        self, work: _Work, budget: int, now: float, capped: Mapping[str, int] | None = None
    ) -> int:
        """Plan restores and prefills that have begun, oldest first, until the budget is used (chunked prefill).

        ``capped``: each tenant's part of the budget.
        """
        used, remaining = 0, dict(capped or {})
        once = self.cache.two_groups  # one chain of states, or one run of windows, for each request and plan
        for request in self._running.requests:
            if used >= budget:
                break
            if not request.missing or request.decoding or (once and request.waits_for_leader):
                continue
            if request in work and (once or request.warm):
                continue
            most = min(budget - used, remaining.get(request.tenant, budget))
            if request.warm:
                most = min(most, WARM_TOKENS)
            if most > 0:
                taken = self._take(work, request, most, now)
                used += taken
                if request.tenant in remaining:
                    remaining[request.tenant] -= taken
        return used

    def _admit(self, work: _Work, budget: int, now: float) -> int:
        """Admit requests from the queue while pages and budget allow; none overtakes the next one. Return the
        tokens used.

        A tenant with a restore or prefill under way finishes that first, so that no admitted request waits
        for shared KV that another has only begun to compute.
        """
        remaining = budget
        busy = set[str]()
        # A single tenant has nothing under way that would not have used up the budget.
        if not self.queue.is_for_one:
            busy = {one.tenant for one in self._running.requests if self._is_begun(one)}
        while remaining > 0 and self.queue:
            request = self._next(busy)
            if request is None or not self._running.fits(request):
                break
            if self.elastic is not None and self.elastic.defers(self._running.needs(request)[1], now):
                break
            self.queue.remove(request)
            if request.receipt is None:
                self.admitted.append(request)
            for one in self._running.admit(request, now):
                if remaining > 0 and not (self.cache.two_groups and one.waits_for_leader):
                    remaining -= self._take(work, one, remaining, now)
        return budget - remaining

    def _next(self, busy: Container[str]) -> Request | None:
        """Return the next request whose tenant is not in ``busy``, with its addresses set."""
        request = next((one for one in self.queue.heads() if one.tenant not in busy), None)
        if request is not None and request.path is None:
            request.set_prefix_path(self.cache.prefix_path(request.session, request.scope, request.context))
        return request

    def _is_begun(self, request: Request) -> bool:
        return bool(request.missing) and not (request.warm or request.decoding)

    def _warm_up(self, work: _Work, now: float) -> None:
        """Begin a warm-up if no request waits and the batch has a place."""
        if self.queue or len(self._running.requests) >= self.config.max_running:
            return
        request = self._warming.begin(now, self._running.requests)
        if request is not None:
            self._running.insert(request)
            self._take(work, request, min(self.config.max_batch_tokens, WARM_TOKENS), now)

    def _take(self, work: _Work, request: Request, budget: int, now: float) -> int:
        """Take up to ``budget`` of a request's missing tokens into this plan; return their number.

        A restore that has begun is completed before another of its tenant begins. So a request admitted later
        never waits for KV that a third one has begun to compute and not finished. A request that waits for its mask
        leaves out its newest token alone, whose KV no other shares.
        """
        if not self._has_mask(request):
            budget = min(budget, request.num_missing - 1)
        ranges = request.take_missing(self.cache.reach(request.session, budget))
        taken = 0
        for start, end in ranges:
            self.cache.computed(request.session, start, end, now)
            taken += end - start
        if taken:
            self.queue.charge(request, taken)
            before = work.get(request, [])
            if before and before[-1][1] == ranges[0][0]:
                ranges[0] = before.pop()[0], ranges[0][1]
            work[request] = before + ranges if before else ranges
        return taken

    def _resize(self, elastic: ElasticTier, work: _Work, now: float) -> Ends | None:
        """Let the device tier follow its wanted size; return what the plan asks of the memory."""
        waiting = self.queue and len(self._running.requests) < self.config.max_running
        head = self._next(()) if waiting else None
        needs = ((0, 0), 0) if head is None else self._running.needs(head)
        active = bool(self.queue) or not all(request.warm for request in self._running.requests)
        most = max((SWAP_OUT_QUANTUM if work else IDLE_QUANTUM) - self._swap_out_backlog, 0)
        if not work:
            most = max(most, SWAP_OUT_QUANTUM)  # without it, nothing might tell of the backlog's end
        elif self.config.swap_in_first and self.cache.swaps_in:
            most //= 4
        return elastic.plan(Need(active, *needs), now, most)

    def _plan_one_group(self, work: _Work, drafts: Mapping[Request, TokenArray], memory: Ends | None) -> Plan:
        spans: list[Span] = []
        tables: list[PageTable] = []
        for table, (request, ranges) in enumerate(work.items()):
            guesses = drafts.get(request, NO_DRAFTS)
            length = request.latest_length if request.guesses else request.length
            tables.append(self.cache.page_table(request.session, length + len(guesses)))
            for start, end in ranges:
                spans.append(self._span(request, start, end, table))
            if len(guesses) or request.guesses:
                tokens = np.concatenate([spans[-1].tokens, guesses])
                spans[-1] = msgspec.structs.replace(
                    spans[-1], tokens=tokens, drafts=len(guesses), undecided=request.undecided
                )
        return Plan(self._steps, tuple(spans), tuple(tables), *self.cache.take_copies(), memory=memory)

    def _plan_two_groups(self, work: _Work, memory: Ends | None) -> Plan:
        """Make the plan for a model with two KV groups: spans end where a group begins or ceases to store."""
        spans: list[Span] = []
        tables: list[PageTable] = []
        window_tables: list[PageTable] = []
        chains: list[Chain] = []
        for request in work:
            session = request.session
            pieces, window_table, passed = self.cache.second_group(session, request.length, len(spans))
            chains += passed
            if window_table is not None:
                window_tables.append(window_table)
            tables.append(self.cache.page_table(session, request.length))
            for piece in pieces:
                span = self._span(request, piece.start, piece.end, len(tables) - 1, piece.stores)
                spans.append(span)
        return Plan(
            self._steps,
            tuple(spans),
            tuple(tables),
            *self.cache.take_copies(),
            window_tables=tuple(window_tables),
            chains=tuple(chains),
            memory=memory,
        )

    def _span(self, request: Request, start: int, end: int, table: int, stores: int = 3) -> Span:
        # Sample only after the newest token, and not when that is known to be the last.
        sample = None
        if (
            end == request.length
            and not request.missing
            and request.finished is None
            and request.limit_reason(end, self.context_limit) is None
        ):
            sample = request.sample_spec(self.config.eos_token_ids)
        return Span(request.key, start, request.tokens[start:end], table, sample, stores)
