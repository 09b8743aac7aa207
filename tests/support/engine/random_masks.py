"""Masks of grammars that come when a random number says so, and forbid nothing: a worker need not know of them."""

from __future__ import annotations

import random
from collections.abc import Collection
from concurrent.futures import Future
from typing import cast

import numpy as np
from llguidance import LLMatcher

from pensieve.core import Grammar, RequestKey
from pensieve.engine.grammar import Matchers, Prototype, Prototypes, Structured
from pensieve.engine.plan import TokenMask

ANY = Grammar("")
MASK = np.full(1, -1, np.int32)


class _Prototypes(Prototypes):
    """Compiles nothing, at once or as soon as the next grammar is asked for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._late: list[Future[Prototype]] = []

    def prepare(self, grammar: Grammar) -> Future[Prototype]:
        made = Future[Prototype]()
        self._late.append(made)
        if self._rng.random() < 0.7:
            self.finish()
        return made

    def finish(self) -> None:
        """Compile all that was asked for."""
        for made in self._late:
            made.set_result(Prototype(cast(LLMatcher, None), MASK))
        self._late.clear()

    def close(self) -> None:
        """Nothing runs."""


class _Matchers(Matchers):
    """Whether a mask is there, or an answer cannot go on, is drawn each time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0)
        self._rng = rng
        self._ready = rng.choice((0.5, 0.8))
        self._pushed: dict[RequestKey, int] = {}
        self.late = 0

    def begin(self, key: RequestKey, prototype: Prototype) -> None:
        self._pushed[key] = 0

    def push(self, key: RequestKey, token: int) -> None:
        if key in self._pushed:
            self._pushed[key] += 1

    def drop(self, key: RequestKey) -> None:
        self._pushed.pop(key, None)

    def is_expected(self, key: RequestKey, output_index: int) -> bool:
        known = self._pushed.get(key, output_index)
        assert 0 <= output_index - known <= 1, (
            f"request {key}: {known} tokens are known, {output_index} is next"
        )
        return not known or self._rng.random() < self._ready

    def collect(
        self, keys: Collection[RequestKey], *, others: bool, busy_s: float = 0.0
    ) -> dict[RequestKey, TokenMask]:
        found = {key: MASK for key in keys if key in self._pushed and self._rng.random() < self._ready}
        self.late += len(keys) - len(found)
        return found

    def problems(self) -> list[tuple[RequestKey, str]]:
        return [(key, "bad luck") for key in self._pushed if self._rng.random() < 0.002]


class RandomMasks(Structured):
    def __init__(self, rng: random.Random) -> None:
        prototypes = _Prototypes(rng)
        super().__init__(prototypes, 0)
        self._random = self.matchers = _Matchers(rng)
        self.finish = prototypes.finish

    @property
    def late(self) -> int:
        """Masks that were wanted and not there."""
        return self._random.late
