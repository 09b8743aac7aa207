"""Which tokens' log-probabilities belong to which words of an answer that holds thoughts and calls too."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable

from pensieve.client import TokenLogprob
from pensieve.speech import Words

Scores = tuple[TokenLogprob, ...]


class TokenScores:
    """Takes the tokens of one answer as they come, and deals them out to its words, each once.

    Where words begin or end within a token, the token is theirs. Those of thoughts and calls are nobody's; those behind
    the last words, such as the token that ends the answer, are theirs.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._left: deque[tuple[int, int, TokenLogprob]] = deque()
        """Where a token begins and ends in the text, in characters, and its log-probabilities."""

    def push(self, scores: Iterable[TokenLogprob]) -> None:
        """Some more tokens."""
        for one in scores:
            begin = self._chars
            self._chars += len(self._decoder.decode(one.token.piece))
            self._left.append((begin, self._chars, one))

    def of(self, words: Words) -> Scores:
        """Those of these words; what lies before them goes to nobody."""
        first = words.end - len(words.text)
        found = []
        while self._left and self._left[0][0] < words.end:
            begin, end, one = self._left.popleft()
            if begin >= first or end > first:
                found.append(one)
        return tuple(found)

    def rest(self) -> Scores:
        """Those that are left, when no more words follow."""
        found = tuple(one for _, _, one in self._left)
        self._left.clear()
        return found
