"""One generation inside the engine: its tokens, which of them still need KV, and its receipt.

``Request`` is the only writer of its fields; every change is one of its methods. Its states:

========  ===========================================================  ==========================================
state     what it holds                                                events and the state after each
========  ===========================================================  ==========================================
waiting   a place in the queue                                         ``admit``: running
fork      nothing; ``source`` is the request that it branches off      ``branched``: running
running   ``in_batch``: a place in the batch; its chunks are pinned    ``suspend``: waiting. ``park``: fork.
                                                                       ``finish``: ending. ``leave``: gone
ending    as running, and ``finished`` says why: the KV of its last    ``leave``: gone
          token is still to be computed
========  ===========================================================  ==========================================

A request that finishes while it waits is gone at once. Those that leave the queue or stop being forks without running
(a cancel) have no event here: the queue and the group let them go.

``Scheduler`` and ``RunningSet`` call these events. While a request runs, the scheduler calls ``take_newest``,
``take_missing``, ``launched`` and ``settle`` in each step. Of a guided request a driver (``engine.beams``) says how it
goes on: between steps it calls ``go_on`` and, with ``Scheduler.branch``, ``branch_off``; at the end ``answer``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pensieve.core import (
    HEAD_START_S,
    FinishReason,
    Hints,
    Phase,
    RequestKey,
    Sampling,
    SessionKey,
    TenantQos,
    TokenArray,
    Usage,
    unpack_tokens,
)
from pensieve.engine.cache.chunk import Range, Restore, common_prefix, take_front, tokens_in
from pensieve.engine.cache.sharing import PrefixPath
from pensieve.engine.messages import Submit
from pensieve.engine.plan import PENDING

_SEEDS = 1 << 64


@dataclass(slots=True, eq=False)
class Group:
    """Requests that share the full chunks of one context; each has a tail of its own.

    The leader is an ordinary request. The others branch off when it is admitted, and the group is suspended together.
    The candidates of a turn go on by themselves from there, and come back from a suspension one by one. ``guided``
    members go on when a driver has seen what all of them found, so they run together or not at all.
    """

    leader: Request
    guided: bool
    members: list[Request]
    """Those that are wanted, the leader first."""

    def in_batch(self) -> list[Request]:
        """Those that run."""
        return [member for member in self.members if member.in_batch]

    def forks(self, source: Request) -> list[Request]:
        """Those that are to branch off ``source``."""
        return [member for member in self.members if member.source is source]


@dataclass(slots=True, eq=False)
class Request:
    """A generation, from its submission to its last token.

    ``missing`` are the ranges of ``tokens`` without KV, ascending. A request with one missing token at the end of its
    context is decoding; one with more is being restored or prefilled; there is no other difference between the two.
    A request that is ``finished`` still computes the KV of its last token, so that the next turn finds all of its
    history cached; it samples nothing more.
    """

    submit: Submit
    """What was asked for, without the tokens."""
    arrival: int
    """Ticket: first come, first served."""
    submitted: float
    tokens: TokenArray
    """Context and output so far, int32 [n]; grown in place (earlier slices stay true)."""
    warm: bool = False
    """It is no turn, but warms its session: see ``scheduling.warming``."""
    candidate: int = 0
    """Its number in its group."""
    key: RequestKey = field(init=False)
    session: SessionKey = field(init=False)
    sampling: Sampling = field(init=False)
    qos: TenantQos = field(init=False)
    prompt_tokens: int = field(init=False)
    length: int = field(init=False)
    """Tokens in use; ``tokens`` may have spare room behind them."""
    num_known: int = field(init=False)
    """How many of them have a known id. The others are ``PENDING``: sampled by steps that still run."""
    group: Group | None = None
    guided: bool = False
    """A driver chooses each of its tokens, from the log-probabilities of all members of its group."""
    awaits_logprobs: bool = False
    """Guided only: a launched step computes the log-probabilities after its newest token."""
    source: Request | None = None
    """The member of its group whose KV it takes over before anything else of it is computed."""
    path: PrefixPath | None = None
    """The addresses of its context, once asked for and until it is suspended."""
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

    def __post_init__(self) -> None:
        self.key, self.session = RequestKey(self.submit.request), SessionKey(self.submit.session)
        self.sampling, self.qos = self.submit.sampling, self.submit.qos
        self.prompt_tokens = self.length = self.num_known = len(self.tokens)

    @classmethod
    def from_submit(cls, submit: Submit, arrival: int, now: float) -> Request:
        """A request for what was submitted."""
        tokens = unpack_tokens(submit.tokens)
        return cls(msgspec.structs.replace(submit, tokens=b""), arrival, now, tokens)

    @classmethod
    def for_warm_up(cls, submit: Submit, arrival: int, now: float) -> Request:
        """A request that brings its context to the device and samples nothing."""
        made = cls.from_submit(submit, arrival, now)
        made.warm, made.finished = True, FinishReason.LENGTH
        return made

    def lead(self, size: int, *, guided: bool) -> None:
        """Become the first of a group of ``size``. The others branch off when this one is admitted."""
        self.group, self.guided = Group(self, guided, [self]), guided
        for number in range(1, size):
            submit = msgspec.structs.replace(
                self.submit,
                request=-self.arrival - number,
                session=candidate_key(self.session, number),
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + number) % _SEEDS),
                hints=None,
            )
            # They may share the array: it has no room to spare, so whichever grows first gets another.
            fork = Request(submit, self.arrival + number, self.submitted, self.tokens, candidate=number)
            fork.group, fork.guided, fork.source = self.group, guided, self
            self.group.members.append(fork)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        return self.qos.tenant

    @property
    def scope(self) -> str:
        """Within which its session shares KV."""
        return self.submit.scope

    @property
    def hints(self) -> Hints | None:
        """What its turn says of the next one."""
        return self.submit.hints

    @property
    def queue_order(self) -> tuple[float, int]:
        """Its place among the requests of its tenant, first come, first served."""
        return self.submitted - HEAD_START_S * self.qos.priority, self.arrival

    @property
    def context(self) -> TokenArray:
        """All tokens so far, int32 [length]."""
        return self.tokens[: self.length]

    @property
    def cached_context(self) -> TokenArray:
        """The part of the context that its KV stands for, int32 [n]: before it takes over another's, the prompt."""
        return self.tokens[: self.length if self.source is None else self.prompt_tokens]

    @property
    def history(self) -> int:
        """How many leading tokens were there before this turn."""
        return self.prompt_tokens - self.submit.num_new

    @property
    def new_when_admitted(self) -> int:
        """How many tokens of its context are input; after a suspension none, and its own output is history."""
        return self.submit.num_new if self.receipt is None else 0

    @property
    def sampling_context(self) -> tuple[TokenArray | None, TokenArray | None]:
        """Prompt and output so far, for sampling that looks at them; None and None for any other."""
        if not self.sampling.needs_context:
            return None, None
        return self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens : self.length]

    @property
    def output_tokens(self) -> int:
        """Output so far, pending tokens included."""
        return self.length - self.prompt_tokens

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
    def must_wait(self) -> bool:
        """Whether it cannot go on yet: its sampling looks at its own output, whose newest token is not known.

        A guided request waits for the step that computes it, and for what its leader still restores for all.
        """
        if self.guided:
            assert self.group is not None
            leader = self.group.leader
            return self.awaits_logprobs or (
                self is not leader and bool(leader.missing) and not leader.decoding
            )
        return self.num_known < self.length and self.sampling.needs_context

    @property
    def phase(self) -> Phase:
        if self.admitted is None:
            return Phase.QUEUED
        if self.decoding:
            return Phase.DECODE
        return Phase.RESTORING if self.waits_for_history else Phase.PREFILL

    def end_reason(
        self, token: int, context_limit: int, eos_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        """Why the generation ends with ``token``, its newest known one; None when it goes on."""
        sampling = self.sampling
        if self.num_known - self.prompt_tokens > sampling.min_output_tokens:
            if token in sampling.stop_token_ids:
                return FinishReason.STOP_TOKEN
            if token in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.EOS
        return self.limit_reason(self.num_known, context_limit)

    def limit_reason(self, length: int, context_limit: int) -> FinishReason | None:
        """Why the context may not grow beyond ``length`` tokens, output included; None when it may."""
        most = self.sampling.max_output_tokens
        if most is not None and length - self.prompt_tokens >= max(most, 1):
            return FinishReason.LENGTH
        return FinishReason.CONTEXT_FULL if length >= context_limit else None

    def pages_as_fork(self, chunk_tokens: int) -> int:
        """Device pages that it takes beside those that it shares with its source; its last token is its own."""
        assert self.source is not None
        same = self.tokens is self.source.tokens
        common = self.length if same else common_prefix(self.source.context, self.context)
        shared = min(common, self.length - 1)
        return -(-self.length // chunk_tokens) - shared // chunk_tokens

    def usage(self, now: float) -> Usage:
        """The receipt with what is known now. Times: queue → restore (history present) → prefill → decode."""
        assert self.receipt is not None and self.admitted is not None
        first_token = self.first_token if self.first_token is not None else now
        restored = self.restored if self.restored is not None else first_token
        return msgspec.structs.replace(
            self.receipt,
            output_tokens=self.num_known - self.prompt_tokens,
            queue_s=self.admitted - self.submitted,
            restore_s=restored - self.admitted,
            prefill_s=first_token - restored,
            decode_s=now - first_token,
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def set_prefix_path(self, path: PrefixPath | None) -> None:
        """The cache has looked up the addresses of its context."""
        self.path = path

    def admit(self, restore: Restore, now: float) -> None:
        """Its context is laid out."""
        self.in_batch, self.missing = True, deque(restore.missing)
        if self.receipt is None:
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

    def set_source(self, source: Request) -> None:
        """Before its next token it takes over the KV of ``source``."""
        self.source = source

    def on_branched(self, start: int) -> None:
        """It has the KV of its source up to ``start``, or will have once that is computed."""
        assert self.source is not None
        if self.receipt is None:
            self.admitted, self.receipt = self.source.admitted, self.source.receipt
        self.source, self.in_batch, self.missing = None, True, deque([(start, self.length)])

    def suspend(self) -> None:
        """It goes back into the queue; what it lacks is found out when it returns."""
        self.in_batch, self.path, self.source = False, None, None
        self.missing.clear()

    def park(self, leader: Request) -> None:
        """Its group is suspended: it gives up its KV and branches off the leader again when that returns."""
        self.in_batch, self.source = False, leader
        self.missing.clear()

    def leave_batch(self) -> None:
        """It is out of the batch for good."""
        self.in_batch = False

    def take_over_missing(self, leaver: Request) -> None:
        """Compute what ``leaver`` had still to compute for both."""
        start = self.missing[0][0]
        owed = [(low, min(high, start)) for low, high in leaver.missing if low < start]
        self.missing.extendleft(reversed(owed))

    # -- events of a step --------------------------------------------------------------------------------------------

    def take_newest(self) -> Range:
        """Remove the newest token of a request that decodes from ``missing``; returns its range."""
        return self.missing.popleft()

    def take_missing(self, budget: int) -> list[Range]:
        """Remove up to ``budget`` tokens from the front of ``missing``; returns the ranges that they form.

        A hole that a dropped chunk left and the new input behind it are two ranges, and become two spans of one step.
        """
        return take_front(self.missing, budget)

    def on_launched(self) -> None:
        """A step that samples its next token has begun: append one whose id is not known yet and whose KV is missing.

        A guided request waits for its driver.
        """
        if self.guided:
            self.awaits_logprobs = True
            return
        if self.length == len(self.tokens):
            # By half as much again: appending stays cheap, and slices that plans in flight hold are left alone.
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length // 2), np.int32)])
        self.tokens[self.length] = PENDING
        self.missing.append((self.length, self.length + 1))
        self.length += 1

    def on_sampled(self, token: int, now: float) -> None:
        """The oldest pending token is known now: ``token``. Of a guided request that says nothing yet."""
        if self.first_token is None:
            self.first_token = now
        if self.guided:
            self.awaits_logprobs = False
            return
        self.tokens[self.num_known] = token
        self.num_known += 1

    def history_present(self, now: float) -> None:
        """KV of all of its history is there."""
        self.restored = now

    def finish(self, reason: FinishReason) -> None:
        """The newest known token was the last; one that is pending behind it will never be."""
        self.finished = reason
        if self.num_known < self.length:
            self.length = self.num_known
            while self.missing and self.missing[-1][1] > self.length:
                self.missing.pop()

    # -- what a driver decides ---------------------------------------------------------------------------------------

    def continue_with(self, context: TokenArray, token: int) -> None:
        """A guided request continues with ``token`` after ``context``, its own or another one's."""
        self.tokens = np.append(context, np.int32(token))
        self.length = self.num_known = len(self.tokens)
        self.missing = deque([(self.length - 1, self.length)] if self.in_batch else [])

    def set_output(self, tokens: Sequence[int]) -> None:
        """The output is ``tokens``, all of it."""
        self.tokens = np.concatenate([self.tokens[: self.prompt_tokens], np.array(tokens, dtype=np.int32)])
        self.length = self.num_known = len(self.tokens)


def candidate_key(session: SessionKey, candidate: int) -> SessionKey:
    """The key under which the cache has a candidate; the first one's is the session's own."""
    return SessionKey(f"{session}#{candidate}") if candidate else session


def session_of(key: SessionKey) -> SessionKey:
    """The session whose candidate has its KV under ``key``."""
    return SessionKey(key.partition("#")[0])
