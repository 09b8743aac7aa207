"""Log-probabilities in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pensieve.client import TokenLogprob, TokenText

LEAST: Final = -9999.0
"""What stands for anything below it: JSON has no minus infinity."""
MAX_TOP: Final = 20
"""Likeliest tokens that may be asked for."""


def token_scores(scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """One entry for each token. A control token has its name as text, and no bytes."""
    return [
        {
            **_score(one.token, one.logprob),
            "top_logprobs": [
                _score(text, logprob) for text, (_, logprob) in zip(one.top_tokens, one.top, strict=True)
            ],
        }
        for one in scores
    ]


def at_least(logprob: float) -> float:
    """The value as it is sent."""
    return max(logprob, LEAST)


def _score(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.piece), "logprob": at_least(logprob)}
