"""Log-probabilities as completions have them: four lists side by side."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from pensieve.client import TokenLogprob, TokenText
from pensieve.http.common.logprobs import at_least


class ScoreLists:
    """Makes the lists of one answer, which may come in parts."""

    def __init__(self, offset: int = 0) -> None:
        """``offset``: where the answer begins in the text, in characters."""
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, scores: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists of the next tokens. An offset is that of the character that a token begins or goes on with."""
        offsets, tokens, values, tops = [], [], [], []
        for one in scores:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(one.token.piece))
            tokens.append(_name(one.token))
            values.append(at_least(one.logprob))
            tops.append(_top(one))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _top(one: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the one that was drawn, by their texts; of two with one text, the likelier."""
    found: dict[str, float] = {}
    for text, (_, logprob) in zip(one.top_tokens, one.top, strict=True):
        found.setdefault(_name(text), at_least(logprob))
    found.setdefault(_name(one.token), at_least(one.logprob))
    return found


def _name(token: TokenText) -> str:
    """As OpenAI writes it: a token that is no whole characters begins with ``bytes:``."""
    try:
        return token.name or token.piece.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.text}"
