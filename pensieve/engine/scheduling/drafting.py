"""Which requests of a plan get drafts, and whether the next plan waits for their tokens. ``drafts`` explains drafts.

::

    plan N      requests that choose a token
                  │ _propose: guesses at their next tokens, within the tokens that the plan leaves over
                  │ _worthwhile: those that gain more than they cost, in the cheaper of two ways:
                  │     sitting out   each of these requests is not in plan N + 1
                  │     waiting       plan N + 1 is made when the tokens of step N are known
                  │ _reserve: as many as free pages hold
                  ▼ drafts of the plan's spans
    step N runs, and plan N + 1 is due
                  ▼ prefers_waiting: which of the two it is. The scheduler waits in any case if others may need the
                    pages of drafts, or may have to leave the batch
    commit N      ▼ end: how many were accepted; pages go back
    step N timed  ▼ on_timed: what a draft, a request and a wait cost
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from pensieve.config import SchedulerConfig
from pensieve.core import TokenArray
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.drafts import StepCosts
from pensieve.engine.scheduling.request import Request


class _Proposal(msgspec.Struct, frozen=True):
    """Guesses at the tokens of ``request`` after its known ones: ``pending`` tokens that are chosen already, and drafts
    after them."""

    request: Request
    pending: int
    guesses: list[int]
    gain: float
    """Tokens that the drafts are expected to bring, less those that their rows cost."""


class Drafting:
    """The drafts of an engine's plans. Not thread-safe: the engine's thread owns it."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, context_limit: int) -> None:
        self._cache = cache
        self._context_limit = context_limit
        # A state of a second KV group could not go back behind a rejected draft.
        self.most = 0 if cache.two_groups else config.max_drafts
        """Most drafts of a step; 0: this engine does not draft."""
        self.sync_share = 0.0
        """See ``StepCosts.lost_share``; 0: this engine loses nothing."""
        self.costs = StepCosts()
        self.requests = self.pages = 0
        """Requests with drafts in the latest plan, and pages that only these drafts use."""
        self.drafted = self.accepted = 0
        """Drafts since start, and those accepted."""

    # -- a plan ------------------------------------------------------------------------------------------------------

    def plan(self, requests: Collection[Request], budget: int, now: float) -> dict[Request, TokenArray]:
        """Return drafts for those of a plan's ``requests`` whose next token it chooses. They take what the plan leaves
        over: ``budget`` tokens, and free pages."""
        self.requests = self.pages = 0
        if not self.most or self.costs.should_compare:
            return {}
        running, trial = len(requests), self.costs.should_try
        price = 0.0 if trial else self.costs.price(running)
        proposals = self._propose(requests, min(budget, self.most), price)
        if proposals and not trial:
            proposals = self._worthwhile(proposals, running)
        return self._reserve(proposals, now) if proposals else {}

    def _propose(self, requests: Collection[Request], budget: int, price: float) -> list[_Proposal]:
        proposals: list[_Proposal] = []
        for request in requests:
            if budget <= 0:
                break
            most = min(request.most_drafts(self._context_limit), budget)
            if most > 0 and not request.missing and request.may_draft:
                pending = request.length - request.num_known
                guesses, chances = request.propose(pending + most, price)
                drafts = len(guesses) - pending
                if drafts > 0:
                    gain = sum(chances[pending:]) - price * drafts
                    proposals.append(_Proposal(request, pending, guesses, gain))
                    budget -= drafts
        return proposals

    def _worthwhile(self, proposals: list[_Proposal], running: int) -> list[_Proposal]:
        """Return the proposals to take in a step of ``running`` requests. If some requests are to sit out the next
        step, each must gain more than that costs; if the device is to wait, all together must. Either way they must
        gain what the first draft of a step costs."""
        least, first = self.costs.sitting_out(running), self.costs.first_draft(running)
        sitting = [one for one in proposals if one.gain > least]
        with_wait = sum(one.gain for one in proposals) - self._wait_cost(running)
        if len(sitting) < running and sum(one.gain - least for one in sitting) > max(with_wait, first):
            return sitting
        return proposals if with_wait > first else []

    def _reserve(self, proposals: list[_Proposal], now: float) -> dict[Request, TokenArray]:
        """Return as many drafts of each proposal as there are free pages for."""
        drafts: dict[Request, TokenArray] = {}
        size = self._cache.config.chunk_tokens
        for one in proposals:
            request, length = one.request, one.request.length
            end = length + len(one.guesses) - one.pending
            self._cache.extend(request.session, end, now, free_only=True)
            pages = len(self._cache.page_table(request.session, length + len(one.guesses)))
            guesses = np.array(one.guesses[: one.pending + pages * size - length], np.int32)
            if len(guesses) > one.pending:
                request.on_guessed(guesses)
                drafts[request] = guesses[one.pending :]
                self.pages += pages - self._cache.chunks_for(length + 1)
        self.requests = len(drafts)
        return drafts

    # -- a step that runs --------------------------------------------------------------------------------------------

    def prefers_waiting(self, guessing: int, running: int) -> bool:
        """Whether the device should wait for the tokens of the step that runs, in which ``guessing`` of ``running``
        requests have drafts, since it would cost more if these sat out the next step."""
        if guessing == running:
            return True  # nothing could be planned
        return self._wait_cost(running) <= guessing * self.costs.sitting_out(running)

    def _wait_cost(self, requests: int) -> float:
        """Return how many tokens one wait of the device costs."""
        return requests * self.costs.lost_share(self.sync_share) if self.sync_share else 0.0

    # -- its result --------------------------------------------------------------------------------------------------

    def end(self, request: Request | None, accepted: int, drafted: int) -> None:
        """Take in that a step accepted the first of ``drafted`` drafts. ``request``: None if it has gone meanwhile."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        if request is not None and request.guesses is not None:
            request.on_drafts(accepted, drafted)
            self._cache.take_back(request.session, request.length)

    def on_timed(self, plan: Plan, seconds: float, idle: float | None) -> None:
        """Learn costs from a step that only decoded: see ``StepCosts.on_step``."""
        if self.most and plan.spans and all(len(span.tokens) == span.num_chosen for span in plan.spans):
            self.costs.on_step(len(plan.spans), plan.num_tokens - len(plan.spans), seconds, idle)
