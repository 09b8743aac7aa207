"""One generation inside the engine: its tokens, which of them still need KV, and its receipt."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pensieve.core import (
    ALONE,
    HEAD_START_S,
    FinishReason,
    Hints,
    Phase,
    RequestKey,
    Sampling,
    SessionKey,
    Standing,
    TokenArray,
    Usage,
)
from pensieve.engine.cache.chunk import Range, Restore, take_front, tokens_in
from pensieve.engine.cache.sharing import Path
from pensieve.engine.plan import PENDING


@dataclass(slots=True, eq=False)
class Request:
    """A generation, from its submission to its last token. Only ``Scheduler`` changes it.

    ``missing`` are the ranges of ``tokens`` without KV, ascending. A request with one missing token at the end of its
    context is decoding; one with more is being restored or prefilled; there is no other difference between the two.
    A request that is ``finished`` still computes the KV of its last token, so that the next turn finds all of its
    history cached; it samples nothing more.
    """

    key: RequestKey
    session: SessionKey
    arrival: int
    """Ticket: first come, first served."""
    tokens: TokenArray
    """Context and output so far, int32 [n]; grown in place (earlier slices stay true)."""
    prompt_tokens: int
    num_new: int
    sampling: Sampling
    submitted: float
    scope: str = ""
    """Within which its session shares KV."""
    hints: Hints | None = None
    """What its turn says of the next one."""
    standing: Standing = ALONE
    warm: bool = False
    """It is no turn, but warms its session: see ``engine.warm_ups``."""
    path: Path | None = None
    """The addresses of its context, once asked for and until it is suspended."""
    candidate: int = 0
    """Its number in its group."""
    missing: deque[Range] = field(default_factory=deque)
    in_batch: bool = False
    """Admitted, and not suspended or gone since."""
    finished: FinishReason | None = None
    receipt: Usage | None = None
    """Where its context came from at the first admission; what a suspension costs later is not counted there."""
    admitted: float | None = None
    restored: float | None = None
    """When the last history token was present."""
    first_token: float | None = None
    is_beam: bool = field(init=False)
    """It goes on when all beams of its search have said how."""
    length: int = 0
    """Tokens in use; ``tokens`` has spare room behind them."""
    settled: int = 0
    """How many of them have a known id. The others are ``PENDING``: sampled by steps that still run."""

    def __post_init__(self) -> None:
        self.length = self.settled = len(self.tokens)
        self.is_beam = self.sampling.beam_width > 1

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.standing.tenant

    @property
    def place(self) -> tuple[float, int]:
        """Its place among the requests of its tenant, first come, first served."""
        return self.submitted - HEAD_START_S * self.standing.priority, self.arrival

    @property
    def context(self) -> TokenArray:
        """All tokens so far, int32 [length]."""
        return self.tokens[: self.length]

    @property
    def history(self) -> int:
        """How many leading tokens were there before this turn."""
        return self.prompt_tokens - self.num_new

    @property
    def looked_at(self) -> tuple[TokenArray | None, TokenArray | None]:
        """Prompt and output so far, for sampling that looks at them; None and None for any other."""
        if not self.sampling.needs_context:
            return None, None
        return self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens : self.length]

    @property
    def output_tokens(self) -> int:
        """Output so far, pending tokens included."""
        return self.length - self.prompt_tokens

    @property
    def pending(self) -> bool:
        """Whether its newest token is still being sampled."""
        return self.settled < self.length

    @property
    def num_missing(self) -> int:
        return tokens_in(self.missing)

    @property
    def waits_for_history(self) -> bool:
        """Whether KV of its history is still missing."""
        return bool(self.missing) and self.missing[0][0] < self.history

    @property
    def decoding(self) -> bool:
        """Whether exactly the newest token needs KV, and that is not input."""
        if len(self.missing) != 1 or self.length == self.prompt_tokens:
            return False
        start, end = self.missing[0]
        return end - start == 1

    @property
    def phase(self) -> Phase:
        if self.admitted is None:
            return Phase.QUEUED
        if self.decoding:
            return Phase.DECODE
        return Phase.RESTORING if self.waits_for_history else Phase.PREFILL

    def expect(self) -> None:
        """Append one more output token, whose id is not known yet and whose KV is missing."""
        if self.length == len(self.tokens):
            # By half as much again: appending stays cheap, and slices that plans in flight hold are left alone.
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length // 2), np.int32)])
        self.tokens[self.length] = PENDING
        self.missing.append((self.length, self.length + 1))
        self.length += 1

    def settle(self, token: int) -> None:
        """The oldest pending token is known now: ``token``."""
        self.tokens[self.settled] = token
        self.settled += 1

    def finish(self, reason: FinishReason) -> None:
        """The newest known token was the last; one that is pending behind it will never be."""
        self.finished = reason
        if self.pending:
            self.length = self.settled
            while self.missing and self.missing[-1][1] > self.length:
                self.missing.pop()

    def take_missing(self, budget: int) -> list[Range]:
        """Remove up to ``budget`` tokens from the front of ``missing``; returns the ranges that they form.

        A hole that a dropped chunk left and the new input behind it are two ranges, and become two spans of one step.
        """
        return take_front(self.missing, budget)

    def go_on_from(self, context: TokenArray, token: int) -> None:
        """A beam continues with ``token`` after ``context``; what it was before is nothing any more."""
        self.tokens = np.append(context, np.int32(token))
        self.length = self.settled = len(self.tokens)
        self.missing = deque([(self.length - 1, self.length)]) if self.in_batch else deque()

    def answer(self, tokens: Sequence[int]) -> None:
        """The output is ``tokens``, all of it."""
        self.tokens = np.concatenate([self.tokens[: self.prompt_tokens], np.array(tokens, dtype=np.int32)])
        self.length = self.settled = len(self.tokens)

    def admit(self, restore: Restore, now: float) -> bool:
        """Its context is laid out. Returns whether that was the first time, not a return from suspension."""
        self.missing = deque(restore.missing)
        first = self.receipt is None
        if first:
            self.admitted = now
            if not restore.swapped_in and not self.waits_for_history:
                self.restored = now  # nothing to bring back
            found = restore.gpu_cached + restore.swapped_in
            self.receipt = Usage(
                context_tokens=self.prompt_tokens,
                new_tokens=self.prompt_tokens - found - restore.recomputed,
                gpu_cached_tokens=restore.gpu_cached,
                swapped_in_tokens=restore.swapped_in,
                recomputed_tokens=restore.recomputed,
            )
        return first

    def usage(self, now: float) -> Usage:
        """The receipt with what is known now. Times: queue → restore (history present) → prefill → decode."""
        assert self.receipt is not None and self.admitted is not None
        first_token = self.first_token if self.first_token is not None else now
        restored = self.restored if self.restored is not None else first_token
        return msgspec.structs.replace(
            self.receipt,
            output_tokens=self.settled - self.prompt_tokens,
            queue_s=self.admitted - self.submitted,
            restore_s=restored - self.admitted,
            prefill_s=first_token - restored,
            decode_s=now - first_token,
        )
