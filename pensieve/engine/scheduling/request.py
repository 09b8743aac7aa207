"""One generation inside the engine: its tokens, which of them still need KV, and its receipt.

``Request`` is the only writer of its fields; every change is one of its methods. Its states:

========  ===========================================================  ==========================================
state     what it holds                                                events and the state after each
========  ===========================================================  ==========================================
waiting   a place in the queue                                         ``admit``: running
fork      nothing; ``source`` is the request that it branches off      ``on_branched``: running
running   ``in_batch``: a place in the batch; its chunks are pinned    ``suspend``: waiting. ``park``: fork.
                                                                       ``finish``: ending. ``leave_batch``: gone
ending    as running, and ``finished`` says why: the KV of its last    ``leave_batch``: gone
          token is still to be computed
========  ===========================================================  ==========================================

A request that finishes while it waits is gone at once. A cancelled request that waits or is a fork has no
event here: it is removed from the queue and the group.

``Scheduler`` and ``RunningSet`` call these events. While a request runs, the scheduler calls ``take_newest``,
``take_missing``, ``on_launched`` and ``on_sampled`` (or ``on_no_choice``) in each step. A driver (``engine.beams``)
decides how a guided request continues: between steps it calls ``continue_with`` and, with
``Scheduler.branch``, ``set_source``; at the end ``set_output``.
"""

from __future__ import annotations

import sys
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
    common_prefix,
    unpack_tokens,
)
from pensieve.engine.cache.chunk import Range, Restore, take_front, tokens_in
from pensieve.engine.cache.sharing import PrefixPath
from pensieve.engine.messages import Submit
from pensieve.engine.plan import PENDING, SampleSpec
from pensieve.engine.scheduling.drafts import Drafter, Odds

_SEEDS = 1 << 64


class Guesses(msgspec.Struct, frozen=True):
    """The output that a step with drafts expects of a request."""

    start: int
    """Position of the first guess: the request's tokens before it were known when the step was planned."""
    tokens: TokenArray
    """Guesses at the tokens that were pending, and then the drafts, int32 [n]."""
    drafts: TokenArray
    """The last of them, int32 [d], 1 ≤ d ≤ n."""
    match: int | None
    """Where they come from: see ``Drafter.match``."""


@dataclass(slots=True, eq=False)
class Group:
    """Requests that share the full chunks of one context; each has a tail of its own.

    The leader is an ordinary request. The others branch off when it is admitted, and the group is suspended
    together. Then the candidates of a turn run independently, and resume from a suspension one by one. ``guided``
    members continue when a driver has the results of all of them, so they run together or not at all.
    """

    leader: Request
    guided: bool
    members: list[Request]
    """Members that still generate, the leader first."""

    def in_batch(self) -> list[Request]:
        return [member for member in self.members if member.in_batch]

    def forks(self, source: Request) -> list[Request]:
        """Return the members that will branch off ``source``."""
        return [member for member in self.members if member.source is source]


@dataclass(slots=True, eq=False)
class Request:
    """A generation, from its submission to its last token.

    ``missing`` are the ranges of ``tokens`` without KV, ascending. A request is decoding when it lacks one
    token at the end of its context. With more it is being restored or prefilled; nothing else tells the two
    apart. A ``finished`` request still computes the KV of its last token, so that the next turn finds all of
    its history cached. It samples nothing more.
    """

    submit: Submit
    """The command, without its tokens."""
    arrival: int
    submitted: float
    tokens: TokenArray
    """Context and output so far, int32 [n]. Growing it leaves earlier slices valid."""
    warm: bool = False
    """This is a warm-up, not a turn: see ``scheduling.warming``."""
    candidate: int = 0
    key: RequestKey = field(init=False)
    session: SessionKey = field(init=False)
    sampling: Sampling = field(init=False)
    qos: TenantQos = field(init=False)
    prompt_tokens: int = field(init=False)
    full_length: int = field(init=False)
    """Length at which the limit of output tokens ends the generation; without a limit, more than any context has."""
    length: int = field(init=False)
    """Tokens in use; ``tokens`` may have spare room after them."""
    num_known: int = field(init=False)
    """Tokens with a known id. The others are ``PENDING``: sampled by steps that still run."""
    group: Group | None = None
    guided: bool = False
    """A driver chooses each token, from the log-probabilities of all members of the group."""
    awaits_logprobs: bool = False
    """Guided only: a launched step computes the log-probabilities after the newest token."""
    source: Request | None = None
    """Group member whose KV it takes over before any more of its own is computed."""
    path: PrefixPath | None = None
    """Addresses of its context, once looked up and until it is suspended or its context is replaced."""
    missing: deque[Range] = field(default_factory=deque)
    in_batch: bool = False
    finished: FinishReason | None = None
    receipt: Usage | None = None
    """Sources of its context at the first admission. Costs of later suspensions are not counted."""
    admitted: float | None = None
    restored: float | None = None
    """When all KV of the history was present."""
    first_token: float | None = None
    drafter: Drafter | None = None
    guesses: deque[Guesses] = field(default_factory=deque)
    """One for each launched step with drafts whose tokens are not known yet: at most two, and one while a plan is
    made."""
    drafted: int = 0
    """Drafts of its steps, and those that were accepted."""
    accepted: int = 0

    def __post_init__(self) -> None:
        self.key, self.session = RequestKey(self.submit.request), SessionKey(self.submit.session)
        self.sampling, self.qos = self.submit.sampling, self.submit.qos
        self.prompt_tokens = self.length = self.num_known = len(self.tokens)
        most = self.sampling.max_output_tokens
        self.full_length = sys.maxsize if most is None else self.prompt_tokens + max(most, 1)

    @classmethod
    def from_submit(cls, submit: Submit, arrival: int, now: float) -> Request:
        tokens = unpack_tokens(submit.tokens)
        return cls(msgspec.structs.replace(submit, tokens=b""), arrival, now, tokens)

    @classmethod
    def for_warm_up(cls, submit: Submit, arrival: int, now: float) -> Request:
        """Create a warm-up: it brings its context to the device and samples nothing."""
        made = cls.from_submit(submit, arrival, now)
        made.warm, made.finished = True, FinishReason.LENGTH
        return made

    def lead(self, size: int, *, guided: bool) -> None:
        """Make this the leader of a group of ``size``. The others branch off when it is admitted."""
        self.group, self.guided = Group(self, guided, [self]), guided
        for number in range(1, size):
            submit = msgspec.structs.replace(
                self.submit,
                request=-self.arrival - number,
                session=candidate_key(self.session, number),
                sampling=msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + number) % _SEEDS),
                hints=None,
            )
            # They may share the array: it has no spare room, so the first to grow gets a copy.
            fork = Request(submit, self.arrival + number, self.submitted, self.tokens, candidate=number)
            fork.group, fork.guided, fork.source = self.group, guided, self
            self.group.members.append(fork)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        return self.qos.tenant

    @property
    def scope(self) -> str:
        return self.submit.scope

    @property
    def hints(self) -> Hints | None:
        return self.submit.hints

    @property
    def queue_order(self) -> tuple[float, int]:
        """Sort key among its tenant's requests, first come, first served."""
        return self.submitted - HEAD_START_S * self.qos.priority, self.arrival

    @property
    def context(self) -> TokenArray:
        """All tokens so far, int32 [length]."""
        return self.tokens[: self.length]

    @property
    def cached_context(self) -> TokenArray:
        """The part of the context that its KV stands for, int32 [n]; the prompt, as long as it has a source."""
        return self.tokens[: self.length if self.source is None else self.prompt_tokens]

    @property
    def history(self) -> int:
        """Number of leading tokens from before this turn."""
        return self.prompt_tokens - self.submit.num_new

    @property
    def new_when_admitted(self) -> int:
        """Input tokens of its context; 0 after a suspension, when its own output counts as history."""
        return self.submit.num_new if self.receipt is None else 0

    def sample_spec(self, eos_token_ids: tuple[int, ...]) -> SampleSpec:
        """Return how to choose the token after the newest one, as far as a plan knows. It is late if it depends on a
        mask, on the id of a token that a step still computes, or on the number of accepted drafts."""
        sampling, index = self.sampling, self.output_tokens
        if sampling.plain or (sampling.grammar is None and not sampling.needs_context and not self.guesses):
            return SampleSpec(sampling, index, eos_token_ids)
        if sampling.grammar is not None or self.num_known < self.length:
            return SampleSpec(sampling, index, eos_token_ids, late=True)
        return SampleSpec(sampling, index, eos_token_ids, *self.sampling_context(index))

    def sampling_context(self, output_tokens: int) -> tuple[TokenArray | None, TokenArray | None]:
        """Return prompt and the first ``output_tokens`` of the output if the sampling depends on them, else
        (None, None)."""
        if not self.sampling.needs_context:
            return None, None
        assert self.prompt_tokens + output_tokens <= self.num_known
        return self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens :][:output_tokens]

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, pending ones included."""
        return self.length - self.prompt_tokens

    @property
    def num_missing(self) -> int:
        return tokens_in(self.missing)

    @property
    def waits_for_history(self) -> bool:
        return bool(self.missing) and self.missing[0][0] < self.history

    @property
    def decoding(self) -> bool:
        """Whether only the newest token needs KV, and that token is not input."""
        if len(self.missing) != 1 or self.length == self.prompt_tokens:
            return False
        start, end = self.missing[0]
        return end - start == 1

    @property
    def must_wait(self) -> bool:
        """Whether it must sit out this step: it is guided, and waits for the step that computes it, or for KV that its
        leader still restores."""
        return self.guided and (self.awaits_logprobs or self.waits_for_leader)

    @property
    def undecided(self) -> TokenArray | None:
        """The drafts of the step that runs, int32 [u], while a plan is made; None: it has none of this request."""
        return self.guesses[-1].drafts if self.guesses else None

    @property
    def latest_length(self) -> int:
        """``length`` if all undecided drafts are accepted, while a plan is made. Each draft that is accepted puts one
        more token before the pending one. Loops over all requests look at ``guesses`` first: the call takes 3 % of
        planning 256 requests (bench/results/drafts.md)."""
        return self.length + len(self.guesses[-1].drafts) if self.guesses else self.length

    @property
    def waits_for_leader(self) -> bool:
        """Whether another member of its group still has to compute what both begin with."""
        if self.group is None:
            return False
        if self.guided:  # the members of a suspended search branch off again, wherever they have got to
            leader = self.group.leader
            return self is not leader and bool(leader.missing) and not leader.decoding
        if self.output_tokens:
            return False
        first = next(member for member in self.group.members if member.in_batch)
        return first is not self and bool(first.missing) and not first.output_tokens

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
        """Return why the generation ends with ``token``, its newest known one; None when it continues."""
        sampling = self.sampling
        if sampling.grammar is not None and token in eos_token_ids:
            return FinishReason.EOS  # nothing comes after the end of a grammar, whatever else was asked for
        if self.num_known - self.prompt_tokens > sampling.min_output_tokens:
            if token in sampling.stop_token_ids:
                return FinishReason.STOP_TOKEN
            if token in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.EOS
        return self.limit_reason(self.num_known, context_limit)

    def limit_reason(self, length: int, context_limit: int) -> FinishReason | None:
        """Return why the context may not grow beyond ``length`` tokens, output included; None when it may."""
        if length >= self.full_length:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT_FULL if length >= context_limit else None

    @property
    def may_draft(self) -> bool:
        """Whether drafts may follow its newest token, once a plan computes that."""
        alone = self.group is None or (not self.guided and self.source is None and self.output_tokens > 0)
        return alone and self.finished is None and self.sampling.grammar is None

    def most_drafts(self, context_limit: int) -> int:
        """Return how many drafts may follow the newest token, so that a token can be chosen after each."""
        length = self.latest_length if self.guesses else self.length
        return max(min(context_limit, self.full_length) - length - 1, 0)

    def pages_as_fork(self, chunk_tokens: int) -> int:
        """Return the device pages that it does not share with its source. Its last token is never shared."""
        assert self.source is not None
        same = self.tokens is self.source.tokens
        common = self.length if same else common_prefix(self.source.context, self.context)
        shared = min(common, self.length - 1)
        return -(-self.length // chunk_tokens) - shared // chunk_tokens

    def usage(self, now: float) -> Usage:
        """Return the receipt as of now. Times: queue → restore (history present) → prefill → decode."""
        assert self.receipt is not None and self.admitted is not None
        first_token = self.first_token if self.first_token is not None else now
        restored = self.restored if self.restored is not None else first_token
        return msgspec.structs.replace(
            self.receipt,
            output_tokens=self.num_known - self.prompt_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            queue_s=self.admitted - self.submitted,
            restore_s=restored - self.admitted,
            prefill_s=first_token - restored,
            decode_s=now - first_token,
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def set_prefix_path(self, path: PrefixPath | None) -> None:
        self.path = path

    def admit(self, restore: Restore, now: float) -> None:
        """Enter the batch with its context laid out in the cache."""
        self.in_batch, self.missing = True, deque(restore.missing)
        if self.receipt is None:
            self.admitted = now
            if not restore.swapped_in and not self.waits_for_history:
                self.restored = now  # no history to restore
            found = restore.gpu_cached + restore.swapped_in
            self.receipt = Usage(
                context_tokens=self.prompt_tokens,
                new_tokens=self.prompt_tokens - found - restore.recomputed,
                gpu_cached_tokens=restore.gpu_cached,
                swapped_in_tokens=restore.swapped_in,
                recomputed_tokens=restore.recomputed,
            )

    def set_source(self, source: Request) -> None:
        """Take over the KV of ``source`` before the next token."""
        self.source = source

    def on_branched(self, missing: Sequence[Range]) -> None:
        """Enter the batch with the source's KV, which may still have to be computed, but for ``missing``: ascending
        ranges, the last of which goes on to the end of the context."""
        assert self.source is not None
        if self.receipt is None:
            self.admitted, self.receipt = self.source.admitted, self.source.receipt
        *before, (start, _) = missing
        self.source, self.in_batch, self.missing = None, True, deque([*before, (start, self.length)])

    def leave_source(self) -> None:
        """Go on alone: the source has gone. The fork waits, as after a suspension."""
        assert self.source is not None
        if self.receipt is None:
            self.admitted, self.receipt = self.source.admitted, self.source.receipt
        self.source = None

    def suspend(self) -> None:
        """Return to the queue. The next admission finds out which KV is missing."""
        self.in_batch, self.path, self.source = False, None, None
        self.missing.clear()

    def park(self, leader: Request) -> None:
        """Become a fork of the leader again, without KV: the group is suspended."""
        self.in_batch, self.source = False, leader
        self.missing.clear()

    def leave_batch(self) -> None:
        self.in_batch = False

    def take_over_missing(self, leaver: Request) -> None:
        """Take over the missing ranges that ``leaver`` was to compute for both."""
        start = self.missing[0][0]
        owed = [(low, min(high, start)) for low, high in leaver.missing if low < start]
        self.missing.extendleft(reversed(owed))

    # -- events of a step --------------------------------------------------------------------------------------------

    def take_newest(self) -> Range:
        """Remove the newest token of a decoding request from ``missing``; return its range."""
        return self.missing.popleft()

    def take_missing(self, budget: int) -> list[Range]:
        """Remove up to ``budget`` tokens from the front of ``missing``; return them as ranges.

        The hole of a dropped chunk and the new input after it are two ranges, and become two spans of one step.
        """
        return take_front(self.missing, budget)

    def on_launched(self) -> None:
        """Append a pending token, which a launched step samples. A guided request waits for its driver instead."""
        if self.guided:
            self.awaits_logprobs = True
            return
        if self.length == len(self.tokens):
            # Grow by half: appending stays cheap, and slices held by plans in flight stay valid.
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length // 2), np.int32)])
        self.tokens[self.length] = PENDING
        self.missing.append((self.length, self.length + 1))
        self.length += 1

    def on_no_choice(self) -> None:
        """Drop the newest pending token: the step that was to sample it chooses none."""
        assert self.num_known < self.length and self.missing[-1] == (self.length - 1, self.length)
        self.missing.pop()
        self.length -= 1

    def on_sampled(self, token: int, now: float) -> None:
        """Set the id of the oldest pending token. For a guided request only note that its step is done."""
        if self.first_token is None:
            self.first_token = now
        if self.guided:
            self.awaits_logprobs = False
            return
        self.tokens[self.num_known] = token
        self.num_known += 1

    def begin_drafts(self, odds: Odds) -> None:
        """Get ready to ``propose``. ``odds``: of the drafts of all answers."""
        self.drafter = Drafter(self.prompt_tokens, unpack_tokens(self.submit.predicted).tolist(), odds)

    def propose(self, most: int, price: float) -> tuple[list[int], list[float]]:
        """Return drafts after the known tokens, and their chances: see ``Drafter.propose``. If the newest token is
        pending, the first draft is a guess at it."""
        assert self.drafter is not None
        return self.drafter.propose(self.tokens[: self.num_known], most, price)

    def on_guessed(self, guesses: Guesses) -> None:
        """Record that a launched step has drafts."""
        self.guesses.append(guesses)

    def on_drafts(self, accepted: int) -> None:
        """Record that the oldest step with guesses accepted that many of its drafts."""
        guesses = self.guesses.popleft()
        self.drafted += len(guesses.drafts)
        self.accepted += accepted
        assert self.drafter is not None
        right = common_prefix(guesses.tokens, self.tokens[guesses.start : self.num_known])
        # The end of an answer does not show whether later guesses were right.
        tested = right if self.finished is not None else len(guesses.tokens)
        self.drafter.learn(guesses.match, right, tested)

    def history_present(self, now: float) -> None:
        self.restored = now

    def finish(self, reason: FinishReason) -> None:
        """End the generation with the newest known token, and discard any pending one."""
        self.finished = reason
        if self.num_known < self.length:
            self.length = self.num_known
            while self.missing and self.missing[-1][1] > self.length:
                self.missing.pop()

    # -- what a driver decides ---------------------------------------------------------------------------------------

    def continue_with(self, context: TokenArray, token: int) -> None:
        """Continue a guided request with ``token`` after ``context``, its own or another member's."""
        self.path = None  # it may have been looked up for another beam while this one waited
        self.tokens = np.append(context, np.int32(token))
        self.length = self.num_known = len(self.tokens)
        self.missing = deque([(self.length - 1, self.length)] if self.in_batch else [])

    def set_output(self, tokens: Sequence[int]) -> None:
        self.tokens = np.concatenate([self.tokens[: self.prompt_tokens], np.array(tokens, dtype=np.int32)])
        self.length = self.num_known = len(self.tokens)


def candidate_key(session: SessionKey, candidate: int) -> SessionKey:
    """Return the cache key of a candidate; the first one's is the session's own."""
    return SessionKey(f"{session}#{candidate}") if candidate else session


def session_of(key: SessionKey) -> SessionKey:
    return SessionKey(key.partition("#")[0])
