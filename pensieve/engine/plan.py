"""Plan and result of one step: frozen values that the scheduler makes and the worker executes. No torch.

Every worker keeps this order inside a step, which makes reuse of a page within one plan safe:

1. ``swap_out``: device pages are read into host pages;
2. ``copies``: device pages are read into other device pages (copy on write, or a page that moves); all sources
   are read before any target is written, in both groups;
3. ``swap_in``: host pages are read into device pages, layer by layer, each layer before its attention or state;
4. the model runs over the concatenated spans; in each layer all KV of the step is written before attention
   reads, and each chain reads its state before it writes one;
5. the token after each span with a ``sample`` is chosen, and those after its drafts;
6. the pages of ``checks`` are read.

A device page freed by 1 may be the target of 2, 3 or 4 of the same plan. So may the source of a copy in 2, whose
slice has moved, or was evicted once the copy was planned. So bytes freed by 1 or 2 may belong to a page of the other KV
group (``pensieve.model.groups``) from 3 on, and a target of 2 may lie in bytes that a copy of the other group
reads. A host page is never both written by 1 and read by 3 of one plan, and the bytes of a host page that 1
writes are not read by 3 as a page of the other group.

Page tables and copies use the page numbers that the plan ends with: a page that moves stands under its new
number in the tables, the chains and ``swap_in`` of its plan, and under its old one in ``swap_out``.

Plans take effect in the order of their launches, as if each had ended before the next began. So the scheduler
may make the next plan while this one runs, and reuse a page as soon as the plan that still needs it is
launched. Making it look so (streams, events) is the worker's job alone.

Values that a step has one of for each request are msgspec structs: a frozen dataclass takes more than ten times as long
to make (bench/results/hybrid.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pensieve.core import RequestKey, Sampling, TokenArray, TokenLogprob, common_prefix

TokenMask = npt.NDArray[np.int32]
"""Tokens that may be chosen, int32 [(vocabulary + 31) // 32]: bit ``t % 32`` of word ``t // 32`` stands for token t."""

PageTable = npt.NDArray[np.int32]
"""Device page of each chunk of a context, int32 [chunks]."""

NO_PAGE = -1
"""Stands for a page that does not exist: see ``Chain``."""

PENDING = -1
"""Stands for the token that this request samples in the plan launched just before: the last of a span, or the last
before its drafts. See ``Span.undecided`` for which token that is when the plan before has drafts of the request."""


class SampleSpec(msgspec.Struct, frozen=True):
    """How to choose the token that follows a span."""

    sampling: Sampling
    output_index: int
    """Index of the chosen token in the request's output: the counter of the random stream."""
    eos_token_ids: tuple[int, ...] = ()
    """Banned while ``output_index < min_output_tokens``, with ``sampling.stop_token_ids``."""
    prompt: TokenArray | None = None
    """Context before the generation, int32 [n]; only when ``sampling.needs_context``."""
    output: TokenArray | None = None
    """Output so far, int32 [output_index]; only when ``sampling.needs_context``."""
    mask: TokenMask | None = None
    """Tokens that the grammar allows here; only with ``sampling.grammar``."""
    late: bool = False
    """The choice depends on a token or a mask that is not known at the launch: ``PendingStep.choose`` brings it."""

    def after(self, drafts: TokenArray) -> SampleSpec:
        """Return how to choose the token that follows ``drafts``, if they are the output from here on."""
        if not len(drafts):
            return self
        output = None if self.output is None else np.concatenate([self.output, drafts])
        return msgspec.structs.replace(self, output_index=self.output_index + len(drafts), output=output)


class Span(msgspec.Struct, frozen=True):
    """Consecutive input tokens of one request at a known position (the paper's sub-request, EuroSys §4.3.4)."""

    request: RequestKey
    start: int
    """Position of the first token in the context."""
    tokens: TokenArray
    """Input token ids [q], q ≥ 1, drafts included; the last that is no draft may be ``PENDING``."""
    page_table: int
    """Index into ``Plan.page_tables``; page ``i`` holds positions ``[i * page_tokens, (i + 1) * page_tokens)``."""
    sample: SampleSpec | None = None
    """How to choose the token after the last one that is no draft; None: sample none."""
    stores: int = 3
    """Bit g is set when the span's keys and values are written in group g. A group whose bit is not set holds them
    already, and keeps them untouched; its pages must be in the group's table nevertheless."""
    drafts: int = 0
    """The last ``tokens`` that are drafts, guesses of the output. The step chooses a token before each of them, as
    ``sample`` says, and one more after the last. Only those count whose drafts before them were all chosen."""
    undecided: TokenArray | None = None
    """Drafts of the request in the plan launched just before, int32 [u], u ≥ 1, if they are not known to be accepted;
    None: there are none. If that plan accepts ``a`` of them, this span starts ``a`` positions later, its first token is
    the one chosen after them, and the output indices of ``sample`` are ``a`` higher. The page table covers all ``u``.
    See ``decided``."""

    @property
    def end(self) -> int:
        """Position after the last token, which is the number of KV-tokens that the last token sees. With ``undecided``
        drafts, if none is accepted."""
        return self.start + len(self.tokens)

    @property
    def latest_end(self) -> int:
        """``end`` if all ``undecided`` drafts are accepted."""
        return self.end if self.undecided is None else self.end + len(self.undecided)

    @property
    def num_chosen(self) -> int:
        """Tokens that the step chooses after tokens of this span."""
        return 0 if self.sample is None else 1 + self.drafts

    @property
    def specs(self) -> tuple[SampleSpec, ...]:
        """How to choose each of these tokens."""
        if self.sample is None:
            return ()
        if not self.drafts:
            return (self.sample,)
        return tuple(
            self.sample.after(self.tokens[-self.drafts :][:count]) for count in range(self.drafts + 1)
        )


def decided(span: Span, chosen: Sequence[int]) -> Span:
    """Return a span without ``PENDING`` and ``undecided``. ``chosen``: the tokens that the plan before chose for its
    request, in order."""
    accepted = 0 if span.undecided is None else common_prefix(span.undecided, np.array(chosen, np.int32))
    tokens = np.where(span.tokens == PENDING, chosen[accepted], span.tokens).astype(np.int32)
    sample = span.sample
    if sample is not None:
        sample = msgspec.structs.replace(sample, output_index=sample.output_index + accepted)
    return msgspec.structs.replace(
        span, start=span.start + accepted, tokens=tokens, sample=sample, undecided=None
    )


class Copy(msgspec.Struct, frozen=True):
    """One slice: all layers of a KV group, from page ``src`` to page ``dst``. The list that it is in names the
    tiers."""

    src: int
    dst: int
    group: int = 0
    """Index of the KV group that both pages belong to."""


class PageCheck(msgspec.Struct, frozen=True):
    """A chunk that was computed and is complete on the device after the step. All chunks of an address hold the same
    bytes, whenever they are computed."""

    address: int
    """int64; stands for its tokens and all tokens before them."""
    page: int
    """Its page in group 0."""


class Chain(msgspec.Struct, frozen=True):
    """Spans through which one recurrent state passes, in the state group of a model that has one.

    Every span of the plan is in exactly one chain. A chain reads page ``read`` before it writes, so ``live`` or
    ``boundary`` may be that page. Apart from that, no page that a chain writes is read or written by another chain
    of the plan: chains run side by side. Several chains may read one page.
    """

    first: int
    """Index of the first span in ``Plan.spans``; with ``last`` (included) spans of one request, in the order of the
    plan and with consecutive positions."""
    last: int
    read: int
    """Page of the state before the first token; ``NO_PAGE``: the zero state, at position 0."""
    boundary: int
    """Page that receives the state before position ``boundary_at``; ``NO_PAGE``: none does."""
    boundary_at: int
    """Position of a chunk boundary: tokens ``[0, boundary_at)`` are in the state that ``boundary`` receives. A
    multiple of the chunk size, after the first token's position and at most the end of the last span. Without
    ``boundary``: any value."""
    live: int
    """Page that receives the state after the last token; ``NO_PAGE``: none does, because it is held already or
    nothing goes on from it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for all requests in the batch, in whatever phase each is."""

    step: int
    spans: tuple[Span, ...] = ()
    page_tables: tuple[PageTable, ...] = ()
    """Pages of group 0: one table per request in the batch, indexed by ``Span.page_table``."""
    swap_out: tuple[Copy, ...] = ()
    copies: tuple[Copy, ...] = ()
    swap_in: tuple[Copy, ...] = ()
    checks: tuple[PageCheck, ...] = ()
    """Chunks whose bytes the worker compares with those that it had for the same address. It raises RestoreMismatch if
    they differ."""
    window_tables: tuple[PageTable, ...] = ()
    """Pages of group 1 when it is a window group: as many as ``page_tables``, each as long as its counterpart.
    Entries of chunks that no span of the request sees through the window may be any page."""
    chains: tuple[Chain, ...] = ()
    """The ways of the states through the spans, when the model has a state group."""
    memory: tuple[int, int] | None = None
    """Bytes of one rank's device buffer that memory backs once the plan has taken effect, from its bottom and from its
    top; None: as before. The worker backs missing memory before it queues the plan. It gives up the rest after this
    plan and all earlier ones have read it. The plan uses no page that only its own growth backs."""

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    def decided(self, chosen: Mapping[RequestKey, Sequence[int]]) -> Plan:
        """Return the plan without ``PENDING`` and undecided drafts. ``chosen``: the tokens of each request that the
        plan before chose, in order."""
        return replace(
            self,
            spans=tuple(
                decided(span, chosen[span.request])
                if span.undecided is not None or PENDING in span.tokens
                else span
                for span in self.spans
            ),
        )

    @property
    def specs(self) -> tuple[SampleSpec, ...]:
        """How to choose each token of the step, in the order of the spans with a ``sample`` and of their tokens."""
        return tuple(spec for span in self.spans for spec in span.specs)

    @property
    def chosen_for(self) -> tuple[RequestKey, ...]:
        """The request of each token that the step chooses, in the order of ``specs``."""
        return tuple(span.request for span in self.spans for _ in range(span.num_chosen))

    @property
    def chooses_late(self) -> bool:
        """Whether the worker must wait for ``PendingStep.choose`` before it chooses the step's tokens."""
        return any(span.sample is not None and span.sample.late for span in self.spans)

    @property
    def is_empty(self) -> bool:
        return not (self.spans or self.swap_out or self.copies or self.swap_in or self.memory or self.checks)


class Sampled(msgspec.Struct, frozen=True):
    """A token chosen after a span, or after one of its drafts."""

    request: RequestKey
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[Sampled, ...] = ()
    """In the order of ``Plan.specs``, without those for which ``choose`` named no spec."""
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0
    swap_out_backlog: int = 0
    """Chunks of launched plans not yet copied out."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step, as measured by the worker: see ``Stats.part_seconds_total``."""
    memory: tuple[int, int] | None = None
    """The answer to ``Plan.memory``: bytes that are backed from the bottom and from the top; None: not asked. Less than
    the plan's when memory could not be allocated."""


class PendingStep(Protocol):
    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        """Choose the tokens of a step whose plan ``chooses_late``; call once, before the next launch and ``result``.
        Any other plan has chosen its tokens at the launch.

        ``specs``: as ``Plan.specs``, with all that was not known at the launch; None: choose no token.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its result. Call once, in the order of the launches."""
        ...


class StepWorker(Protocol):
    """Executes plans: PyTorch on a CPU, CUDA, or a cost model under a virtual clock."""

    def launch(self, plan: Plan) -> PendingStep:
        """Begin ``plan``, in the order of the module docstring; if it ``chooses_late``, up to 5. An exception leaves
        the KV undefined."""
        ...

    def close(self) -> None:
        """Release memory, streams and threads."""
        ...


class SynchronousWorker(ABC):
    """A worker whose step is complete when ``launch`` returns. Its tokens must not depend on late specs."""

    def launch(self, plan: Plan) -> PendingStep:
        return _Done(self.run(plan))

    @abstractmethod
    def run(self, plan: Plan) -> StepResult:
        """Execute ``plan``."""


@dataclass(slots=True)
class _Done:
    outcome: StepResult

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        """Drop the tokens that are not wanted; the others do not depend on ``specs``."""
        kept = tuple(one for one, spec in zip(self.outcome.sampled, specs, strict=True) if spec is not None)
        self.outcome = replace(self.outcome, sampled=kept)

    def result(self) -> StepResult:
        return self.outcome
