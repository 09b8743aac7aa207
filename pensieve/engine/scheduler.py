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

import bisect
from dataclasses import dataclass

from pensieve.config import SchedulerConfig
from pensieve.core import FinishReason, RequestKey, Sampling, SessionKey, TokenArray, TokenLogprob
from pensieve.engine.cache.chunk import Range
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.plan import PageTable, Plan, SampleSpec, Span, StepResult
from pensieve.engine.request import Request

SWAP_OUT_QUANTUM = 32
"""Chunks copied out ahead of time per step at most: background work must not stretch a step."""


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
        self.waiting: list[Request] = []
        """In order of arrival."""
        self.running: list[Request] = []
        """In order of arrival."""
        self.suspensions = 0
        self.admitted: list[Request] = []
        """Requests admitted for the first time by the latest ``plan``."""
        self._by_key: dict[RequestKey, Request] = {}
        self._tickets = 0
        self._steps = 0
        self._swap_out_backlog = 0

    # -- from the front end ------------------------------------------------------------------------------------------

    def fits(self, tokens: int) -> bool:
        """Whether a context of this length, and one token of output, can ever be served."""
        return tokens < self.context_limit

    def submit(
        self,
        key: RequestKey,
        session: SessionKey,
        tokens: TokenArray,
        num_new: int,
        sampling: Sampling,
        now: float,
    ) -> Request:
        """Queue a request. The caller has checked ``fits``."""
        if not 0 < len(tokens) < self.context_limit or not 0 <= num_new <= len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {num_new} of them new, limit {self.context_limit}")
        request = Request(key, session, self._tickets, tokens.copy(), len(tokens), num_new, sampling, now)
        self._tickets += 1
        self.waiting.append(request)
        self._by_key[key] = request
        return request

    def cancel(self, key: RequestKey, now: float) -> bool:
        """Take a request out at once; False when it is not known (any more). What it computed stays cached.

        A finished request is no longer anybody's to cancel: it leaves when its last token is cached.
        """
        request = self._by_key.get(key)
        if request is None or request.finished is not None:
            return False
        del self._by_key[key]
        if request.in_batch:
            self._leave(request, now)
        else:
            self.waiting.remove(request)
        return True

    def hurry(self, session: SessionKey | None, now: float) -> None:
        """Let finished requests (of one session, or all) go without caching their last token."""
        for request in list(self.running):
            if request.finished is not None and session in (None, request.session):
                self._leave(request, now)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Choose this step's tokens and copies; reserves the slots that they need."""
        self.admitted = []
        work: list[tuple[Request, list[Range]]] = []
        budget = self.config.max_batch_tokens
        if self.config.unified_batch:
            budget -= self._plan_decodes(work, now)
            budget -= self._plan_spans(work, budget)
            self._admit(work, budget, now)
        else:
            budget -= self._plan_spans(work, budget)
            self._admit(work, budget, now)
            if not work:
                self._plan_decodes(work, now)
        if not (self.config.swap_in_first and self.cache.swaps_in):
            self.cache.swap_out_ahead(now, SWAP_OUT_QUANTUM - self._swap_out_backlog)
        swap_out, copies, swap_in = self.cache.take_copies()
        spans, tables = self._spans(work)
        self._steps += 1
        return Plan(self._steps, spans, tables, swap_out, copies, swap_in)

    def launched(self, plan: Plan) -> None:
        """The worker has begun ``plan``: whatever is planned from now on comes after it."""
        self.cache.complete_copies()
        for span in plan.spans:
            request = self._by_key[span.request]
            self.cache.computed(request.session, span.start, span.end)
            if span.sample is not None:
                request.expect()

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[Token]:
        """Take in what the worker did with a launched plan; returns the new output tokens."""
        self._swap_out_backlog = result.swap_out_backlog
        tokens: list[Token] = []
        for sampled in result.sampled:
            request = self._by_key.get(sampled.request)
            if request is None or request.finished is not None:
                continue  # it has ended, or was cancelled, while this step ran
            if request.first_token is None:
                request.first_token = now
            request.settle(sampled.token_id)
            finished = self._finish_reason(request, sampled.token_id)
            if finished is not None:
                self._finish(request, finished)
            tokens.append(Token(sampled.request, sampled.token_id, sampled.logprob, finished))
        for request in list(self.running):
            history = request.prompt_tokens - request.num_new
            if request.restored is None and not (request.missing and request.missing[0][0] < history):
                request.restored = now
            if request.finished is not None and (self.config.stateless or not request.missing):
                self._leave(request, now)
        return tokens

    # -- inside plan -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, work: list[tuple[Request, list[Range]]], now: float) -> int:
        """One token of every generation, oldest first; suspends the youngest when slots run out."""
        planned = 0
        for request in list(self.running):
            if not (request.in_batch and request.decoding) or self._must_wait(request):
                continue
            if self._make_room(request, now):
                work.append((request, request.take_missing(1)))
                planned += 1
        return planned

    def _make_room(self, request: Request, now: float) -> bool:
        """Get the slot of a generation's newest token; False when the request itself had to go."""
        while not self.cache.extend(request.session, request.length, now):
            youngest = self.running[-1]
            if youngest.finished is not None:
                self._leave(youngest, now)
            else:
                self._suspend(youngest, now)
            if youngest is request:
                return False
        return True

    def _suspend(self, request: Request, now: float) -> None:
        """Out of the batch, back into the queue at its place by arrival (EuroSys §4.3.5).

        Its chunks are unpinned; swap-out takes them like any others, and their recency keeps them for last.
        """
        self.running.remove(request)
        request.in_batch = False
        self.cache.suspend(request.session, now, request.context)
        request.missing.clear()
        bisect.insort(self.waiting, request, key=lambda other: other.arrival)
        self.suspensions += 1

    def _plan_spans(self, work: list[tuple[Request, list[Range]]], budget: int) -> int:
        """Restores and prefills already running, oldest first, until the budget is used (chunked prefill)."""
        used = 0
        for request in self.running:
            if used >= budget:
                break
            if not request.decoding and request.missing:
                ranges = request.take_missing(budget - used)
                used += sum(end - start for start, end in ranges)
                work.append((request, ranges))
        return used

    def _admit(self, work: list[tuple[Request, list[Range]]], budget: int, now: float) -> None:
        """First come, first served: the queue's head joins while slots and budget allow; nobody overtakes it."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            # A return from suspension restores what it had computed itself: all but its newest token is history.
            num_new = request.num_new if request.receipt is None else 0
            context = request.context
            if self._must_wait(request) or not self.cache.can_admit(
                request.session, context, num_new, reserve=bool(self.running)
            ):
                return
            self.waiting.pop(0)
            if request.admit(self.cache.admit(request.session, context, num_new, now), now):
                self.admitted.append(request)
            bisect.insort(self.running, request, key=lambda other: other.arrival)
            request.in_batch = True
            ranges = request.take_missing(budget)
            budget -= sum(end - start for start, end in ranges)
            work.append((request, ranges))

    def _spans(
        self, work: list[tuple[Request, list[Range]]]
    ) -> tuple[tuple[Span, ...], tuple[PageTable, ...]]:
        spans: list[Span] = []
        tables: list[PageTable] = []
        for request, ranges in work:
            tables.append(self.cache.page_table(request.session, request.length))
            for start, end in ranges:
                last = end == request.length and not request.missing
                more = last and request.finished is None and self._limit(request, request.length) is None
                sample = self._sample_spec(request) if more else None
                spans.append(Span(request.key, start, request.tokens[start:end], len(tables) - 1, sample))
        return tuple(spans), tuple(tables)

    def _sample_spec(self, request: Request) -> SampleSpec:
        prompt: TokenArray | None = None
        output: TokenArray | None = None
        if request.sampling.needs_context:
            prompt = request.tokens[: request.prompt_tokens]
            output = request.tokens[request.prompt_tokens : request.length]
        return SampleSpec(request.sampling, request.output_tokens, self.config.eos_token_ids, prompt, output)

    # -- inside commit -----------------------------------------------------------------------------------------------

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        """Why the generation ends with ``token``, its newest known one."""
        sampling = request.sampling
        if request.settled - request.prompt_tokens > sampling.min_output_tokens:
            if token in sampling.stop_token_ids:
                return FinishReason.STOP_TOKEN
            if token in self.config.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.EOS
        return self._limit(request, request.settled)

    def _limit(self, request: Request, length: int) -> FinishReason | None:
        """Why a context of ``length`` tokens, output included, is the longest of this request; None: it is not."""
        most = request.sampling.max_output_tokens
        if most is not None and length - request.prompt_tokens >= max(most, 1):
            return FinishReason.LENGTH
        if length >= self.context_limit:
            return FinishReason.CONTEXT_FULL
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish(reason)
        if not request.in_batch:  # suspended while its last token was being sampled
            self.waiting.remove(request)
            self._by_key.pop(request.key, None)

    def _leave(self, request: Request, now: float) -> None:
        self.running.remove(request)
        request.in_batch = False
        self._by_key.pop(request.key, None)
        self.cache.release(request.session, now, request.context, forget=self.config.stateless)

    @staticmethod
    def _must_wait(request: Request) -> bool:
        """Its sampling looks at its own output, whose newest token is not known yet."""
        return request.pending and request.sampling.needs_context
