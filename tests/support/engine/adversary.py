"""Drafts from an adversary that knows the answer: right, wrong, half right, with ends and beyond limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from pensieve.engine.scheduling.request import Request

Answer = Callable[[Request, Sequence[int], int], Sequence[int]]
"""(request, its output so far, count): at most ``count`` next tokens of its answer."""


@dataclass
class Adversary:
    rng: random.Random
    answer: Answer
    vocabulary: int
    likely: Sequence[int] = ()
    """Tokens that wrong drafts often are, as the ends of answers."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let all requests get their drafts here."""
        patch.setattr(
            Request, "propose", lambda request, most, price: self.propose(request, min(most, 20), price)
        )

    def propose(self, request: Request, most: int, price: float) -> tuple[list[int], list[float]]:
        """See ``Request.propose``. Now and then there are none."""
        if self.rng.random() < 0.3:
            return [], []
        known = request.tokens[request.prompt_tokens : request.num_known].tolist()
        right = self.rng.choice((0, 1, most // 2, most))
        drafts = list(self.answer(request, known, right)) if right else []
        while len(drafts) < most and self.rng.random() < 0.8:
            pool = self.likely if self.likely and self.rng.random() < 0.3 else range(self.vocabulary)
            drafts.append(self.rng.choice(pool))
        return drafts[:most], [1.0] * len(drafts[:most])
