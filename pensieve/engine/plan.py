"""Plan and result of one step: frozen values that the scheduler makes and the worker executes. No torch.

Every worker keeps this order inside a step, which makes reuse of a page within one plan safe:

1. ``swap_out``: device pages are read into host pages;
2. ``copies``: device pages are read into other device pages (copy on write);
3. ``swap_in``: host pages are read into device pages, layer by layer, each layer before its attention;
4. the model runs over the concatenated spans; in each layer all KV of the step is written before attention reads;
5. the last token of each span with a ``sample`` is sampled.

A device page freed by 1 may be the target of 2, 3 or 4 of the same plan. A host page is never both written by
1 and read by 3 of one plan.

Plans take effect in the order of their launches, as if each had ended before the next began. So the scheduler
may make the next plan while this one runs, and reuse a page as soon as the plan that still needs it is
launched. Making it look so (streams, events) is the worker's job alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pensieve.core import RequestKey, Sampling, TokenArray, TokenLogprob

PageTable = npt.NDArray[np.int32]
"""Device page of each chunk of a context, int32 [chunks]."""

PENDING = -1
"""Stands for the token that this request samples in the plan launched just before; only the last of a span."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
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


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive input tokens of one request at a known position (the paper's sub-request, EuroSys §4.3.4)."""

    request: RequestKey
    start: int
    """Position of the first token in the context."""
    tokens: TokenArray
    """Input token ids [q], q ≥ 1; the last may be ``PENDING``."""
    page_table: int
    """Index into ``Plan.page_tables``; page ``i`` holds positions ``[i * page_tokens, (i + 1) * page_tokens)``."""
    sample: SampleSpec | None = None
    """How to choose the token after this span; None: sample none."""

    @property
    def end(self) -> int:
        """Position after the last token, which is the number of KV-tokens that the last token sees."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Copy:
    """One chunk, all layers, from page ``src`` to page ``dst``. The list that it is in names the tiers."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for all requests in the batch, in whatever phase each is."""

    step: int
    spans: tuple[Span, ...] = ()
    page_tables: tuple[PageTable, ...] = ()
    """One per request in the batch, indexed by ``Span.page_table``."""
    swap_out: tuple[Copy, ...] = ()
    copies: tuple[Copy, ...] = ()
    swap_in: tuple[Copy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @property
    def is_empty(self) -> bool:
        return not (self.spans or self.swap_out or self.copies or self.swap_in)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen after one span."""

    request: RequestKey
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[Sampled, ...] = ()
    """In the order of the plan's spans with a ``sample``."""
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0
    swap_out_backlog: int = 0
    """Chunks of launched plans not yet copied out."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step, as measured by the worker: see ``Stats.part_seconds_total``."""


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Wait for the step and return its result. Call once, in the order of the launches."""
        ...


class StepWorker(Protocol):
    """Executes plans: PyTorch on a CPU, CUDA, or a cost model under a virtual clock."""

    def launch(self, plan: Plan) -> PendingStep:
        """Begin ``plan``, in the order of the module docstring. An exception leaves the KV undefined."""
        ...

    def close(self) -> None:
        """Release memory, streams and threads."""
        ...


class SynchronousWorker(ABC):
    """A worker whose step is complete when ``launch`` returns."""

    def launch(self, plan: Plan) -> PendingStep:
        return _Done(self.run(plan))

    @abstractmethod
    def run(self, plan: Plan) -> StepResult:
        """Execute ``plan``."""


@dataclass(frozen=True, slots=True)
class _Done:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome
