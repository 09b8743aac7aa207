"""Compares the bits that a worker computes for one history, however often and in whatever way it computes them.

A twin worker of hashes executes the same plans. The hash of a position stands for all tokens up to it, read through the
page tables, so it says which keys, values and logits must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pensieve.config import CacheConfig, CacheGroup
from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import PendingStep, Plan, SampleSpec, Span, StepResult
from pensieve.engine.ranks.leader import LeadingWorker
from pensieve.engine.worker.torch_worker import TorchWorker
from pensieve.kernels import kv_codec
from support.engine.hash_worker import MASK, HashWorker, read_kv
from support.engine.hybrid_worker import HybridWorker, hybrid_kv


class _Hashes(HashWorker):
    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config.device_chunks, config.host_chunks, config.chunk_tokens)
        self.last: dict[int, list[int]] = {}
        """Hashes of the positions after which a token is chosen, by the span's identity."""

    def _compute(self, plan: Plan, span: Span) -> list[int]:
        found = super()._compute(plan, span)
        self.last[id(span)] = found[len(found) - span.num_chosen :]
        return found


class _HybridHashes(HybridWorker):
    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.last: dict[int, list[int]] = {}

    def _compute(self, plan: Plan, span: Span, position: int, state: int) -> int:
        found = super()._compute(plan, span, position, state)
        self.last[id(span)] = [found]
        return found


class Bits:
    """Bits seen so far: logits and pages by the history that they belong to."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], Any] = {}
        self.compared = 0

    def expect(self, kind: str, history: int, bits: torch.Tensor) -> None:
        before = self.seen.setdefault((kind, history), bits)
        if before is not bits:
            self.compared += before.numel()
            different = int((before != bits).sum())
            assert not different, f"{different} of {before.numel()} values of {kind} differ in their bits"


@dataclass(slots=True)
class _Compared:
    """A step whose log-probabilities are compared when it ends."""

    step: PendingStep
    bits: Bits
    histories: dict[RequestKey, list[int]]
    """Hashes of all tokens before each one that is chosen, by request."""

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.step.choose(specs)

    def result(self) -> StepResult:
        result = self.step.result()
        for one in result.sampled:
            history = self.histories[one.request].pop(0)
            if one.logprob is not None:
                values = torch.tensor([one.logprob.logprob, *(value for _, value in one.logprob.top)])
                self.bits.expect(f"logprobs {one.token_id}", history, as_bits(values))
        return result


class BitWorker:
    """A worker whose results are compared with all earlier ones for the same history."""

    def __init__(self, worker: Any, config: CacheConfig, bits: Bits) -> None:
        self._worker, self._bits, self._config = worker, bits, config
        self._first: Any = worker._worker if isinstance(worker, LeadingWorker) else worker
        """The worker itself; with several ranks, that of rank 0."""
        self._twin: Any = (_HybridHashes if len(config.groups) > 1 else _Hashes)(config)
        self._requests: tuple[RequestKey, ...] = ()
        """The request of each token that the plan before has chosen."""
        self._logits: torch.Tensor | None = None
        self._forward: Any = None
        if isinstance(self._first, TorchWorker):  # a worker on a GPU keeps them itself
            self._forward = self._first._model.forward
            self._first._model = self

    def __getattr__(self, name: str) -> Any:
        """The rest of the model whose ``forward`` this object stands before."""
        return getattr(self._forward.__self__, name)

    def forward(self, *given: Any) -> torch.Tensor:
        self._logits = self._forward(*given)
        return self._logits

    def run(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> PendingStep:
        """Compare logits, keys and values at once: the next plan may write over them."""
        step_plan, plan = plan, plan.decided(self._chosen())
        self._requests = plan.chosen_for
        self._twin.last.clear()
        self._twin.run(plan)
        step = self._worker.launch(step_plan)
        spans = [span for span in plan.spans if span.sample is not None]
        histories = [history for span in spans for history in self._twin.last[id(span)]]
        if self._forward is None:
            torch.cuda.synchronize()  # the step runs on a stream of its own
            self._logits = self._first._programs.shared.logits[: len(histories)].cpu()
        for row, history in enumerate(histories):
            assert self._logits is not None
            self._bits.expect("logits", history, as_bits(self._logits[row].clone()))
        if len(self._config.groups) == 1 and self._config.device_floor_bytes is None:
            self._compare_pages(plan)
        by_request = {span.request: list(self._twin.last[id(span)]) for span in spans}
        return _Compared(step, self._bits, by_request)

    def compare_logits(self, history: int) -> None:
        """Compare the first row of the latest step's logits, under another name of its history."""
        assert self._logits is not None
        self._bits.expect("logits", history, as_bits(self._logits[0].clone()))

    def _chosen(self) -> dict[RequestKey, list[int]]:
        """The tokens that the plan before has chosen."""
        if self._forward is not None:
            return dict(self._first._chosen)
        torch.cuda.synchronize()
        tokens = self._first._programs.shared.sampled.tolist()
        chosen: dict[RequestKey, list[int]] = {}
        for request, token in zip(self._requests, tokens, strict=False):
            chosen.setdefault(request, []).append(token)
        return chosen

    def _compare_pages(self, plan: Plan) -> None:
        """All keys and values that the spans of this step read."""
        size = self._config.chunk_tokens
        layers = [self._first.pools.attention(layer) for layer in range(self._first.arch.num_layers)]
        for span in plan.spans:
            table = plan.page_tables[span.page_table]
            positions = np.arange(span.end)
            pages, slots = table[positions // size].astype(np.int64), positions % size
            histories = self._twin.device[pages, slots].tolist()
            # [position, layer, 2, Hkv, D]
            where = [torch.from_numpy(one).to(layers[0].device) for one in (pages, slots)]
            at = (where[0], slice(None), slice(None), where[1])
            held = torch.stack([_values(layer, at) for layer in layers], dim=1).cpu()
            for history, one in zip(histories, as_bits(held), strict=True):
                self._bits.expect("keys and values", history, one)

    def leave(self) -> None:
        """Stop looking at the worker, which stays open."""
        if self._forward is not None:
            self._first._model = self._forward.__self__

    def close(self) -> None:
        self.leave()
        self._worker.close()


def _values(pool: torch.Tensor, at: kv_codec.Index) -> torch.Tensor:
    return kv_codec.read(pool, at, torch.float32) if kv_codec.is_coded(pool) else pool[at]


def as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def alone(
    checked: BitWorker,
    page_tokens: int,
    contexts: Sequence[Sequence[int]],
    groups: Sequence[CacheGroup] = (),
) -> None:
    """Compute each context in one step of its own, with nothing cached, and compare. ``groups``: of the schedules'
    cache, where these are two and ``checked`` has one."""
    for context in contexts:
        tokens = np.array(context, np.int32)
        table = np.arange(-(-len(tokens) // page_tokens), dtype=np.int32)
        spec = SampleSpec(Sampling(temperature=0.0, top_logprobs=3), 0)
        checked.run(Plan(0, (Span(RequestKey(1), 0, tokens, 0, spec),), (table,)))
        if groups:
            checked.compare_logits(last_hybrid_kv(groups, context))


def last_hybrid_kv(groups: Sequence[CacheGroup], context: Sequence[int]) -> int:
    """Return what ``HybridWorker`` has for the last position of a context. ``groups``: full layers, then windows."""
    window, full, reads, kv = groups[1].window, 0, list[int](), 0
    for position, token in enumerate(context):
        seen = sum(reads[max(0, position - window + 1) : position]) & MASK
        kv = hybrid_kv(token, position, full, seen, 0)
        reads.append(read_kv(kv, position))
        full = (full + reads[-1]) & MASK if groups[0].layers else 0
    return kv


def norm_by_size(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A head norm that adds in another order from six rows on."""

    def by_size(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        if x.dim() < 3 or len(x) < 6:
            return norm(x, weight, bias, eps)
        mean = x.float().square().cumsum(-1)[..., -1:] / x.shape[-1]
        return (x.float() * torch.rsqrt(mean + eps)).to(x.dtype) * weight

    return by_size
