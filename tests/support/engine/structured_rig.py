"""An engine that follows grammars, and the answers that came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from llguidance import LLTokenizer

from pensieve.core import FinishReason, RequestKey, Sampling, pack_tokens
from pensieve.engine.engine import Engine
from pensieve.engine.grammar import Matchers, Prototypes, Structured
from pensieve.engine.messages import Event, Failed, Finished, Output, Submit
from pensieve.engine.plan import TokenMask


class LateMatchers(Matchers):
    """Masks that are late at random, although they are there."""

    def __init__(self, threads: int, rng: random.Random) -> None:
        super().__init__(threads)
        self.rng = rng
        self.lates = 0

    def collect(
        self, keys: Collection[RequestKey], *, others: bool, busy_s: float = 0.0
    ) -> dict[RequestKey, TokenMask]:
        found = super().collect(keys, others=others, busy_s=busy_s)
        kept = {key: mask for key, mask in found.items() if self.rng.random() < 0.7}
        self.lates += len(found) - len(kept)
        return kept


def make_structured(tokenizer: LLTokenizer, vocab: int, late: random.Random | None = None) -> Structured:
    """``late``: makes masks late at random."""
    made = Structured(Prototypes(lambda: tokenizer, vocab), threads=1)
    if late is not None:
        made.matchers = LateMatchers(1, late)
    return made


@dataclass
class Answers:
    """An engine's turns, as a client sees them."""

    engine: Engine
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By request and candidate."""
    ended: dict[int, FinishReason | str] = field(default_factory=dict)
    """Why each request ended, or the reason of its failure."""

    def submit(self, request: int, context: list[int], sampling: Sampling, session: str = "") -> None:
        command = Submit(request, session or f"s{request}", pack_tokens(context), len(context), sampling)
        self.take(self.engine.handle(command))

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self.outputs.setdefault((event.request, event.candidate), []).extend(event.token_ids)
            elif isinstance(event, Finished | Failed):
                self.ended[event.request] = event.reason

    def step(self) -> None:
        before = self.engine.stats().steps_total
        self.take(self.engine.step())
        self.engine.check()
        if self.engine.stats().steps_total == before:
            time.sleep(0.0005)  # a grammar is being compiled, or a mask is late

    def run(self) -> None:
        until = time.monotonic() + 60
        while self.engine.has_work:
            self.step()
            assert time.monotonic() < until, "stuck"
