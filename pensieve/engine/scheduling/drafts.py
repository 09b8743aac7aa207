"""Drafts: guesses at the next tokens of an answer, found in the conversation itself. numpy only.

A step with drafts computes a request's newest token and, in the same span, the tokens that may follow. It chooses a
token after each of them just as single steps would: with the same seed, index, penalties and limits. Drafts count as
long as each equals the token chosen before it. The first chosen token that differs is the answer's next token. So
drafts change the number of steps, never the answer.

==========================  ==============  =====================================================================
state                       only writer     fails safely because
==========================  ==============  =====================================================================
places of a conversation    ``Drafter``     a wrong place gives a wrong draft, which is not chosen
odds of a request's drafts  ``Drafter``     wrong odds cost rows, or steps
costs of a row and a step   ``StepCosts``   the same
drafts of a span            the plan        they end with its step: suspension, cancel or death leave none
pages of drafts             cache           they are free pages, and go back when the step is committed
valid KV (``filled``)       cache           at the plan it counts the newest token, at the commit accepted drafts
==========================  ==============  =====================================================================

Without drafts are requests with a grammar (a mask would depend on the drafts before it), beams, and models with two KV
groups (a recurrent state cannot go back behind a rejected draft): see ``Request.may_draft`` and ``Scheduler``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

import numpy as np

from pensieve.core import Floats, Ints, TokenArray

MOST_DRAFTS: Final = 16
"""Drafts of a request in one step."""
LONGEST_MATCH: Final = 16
"""Longer matches are as good as this."""
MOST_PLACES: Final = 8
"""Latest places that are compared, of those that are sorted and of those that are not."""
SORTED_AT_ONCE: Final = 64
"""With this many new tokens all places are sorted again. Fewer are entered one by one."""
SYNC_SHARE: Final = 0.1
"""Part of an overlapped engine's step that is lost when it has drafts, since the next one waits for it: about 0.3 to
1.2 ms of 10 ms."""
_GAP: Final = -1
"""Stands between texts: no token equals it."""
_HITS, _TRIES = 1.5, 2.0
"""Odds at the start, as if seen: optimistic, since only drafts that are tried teach anything."""
_BUCKETS: Final = (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5)
"""Bucket of the odds for each length of a match."""
_DECAY: Final = 0.98


class Drafter:
    """The places of one request's conversation, and the odds of its drafts. It sees tokens with a known id only."""

    def __init__(self, prompt_tokens: int, predicted: TokenArray) -> None:
        """``predicted``: what the answer may be, int32 [n]; empty: unknown."""
        gap = np.full(LONGEST_MATCH, _GAP, np.int32)
        self._text = np.concatenate([gap, predicted, gap])
        """Prediction and context between gaps, with spare room at the end."""
        self._first = self._length = len(self._text)
        self._answer = self._first + prompt_tokens
        """Place of the answer's first token."""
        self._predicted = predicted
        self._follows: int | None = 0 if len(predicted) else None
        """Tokens of the prediction that the answer began with; None: it began otherwise."""
        self._keys: Ints = np.empty(0, np.int64)
        """Each pair of neighbours up to the latest sort, ascending."""
        self._places: Ints = np.empty(0, np.int64)
        """Place of the second token of each pair in ``_keys``."""
        self._latest: defaultdict[int, list[int]] = defaultdict(list)
        """Places of the pairs since then, ascending."""
        self._match = 0
        """Length of the match behind the latest drafts."""
        self._hits, self._tries = [[start] * (_BUCKETS[-1] + 1) for start in (_HITS, _TRIES)]

    def propose(self, context: TokenArray, most: int, price: float) -> tuple[TokenArray, Floats]:
        """Return up to ``most`` drafts after ``context``, which begins like that of the call before, and the chance
        that each is accepted; int32 [n], float64 [n]. No chance is below ``price``."""
        self._take(context)
        text, end = self._text, self._length
        most = min(most, MOST_DRAFTS)
        if self._follows is not None and self._follows < len(self._predicted):
            self._match, drafts = LONGEST_MATCH, self._predicted[self._follows :][:most]
        else:
            self._match, place = self._find()
            # A match that overlaps its continuation is a loop, which goes on.
            drafts = text[place + 1 + np.arange(most) % (end - 1 - place)] if self._match else text[:0]
            gaps = np.flatnonzero(drafts == _GAP)
            drafts = drafts[: gaps[0]] if len(gaps) else drafts
        chance, chances = 1.0, []
        for depth in range(len(drafts)):
            bucket = _BUCKETS[min(self._match + depth, LONGEST_MATCH)]
            chance *= self._hits[bucket] / self._tries[bucket]
            if chance < price:
                break
            chances.append(chance)
        return drafts[: len(chances)].astype(np.int32), np.array(chances, np.float64)

    def learn(self, accepted: int, tested: int) -> None:
        """Take in what became of the latest drafts: the first ``accepted`` of ``tested`` were right."""
        for depth in range(min(accepted + 1, tested)):
            bucket = _BUCKETS[min(self._match + depth, LONGEST_MATCH)]
            self._tries[bucket] += 1
            self._hits[bucket] += depth < accepted

    def _take(self, context: TokenArray) -> None:
        """Append the tokens of ``context`` that are new, and enter their places."""
        new = context[self._length - self._first :]
        end = self._length + len(new)
        if end > len(self._text):
            self._text = np.concatenate([self._text, np.full(max(64, end // 2), _GAP, np.int32)])
        self._text[self._length : end] = new
        begin = self._length
        self._length = end
        if self._follows is not None:
            answer = self._text[self._answer : end]
            same = len(answer) <= len(self._predicted) and (answer == self._predicted[: len(answer)]).all()
            self._follows = len(answer) if same else None
        if len(self._keys) and len(new) < SORTED_AT_ONCE:
            for place in range(begin, end):
                self._latest[self._key(place)].append(place)
            return
        pairs = self._text[:end].astype(np.int64)
        keys = (pairs[:-1] << 32) | (pairs[1:] & 0xFFFFFFFF)
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], order + 1
        self._latest.clear()

    def _key(self, place: int) -> int:
        return (int(self._text[place - 1]) << 32) | int(self._text[place])

    def _find(self) -> tuple[int, int]:
        """Return the length of the longest match of the text's end among its latest places, and its last token's place;
        the latest of equals. (0, 0): the last two tokens are nowhere else."""
        text, end = self._text, self._length
        key = self._key(end - 1)
        low, high = np.searchsorted(self._keys, (key, key + 1)).tolist()
        found = self._places[max(low, high - MOST_PLACES) : high].tolist()
        found += self._latest.get(key, [])[-MOST_PLACES - 1 :]
        if found and found[-1] == end - 1:
            found.pop()
        if not found or key < 0 or text[end - 1] == _GAP:
            return 0, 0
        places = np.array(found)
        back = np.arange(LONGEST_MATCH)
        tail = text[end - 1 - back]
        same = (text[places[:, None] - back] == tail) & (tail != _GAP)
        lengths = np.where(same.all(axis=1), LONGEST_MATCH, same.argmin(axis=1))
        best = len(found) - 1 - int(lengths[::-1].argmax())
        return int(lengths[best]), found[best]


class StepCosts:
    """The seconds of a step by its rows, learnt from the engine's own steps that only decode."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        """Sums of 1, rows, seconds, rows squared, rows times seconds; older steps weigh less."""

    def on_step(self, rows: int, seconds: float) -> None:
        self._sums *= _DECAY
        self._sums += (1.0, rows, seconds, rows * rows, rows * seconds)

    def price(self, requests: int) -> float:
        """Return the least chance that a draft must have in a step of ``requests`` requests: (seconds per row) ÷ (step
        seconds ÷ requests). 0 while the costs are unknown: trying teaches them."""
        count, rows, seconds, squares, products = self._sums.tolist()
        spread = count * squares - rows * rows
        if seconds <= 0.0 or spread <= 1e-9 * max(1.0, count * squares):
            return 0.0
        per_row = (count * products - rows * seconds) / spread
        price = per_row * requests * count / seconds
        return max(price, 0.0) if math.isfinite(price) else 0.0
