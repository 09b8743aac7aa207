"""One generation inside the engine: its tokens, what of them still needs KV, and its receipt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pensieve.core import FinishReason, Phase, RequestKey, Sampling, SessionKey, TokenArray, Usage
from pensieve.engine.cache.chunk import Range, Restore
from pensieve.engine.plan import PENDING


@dataclass(slots=True, eq=False)
class Request:
    """Changed by ``Scheduler`` only.

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
    missing: deque[Range] = field(default_factory=deque)
    in_batch: bool = False
    """Admitted, and not suspended or gone since."""
    finished: FinishReason | None = None
    receipt: Usage | None = None
    """Of the first admission: what a later suspension costs is not part of the turn's context."""
    admitted: float | None = None
    restored: float | None = None
    """When the last history token was present."""
    first_token: float | None = None
    length: int = 0
    """Tokens in use; ``tokens`` has spare room behind them."""
    settled: int = 0
    """How many of them have a known id. The others are ``PENDING``: sampled by steps that still run."""

    def __post_init__(self) -> None:
        self.length = self.settled = len(self.tokens)

    @property
    def context(self) -> TokenArray:
        """All tokens so far, int32 [length]."""
        return self.tokens[: self.length]

    @property
    def output_tokens(self) -> int:
        """Output so far, pending tokens included."""
        return self.length - self.prompt_tokens

    @property
    def pending(self) -> bool:
        """Its newest token is still being sampled."""
        return self.settled < self.length

    @property
    def num_missing(self) -> int:
        return sum(end - start for start, end in self.missing)

    @property
    def decoding(self) -> bool:
        """Exactly the newest token needs KV, and it is not input."""
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
        history = self.prompt_tokens - self.num_new
        waits_for_history = bool(self.missing) and self.missing[0][0] < history
        return Phase.RESTORING if waits_for_history else Phase.PREFILL

    def expect(self) -> None:
        """One more output token, its id still unknown; its KV is missing."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length // 2), np.int32)])
        self.tokens[self.length] = PENDING
        self.missing.append((self.length, self.length + 1))
        self.length += 1

    def settle(self, token: int) -> None:
        """The oldest pending token is known now."""
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
        """Remove up to ``budget`` tokens from the front of ``missing``; the ranges they form."""
        taken: list[Range] = []
        while budget > 0 and self.missing:
            start, end = self.missing.popleft()
            cut = min(end, start + budget)
            taken.append((start, cut))
            budget -= cut - start
            if cut < end:
                self.missing.appendleft((cut, end))
        return taken

    def admit(self, restore: Restore, now: float) -> bool:
        """Its context is laid out. Returns whether this was the first time (not a return from suspension)."""
        self.missing = deque(restore.missing)
        first = self.receipt is None
        if first:
            self.admitted = now
            history = self.prompt_tokens - self.num_new
            if not restore.swapped_in and not (self.missing and self.missing[0][0] < history):
                self.restored = now  # nothing to bring back
            self.receipt = Usage(
                context_tokens=self.prompt_tokens,
                new_tokens=self.num_new,
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
        return Usage(
            context_tokens=self.receipt.context_tokens,
            new_tokens=self.receipt.new_tokens,
            gpu_cached_tokens=self.receipt.gpu_cached_tokens,
            swapped_in_tokens=self.receipt.swapped_in_tokens,
            recomputed_tokens=self.receipt.recomputed_tokens,
            output_tokens=self.output_tokens,
            queue_s=self.admitted - self.submitted,
            restore_s=restored - self.admitted,
            prefill_s=first_token - restored,
            decode_s=now - first_token,
        )
