"""Drafts: guesses at the next tokens of an answer, found in the conversation itself. numpy only.

A step with drafts computes a request's newest token and, in the same span, the tokens that may follow. It chooses a
token after each of them just as single steps would: with the same seed, index, penalties and limits. Drafts count as
long as each equals the token chosen before it. The first chosen token that differs is the answer's next token. So
drafts change the number of steps, never the answer.

An overlapped engine plans a step while the one before runs. A request's newest token is pending then: drafts follow a
guess at it, and the step computes the token that was chosen. While a step with drafts runs, the host does not know how
many it accepts, but the device will. So the next step's rows of such a request are made for any number, and the device
moves them to where they belong (``plan.Span.undecided``). ``drafting`` decides, this module knows texts and costs.

==========================  ==============  =====================================================================
state                       only writer     fails safely because
==========================  ==============  =====================================================================
places of a conversation    ``Drafter``     a wrong place gives a wrong draft, which is not chosen
odds of a request's drafts  ``Drafter``     wrong odds cost rows, or steps
odds of all answers         ``Drafter``     the same: they are the odds of an answer at its start
costs of a row and a step   ``StepCosts``   the same
who drafts, totals          ``Drafting``    a wrong choice costs steps
drafts of a span            the plan        they end with its step: suspension, cancel or death leave none
undecided drafts            ``Request``     a plan and its worker take them from the same request and step
pages of drafts             cache           they are free pages, and go back when the step is committed
valid KV (``filled``)       cache           at the plan it counts the newest token, at the commit accepted drafts
==========================  ==============  =====================================================================

Without drafts are requests with a grammar (a mask would depend on the drafts before it), beams, and models with two KV
groups (a recurrent state cannot go back behind a rejected draft): see ``Request.may_draft`` and ``Drafting.most``.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from pensieve.core import TokenArray

MOST_DRAFTS: Final = 16
"""Drafts of a request in one step, those included that a step before it is testing: with more for each, 64 and more
requests gain less (bench/results/drafts.md)."""
MOST_PREDICTED: Final = 64
"""The same while the answer follows a prediction."""
LONGEST_MATCH: Final = 16
"""Longer matches are as good as this."""
MOST_PLACES: Final = 16
"""Latest places that are compared, of those that are sorted and of those that are not."""
SORTED_AT_ONCE: Final = 64
"""With this many new tokens all places are sorted again. Fewer are entered one by one."""
SYNC_SHARE: Final = 0.02
"""Part of an overlapped engine's step that a wait for tokens is expected to lose, until its own steps have shown how
much."""
_GAP: Final = -1
"""Stands between texts: no token equals it."""
_HITS, _TRIES = 1.5, 2.0
"""Odds at the start, as if seen: optimistic, since only drafts that are tried teach anything."""
_MOST_TRIES: Final = 1000.0
"""With this many the older half is forgotten."""
_TRIED_AGAIN: Final = 64
"""Matches whose drafts were not worth their price, until the odds of their answer are those at the start again. Other
answers may be of another kind, and so may this one by now."""
_BUCKETS: Final = (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5)
"""Bucket of the odds for each length of a match."""
_PREDICTED: Final = 6
"""Bucket of the odds while the answer follows a prediction: most callers know why they predict."""
_DECAY: Final = 0.98
_ADDED: Final = 1e-6, 1e-6, 1e-6, 1e-4
"""Shares of the diagonal that are added to it. What could be the price of drafts or of the first one is the price."""
COMPARED_AFTER: Final = 250
"""Steps of one kind, with drafts or without, until one of the other shows again what it takes."""
_COMPARED_SOON: Final = 4
"""The same for a step without drafts, once the number of requests has changed by more than a quarter."""
_WAIT_DECAY: Final = 0.998
"""The cost of a wait is forgotten more slowly: few steps show it, and each trial costs as much."""
_OUTLIER: Final = 3.0
"""A step that takes this many times as long as expected, unlike the latest of its kind, teaches nothing: the machine
held it up. Learnt, one with drafts would end drafts until they are tried again."""
_EXPECTED_WAITS: Final = 0.2
"""Waits that the expected cost of one counts for. It is low, so that waits are tried, and soon outweighed."""


class Odds:
    """How often drafts were right that came after others that were, by the length of the match and its distance."""

    def __init__(self, begin: Odds | None = None) -> None:
        """``begin``: those of more answers, which are the odds of one until its own drafts have shown others. A
        prediction is its caller's own."""
        self._hits = [_HITS] * _PREDICTED + [5 * _TRIES - 0.5]
        self._tries = [_TRIES] * _PREDICTED + [5 * _TRIES]
        if begin is not None:
            self._hits[:_PREDICTED] = [_TRIES * rate for rate in begin.rates[:_PREDICTED]]
        self.rates: list[float] = [hits / tries for hits, tries in zip(self._hits, self._tries, strict=True)]
        """By bucket."""

    def learn(self, buckets: Sequence[int], right: int) -> None:
        """Learn from drafts, named by their buckets: the first ``right`` of them were right."""
        hits, tries, rates = self._hits, self._tries, self.rates
        for number, bucket in enumerate(buckets):
            if tries[bucket] >= _MOST_TRIES:
                hits[bucket] /= 2.0
                tries[bucket] /= 2.0
            tries[bucket] += 1.0
            hits[bucket] += number < right
            rates[bucket] = hits[bucket] / tries[bucket]


class Drafter:
    """The places of one request's conversation, and the odds of its drafts. It sees tokens with a known id only."""

    def __init__(self, prompt_tokens: int, predicted: Sequence[int], odds: Odds) -> None:
        """``predicted``: a guess at the answer; empty: there is none. ``odds``: of the drafts of all answers."""
        self._all_odds, self._odds = odds, Odds(odds)
        self._predicted = list(predicted)
        self._follows: int | None = 0 if self._predicted else None
        """Tokens of the prediction that the answer began with; None: it began otherwise."""
        self._text = [_GAP, *self._predicted, _GAP]
        """Prediction and context, with a gap before each."""
        self._first = len(self._text)
        self._answer = self._first + prompt_tokens
        """Place of the answer's first token."""
        self._sorted: dict[int, int] = {}
        """Each pair of neighbours up to the latest sort, and its number in ``_begins``."""
        self._begins: list[int] = []
        """Index in ``_places`` of the first place of each pair, then the number of places."""
        self._places: list[int] = []
        """Places of the pairs' second tokens, by pair, ascending."""
        self._latest: defaultdict[int, list[int]] = defaultdict(list)
        """Places of the pairs since the latest sort, ascending."""
        self._entered = 0
        """Places before this one are entered: all but the last, which has no successor to draft."""
        self.match: int | None = 0
        """Length of the match behind the latest drafts; None: they follow the prediction."""
        self._skipped = 0
        """Matches since the latest drafts, or since the odds began anew."""

    def propose(self, context: TokenArray, most: int, price: float) -> tuple[list[int], list[float]]:
        """Return up to ``most`` guesses at the tokens after ``context``, which begins like that of the call before, and
        the chance that each is right. No chance is below ``price``."""
        self._take(context[len(self._text) - self._first :].tolist())
        if self._follows is not None and self._follows < len(self._predicted):
            self.match = None
            # A step may be testing the first of them: the next one gets as many.
            chances = self._chances(min(most, 2 * MOST_PREDICTED), price)
            drafts = self._predicted[self._follows : self._follows + len(chances)]
        else:
            self.match, place = self._find()
            if not self.match:
                return [], []
            chances = self._chances(min(most, MOST_DRAFTS), price)
            self._skipped = 0 if chances else self._skipped + 1
            if self._skipped == _TRIED_AGAIN:
                self._odds, self._skipped = Odds(), 0
            drafts = self._continuation(place, len(chances))
        return drafts, chances[: len(drafts)]

    @property
    def most_drafts(self) -> int:
        """Most drafts of a step, of the guesses that were proposed last."""
        return MOST_PREDICTED if self.match is None else MOST_DRAFTS

    def _chances(self, most: int, price: float) -> list[float]:
        """Return the chances of up to ``most`` drafts behind the match, as long as they are worth ``price``."""
        chance = 1.0
        chances: list[float] = []
        for depth in range(most):
            chance *= self._odds.rates[_bucket(self.match, depth)]
            if chance < price:
                break
            chances.append(chance)
        return chances

    def learn(self, match: int | None, accepted: int, tested: int) -> None:
        """Take in what became of drafts behind a ``match``: the first ``accepted`` of ``tested`` were right."""
        buckets = [_bucket(match, depth) for depth in range(min(accepted + 1, tested))]
        self._odds.learn(buckets, accepted)
        self._all_odds.learn(buckets, accepted)

    def _take(self, new: list[int]) -> None:
        """Append tokens of the context, and enter their places."""
        text = self._text
        text += new
        if self._follows is not None:
            answer = text[self._answer :]
            self._follows = len(answer) if answer == self._predicted[: len(answer)] else None
        last = len(text) - 1
        if self._sorted and len(new) < SORTED_AT_ONCE:
            for place in range(self._entered, last):
                self._latest[_pair(text[place - 1], text[place])].append(place)
            self._entered = last
            return
        self._entered = last
        tokens = np.array(text[:last], np.int64)
        keys = (tokens[:-1] << 32) + tokens[1:]
        order = np.argsort(keys, kind="stable")
        pairs, begins = np.unique(keys[order], return_index=True)
        self._sorted = dict(zip(pairs.tolist(), range(len(pairs)), strict=True))
        self._begins, self._places = [*begins.tolist(), len(order)], (order + 1).tolist()
        self._latest.clear()

    def _find(self) -> tuple[int, int]:
        """Return the length of the longest match of the text's end among its latest places, and its last token's place;
        the latest of equals. (0, 0): the last two tokens are nowhere else."""
        text = self._text
        last = len(text) - 1
        if text[last - 1] == _GAP:
            return 0, 0
        best, best_place = 0, 0
        for place in reversed(self._places_of(_pair(text[last - 1], text[last]))):
            length = 2
            while length < LONGEST_MATCH and text[place - length] == text[last - length] != _GAP:
                length += 1
            if length > best:
                best, best_place = length, place
                if best == LONGEST_MATCH:
                    break
        return best, best_place

    def _places_of(self, pair: int) -> list[int]:
        """Return the latest places of a pair, ascending."""
        number, latest = self._sorted.get(pair), self._latest.get(pair, [])[-MOST_PLACES:]
        if number is None:
            return latest
        low, high = self._begins[number], self._begins[number + 1]
        return self._places[max(low, high - MOST_PLACES) : high] + latest

    def _continuation(self, place: int, most: int) -> list[int]:
        """Return up to ``most`` tokens that follow ``place``. A match that overlaps them is a loop, which goes on."""
        drafts = self._text[place + 1 : place + 1 + most]
        while len(drafts) < most:
            drafts += drafts[: most - len(drafts)]
        return drafts[: drafts.index(_GAP)] if _GAP in drafts else drafts


def _bucket(match: int | None, depth: int) -> int:
    """Return the bucket of the odds of a draft that ``depth`` others behind the match come before."""
    return _PREDICTED if match is None else _BUCKETS[min(match + depth, LONGEST_MATCH)]


def _pair(first: int, second: int) -> int:
    return (first << 32) + second


class StepCosts:
    """The costs of steps that only decode, learnt from the engine's own steps.

    *seconds = a + b × requests + c × drafts, and d more with any drafts*, by least squares. Another request reads
    another history, another draft does not. A step with drafts may take another graph and other attention tiles.
    Steps with drafts and steps without are forgotten apart, each kind when newer ones of it replace them, so that
    neither forgets what only the other one shows.
    """

    def __init__(self) -> None:
        self._sums = {False: np.zeros((5, 5)), True: np.zeros((5, 5))}
        """Sums of products of (1, requests, drafts, any drafts, seconds), by whether the step had drafts."""
        self._surprises = {kind: deque((1.0, 1.0), maxlen=5) for kind in (False, True)}
        """How many times as long as expected the latest steps of each kind took."""
        self._since = {False: 0, True: 0}
        """Steps since the latest of each kind."""
        self._alone = 0
        """Requests of the latest step without drafts."""
        self._lost = self._waits = 0.0
        """Sum of the parts of a step that the device waited, and number of such waits."""
        self._fit = 0.0, 0.0, 0.0, 0.0
        """The latest a, b, c and d."""

    def on_step(self, requests: int, drafts: int, seconds: float, idle: float | None = None) -> None:
        """Take in a step. ``seconds``: how long the device computed. ``idle``: how long it had waited for the step,
        because this was planned when the tokens of the one before were known; None: it was not."""
        kind = drafts > 0
        surprises = self._surprises[kind]
        surprises.append(self._surprise(requests, drafts, seconds))
        if surprises[-1] > _OUTLIER * median(surprises):
            return
        sums, values = self._sums[kind], np.array((1.0, requests, drafts, kind, seconds))
        self._since = {each: since + 1 for each, since in self._since.items()}
        sums *= _DECAY ** self._since[kind]
        sums += np.outer(values, values)
        self._since[kind] = 0
        if not kind:
            self._alone = requests
        self._waits = self._waits * _WAIT_DECAY + (idle is not None)
        self._lost *= _WAIT_DECAY
        if idle is not None and seconds > 0.0:
            self._lost += min(idle / seconds, 1.0)
        sums = self._sums[False] + self._sums[True]
        products, results = sums[:4, :4], sums[:4, 4]
        # A little is added to the diagonal: with one number of requests, or of drafts, many solutions fit.
        added = np.array(_ADDED) * products.diagonal() + 1e-9
        self._fit = tuple(np.linalg.solve(products + np.diag(added), results).tolist())

    def _surprise(self, requests: int, drafts: int, seconds: float) -> float:
        """Return how many times as long as expected a step took; 1 while nothing is expected."""
        base, per_request, per_draft, with_drafts = self._fit
        expected = base + per_request * requests + per_draft * drafts + with_drafts * (drafts > 0)
        return seconds / expected if expected > 0.0 else 1.0

    def should_compare(self, requests: int) -> bool:
        """Whether the next step, of ``requests`` requests, should have no drafts, since what one takes without them was
        seen too long ago, or with many more requests or fewer."""
        known = abs(requests - self._alone) * 4 <= requests
        return self._since[False] >= (COMPARED_AFTER if known else _COMPARED_SOON)

    @property
    def should_try(self) -> bool:
        """Whether the next step should have drafts whatever they cost, since that was seen too long ago. Otherwise one
        slow step could end them for good."""
        return self._since[True] >= COMPARED_AFTER

    def price(self, requests: int) -> float:
        """Return the least chance that a draft must have in a step of ``requests`` requests: (seconds per draft) ÷
        (step seconds ÷ requests). 0 while the costs are unknown: trying teaches them."""
        return self._in_tokens(self._fit[2], requests)

    def first_draft(self, requests: int) -> float:
        """Return how many tokens a step of ``requests`` requests loses by having any drafts, beside their price."""
        return self._in_tokens(self._fit[3], requests)

    def _in_tokens(self, seconds: float, requests: int) -> float:
        """Return how many tokens ``requests`` requests get in ``seconds`` of steps without drafts."""
        base, per_request, *_ = self._fit
        step = base + per_request * requests
        tokens = seconds * requests / step if step > 0.0 else 0.0
        return max(tokens, 0.0) if math.isfinite(tokens) else 0.0

    def lost_share(self, expected: float) -> float:
        """Return the part of a step that is lost by a wait. ``expected``: the answer at the start, and after many steps
        without a wait, so that drafts are tried now and then. It is no time: waits grow with the batch, as steps do."""
        return (_EXPECTED_WAITS * expected + self._lost) / (_EXPECTED_WAITS + self._waits)
