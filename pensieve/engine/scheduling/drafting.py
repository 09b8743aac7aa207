"""Which requests of a plan get drafts. ``drafts`` explains drafts.

::

    plan N      requests that choose a token
                  │ _propose: guesses at their next tokens, within the tokens that the plan leaves over
                  │ _is_worthwhile: whether they gain more than they cost
                  │ _reserve: as many as free pages hold
                  ▼ drafts of the plan's spans
    launch N    ▼ on_launched: they are undecided
    plan N + 1  while step N runs: its drafts are taken to be right as far as the new guesses agree with them, and new
                  drafts follow what would be chosen then. The device knows better: it puts them, and the newest
                  token, behind the drafts that it has accepted (``plan.Span.undecided``). The scheduler waits for
                  the tokens of step N only if others may need the pages of drafts, or may have to leave the batch
    commit N    ▼ end: how many were accepted; pages go back
    step N timed  ▼ on_timed: what a draft, a request and a wait cost
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import numpy as np

from pensieve.config import SchedulerConfig
from pensieve.core import TokenArray, common_prefix
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.drafts import Odds, StepCosts
from pensieve.engine.scheduling.request import Guesses, Request


class _Proposal(msgspec.Struct, frozen=True):
    """Guesses at the tokens of ``request`` after its known ones: ``pending`` tokens that are chosen when the plan runs,
    and drafts after them."""

    request: Request
    pending: int
    guesses: list[int]
    match: int | None
    """See ``Guesses.match``."""
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
        self._odds = Odds()
        """The odds of all requests' drafts."""
        self._planned: list[tuple[Request, Guesses]] = []
        """The drafts of the plan that is to be launched."""
        self.requests = self.pages = 0
        """Requests with drafts in the latest plan, and pages that only these drafts use."""
        self.drafted = self.accepted = 0
        """Drafts since start, and those accepted."""

    # -- a plan ------------------------------------------------------------------------------------------------------

    def plan(
        self, requests: Collection[Request], budget: int, now: float, must_wait: Callable[[], bool]
    ) -> dict[Request, TokenArray]:
        """Return drafts for those of a plan's ``requests`` whose next token it chooses. They take what the plan leaves
        over: ``budget`` tokens, and free pages. ``must_wait``: whether the plan after this one would have to wait for
        their tokens."""
        self.requests = self.pages = 0
        self._planned = []
        running = len(requests)
        if not self.most or self.costs.should_compare(running):
            return {}
        trial = self.costs.should_try
        price = 0.0 if trial else self.costs.price(running)
        proposals = self._propose(requests, min(budget, self.most), price)
        if proposals and (trial or self._is_worthwhile(proposals, running, waits=must_wait())):
            return self._reserve(proposals, now)
        return {}

    def _propose(self, requests: Collection[Request], budget: int, price: float) -> list[_Proposal]:
        proposals: list[_Proposal] = []
        for request in requests:
            if budget <= 0:
                break
            most = min(request.most_drafts(self._context_limit), budget)
            if most <= 0 or request.missing or not request.may_draft:
                continue
            if request.drafter is None:
                request.begin_drafts(self._odds)
            pending, undecided = request.length - request.num_known, request.undecided
            if undecided is None:
                guesses, chances = request.propose(pending + most, price)
            else:
                guesses, chances = request.propose(pending + len(undecided) + most, price)
                # The first guess is at the place of the first draft. The step that runs chooses one token more than it
                # accepts: the guess that follows those that agree.
                pending += common_prefix(undecided, np.array(guesses, np.int32))
            assert request.drafter is not None
            guesses = guesses[: pending + min(most, request.drafter.most_drafts)]
            drafts = len(guesses) - pending
            if drafts > 0:
                gain = sum(chances[pending : len(guesses)]) - price * drafts
                proposals.append(_Proposal(request, pending, guesses, request.drafter.match, gain))
                budget -= drafts
        return proposals

    def _is_worthwhile(self, proposals: list[_Proposal], running: int, *, waits: bool) -> bool:
        """Whether the proposals gain what having drafts costs a step of ``running`` requests, and a wait if there will
        be one."""
        cost = self.costs.first_draft(running)
        if waits and self.sync_share:
            cost += running * self.costs.lost_share(self.sync_share)
        return sum(one.gain for one in proposals) > cost

    def _reserve(self, proposals: list[_Proposal], now: float) -> dict[Request, TokenArray]:
        """Return as many drafts of each proposal as there are free pages for."""
        drafts: dict[Request, TokenArray] = {}
        size = self._cache.config.chunk_tokens
        for one in proposals:
            request, length = one.request, one.request.latest_length
            end = length + len(one.guesses) - one.pending
            self._cache.extend(request.session, end, now, free_only=True)
            pages = len(self._cache.page_table(request.session, end))
            guesses = np.array(one.guesses[: one.pending + pages * size - length], np.int32)
            if len(guesses) > one.pending:
                drafts[request] = guesses[one.pending :]
                self._planned.append(
                    (request, Guesses(request.num_known, guesses, drafts[request], one.match))
                )
                self.pages += pages - self._cache.chunks_for(request.length + 1)
        self.requests = len(drafts)
        return drafts

    # -- a step that runs --------------------------------------------------------------------------------------------

    def on_launched(self) -> None:
        """Record that the latest plan runs."""
        for request, guesses in self._planned:
            request.on_guessed(guesses)
        self._planned = []

    # -- its result --------------------------------------------------------------------------------------------------

    def end(self, request: Request | None, accepted: int, drafted: int) -> None:
        """Record that a step accepted the first of ``drafted`` drafts. ``request``: None if it has gone meanwhile."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        if request is not None and request.guesses:
            request.on_drafts(accepted)
            # Otherwise the step that runs has drafts on these pages.
            if not request.guesses or request.finished is not None:
                self._cache.take_back(request.session, request.length)

    def on_timed(self, plan: Plan, seconds: float, idle: float | None) -> None:
        """Learn costs from a step that only decoded: see ``StepCosts.on_step``."""
        if self.most and plan.spans and all(len(span.tokens) == span.num_chosen for span in plan.spans):
            self.costs.on_step(len(plan.spans), plan.num_tokens - len(plan.spans), seconds, idle)
