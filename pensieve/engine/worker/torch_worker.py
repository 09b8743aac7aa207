"""The worker in plain torch, the only owner of KV memory and weights. Decides nothing; ``build_worker`` picks
a worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from pensieve.config import EngineOptions
from pensieve.core import Ints, RequestKey, TokenLogprob
from pensieve.engine.kv.pools import KvTiers, LayerTransfers
from pensieve.engine.kv.recomputed import ComputedChunks
from pensieve.engine.plan import PageTable, PendingStep, Plan, Sampled, SampleSpec, StepResult, StepWorker
from pensieve.engine.sampling.sampler import sample
from pensieve.engine.worker import invariance
from pensieve.engine.worker.sizing import DTYPES, WorkerInfo, allocate_pools, resolve_device, worker_info
from pensieve.engine.worker.spans import SpanColumns
from pensieve.kernels import invariant, reference
from pensieve.kernels.arguments import HeadPrep, Logits
from pensieve.kernels.recurrence import Recurrence
from pensieve.kernels.recurrent import recurrent
from pensieve.kernels.spans import Spans, make_spans
from pensieve.machine import usable_cores
from pensieve.model.arch import Arch
from pensieve.model.collective import SINGLE_RANK, Collective
from pensieve.model.folder import load_arch
from pensieve.model.ops import INVARIANT_OPS, TORCH_OPS, triton_ops
from pensieve.model.shard import Shard
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights, weight_bytes


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """T concatenated tokens of S spans over R contexts."""

    tokens: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: slot of each token's keys and values in group 0, ``page * N + offset``, or ``NO_SLOT``."""
    spans: Spans
    page_tables: torch.Tensor
    """int32 [R, most pages of a row]; the unused end of a row names the padding page."""
    sample_rows: torch.Tensor
    """int64: the tokens after which one is chosen, in the order of ``Plan.specs``."""
    window_slots: torch.Tensor | None
    """As ``slots``, in the window group; None: there is none."""
    window_tables: torch.Tensor | None
    """As ``page_tables``."""
    chains: Ints
    """See ``SpanColumns.chains``."""


def make_torch_batch(plan: Plan, *, page_tokens: int, padding_page: int, device: torch.device) -> TorchBatch:
    """Return the batch of a decided plan with at least one span. Raises ValueError like ``SpanColumns.from_plan``."""
    columns = SpanColumns.from_plan(plan, page_tokens)

    def padded(tables: tuple[PageTable, ...]) -> torch.Tensor:
        array = np.full((len(tables), max(map(len, tables))), padding_page, dtype=np.int32)
        for index, table in enumerate(tables):
            array[index, : len(table)] = np.maximum(table, 0)
        return torch.from_numpy(array).to(device)

    windows = columns.window_slots
    last = [index for index, span in enumerate(plan.spans) if span.sample is not None]
    chosen = columns.chosen_rows(last, [plan.spans[index].num_chosen for index in last])
    return TorchBatch(
        tokens=torch.from_numpy(columns.tokens.astype(np.int64)).to(device),
        positions=torch.from_numpy(columns.positions).to(device),
        slots=torch.from_numpy(columns.slots).to(device),
        spans=make_spans(columns.length, columns.start, columns.table),
        page_tables=padded(plan.page_tables),
        sample_rows=torch.from_numpy(chosen).to(device),
        window_slots=None if windows is None else torch.from_numpy(windows).to(device),
        window_tables=padded(plan.window_tables) if plan.window_tables else None,
        chains=columns.chains,
    )


class Worker(StepWorker, Protocol):
    """A ``StepWorker`` with its architecture and sizes, which the engine itself does not need."""

    @property
    def arch(self) -> Arch:
        """The architecture; with several ranks, of this rank's shard."""
        ...

    @property
    def info(self) -> WorkerInfo: ...

    def run(self, plan: Plan) -> StepResult:
        """Launch a step and wait for it."""
        ...


class TorchWorker:
    """A worker in plain torch: when ``launch`` returns, everything but late choices is done."""

    def __init__(self, model: Transformer, info: WorkerInfo, *, pipelined_swap_in: bool = True) -> None:
        """Allocate both pools. Raises ValueError when memory does not suffice."""
        self.arch = model.arch
        self.info = info
        self._model = model
        self._pipelined = pipelined_swap_in
        self._chosen: dict[RequestKey, list[int]] = {}
        """Tokens that the latest step chose for each request."""
        self._device = torch.device(info.device)
        self.pools = allocate_pools(model.arch, info)
        self.computed = ComputedChunks(self.pools.groups[0])

    def run(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        """See ``StepWorker.launch``."""
        plan = plan.decided(self._chosen)  # the step before is done
        memory = self.pools.grow(plan)
        started = time.perf_counter()
        self.pools.swap_out(plan.swap_out)
        swapped_out = time.perf_counter()
        self.pools.copy_on_device(plan.copies)
        swap_in = self.pools.swap_in(plan.swap_in, pipelined=self._pipelined)
        timings: dict[str, float] = {}
        logits = self._compute(plan, swap_in, timings) if plan.spans else None
        swap_in.finish()
        if plan.checks:
            self.computed.compare(plan.checks, self.computed.sums(plan.checks))
        if memory is not None:
            self.pools.shrink()  # everything is done
        result = StepResult(
            swap_in_bytes=self.pools.bytes_of(plan.swap_in),
            swap_out_bytes=self.pools.bytes_of(plan.swap_out),
            swap_in_seconds=swap_in.seconds,
            swap_out_seconds=swapped_out - started if plan.swap_out else 0.0,
            timings=timings,
            memory=memory,
        )
        step = _TorchStep(self, plan, logits, result)
        if not plan.chooses_late:
            step.choose(plan.specs)
        return step

    def close(self) -> None:
        self.pools.close()
        del self.pools, self._model, self.computed

    def _compute(self, plan: Plan, swap_in: LayerTransfers, timings: dict[str, float]) -> torch.Tensor:
        """Return the logits of the sampled spans, [S, vocab]."""
        started = time.perf_counter()
        batch = make_torch_batch(
            plan,
            page_tokens=self.info.chunk_tokens,
            padding_page=self.pools.padding_page,
            device=self._device,
        )
        attention = _StepAttention(self.pools, batch, swap_in, self.arch, self.info.is_invariant)
        prepared = time.perf_counter()
        logits = self._model.forward(
            batch.tokens, batch.positions, attention, batch.sample_rows, attention.recur
        )
        timings |= {
            "prepare": prepared - started,
            "model": time.perf_counter() - prepared,
            "attention": attention.seconds,
        }
        return logits

    @torch.inference_mode()
    def sample(
        self, plan: Plan, logits: torch.Tensor, specs: Sequence[SampleSpec | None]
    ) -> tuple[Sampled, ...]:
        """Choose a token for each row of ``logits`` [S, vocab] that has a spec."""
        requests = plan.chosen_for
        wanted = [row for row, spec in enumerate(specs) if spec is not None]
        # Rank 0 samples, so that all ranks continue with the same tokens.
        collective = self._model.collective
        chosen: dict[int, tuple[int, TokenLogprob | None]] = {}
        if collective.rank == 0:
            rows = logits if len(wanted) == len(specs) else logits[wanted]
            found = sample(
                rows, [spec for spec in specs if spec is not None], [requests[row] for row in wanted]
            )
            chosen = dict(zip(wanted, found, strict=True))
        tokens = [chosen[row][0] if row in chosen else 0 for row in range(len(requests))]
        if collective.ranks > 1 and requests:
            shared = torch.tensor(tokens)
            collective.broadcast(shared)
            tokens = shared.tolist()
        self._chosen = {}
        for request, token in zip(requests, tokens, strict=True):
            self._chosen.setdefault(request, []).append(token)
        return tuple(Sampled(requests[row], *one) for row, one in chosen.items())


@dataclass(slots=True)
class _TorchStep:
    """``PendingStep`` of a ``TorchWorker``."""

    worker: TorchWorker
    plan: Plan
    logits: torch.Tensor | None
    """float32 [S, vocab] until the tokens are chosen."""
    outcome: StepResult

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        """See ``PendingStep.choose``."""
        started, logits = time.perf_counter(), self.logits
        if logits is None:
            return
        self.logits = None
        sampled = self.worker.sample(self.plan, logits, specs)
        timings = self.outcome.timings | {"sample": time.perf_counter() - started}
        self.outcome = replace(self.outcome, sampled=sampled, timings=timings)

    def result(self) -> StepResult:
        assert self.logits is None, f"step {self.plan.step}: no token was chosen"
        return self.outcome


class _StepAttention:
    """Attention of one step over the paged pool (``pensieve.model.transformer.Attend``), and its recurrences."""

    def __init__(
        self,
        pools: KvTiers,
        batch: TorchBatch,
        swap_in: LayerTransfers,
        arch: Arch,
        is_invariant: bool,
    ) -> None:
        self.pools, self.batch, self.swap_in, self.arch = pools, batch, swap_in, arch
        self.is_invariant = is_invariant
        self.plans: dict[int | None, Any] = {}
        """By window; made in the first layer that has it, from the shape of its queries."""
        self.seconds = 0.0

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        # Before the write, not only before the read: a swapped-in page may be the one to append to.
        self.swap_in.wait(layer)
        started = time.perf_counter()
        pool, batch, arch = self.pools.attention(layer), self.batch, self.arch
        window = arch.layers[layer].window
        slots, tables = batch.slots, batch.page_tables
        if self.pools.in_window_group(layer):
            assert batch.window_slots is not None and batch.window_tables is not None
            slots, tables = batch.window_slots, batch.window_tables
        q = reference.kv_write(pool, qkv, slots, prep)
        kernels: Any = invariant if self.is_invariant else reference
        if window not in self.plans:
            self.plans[window] = kernels.make_plan(q, pool, batch.spans, tables, window=window)
        out: torch.Tensor = kernels.attend(
            q, pool, self.plans[window], Logits(arch.attention_scale, arch.softcap, prep.sinks)
        )
        self.seconds += time.perf_counter() - started
        return out

    def recur(
        self, layer: int, inputs: torch.Tensor, gates: torch.Tensor, recurrence: Recurrence
    ) -> torch.Tensor:
        """See ``pensieve.model.recurrent.Recur``."""
        self.swap_in.wait(layer)
        started = time.perf_counter()
        out = recurrent(inputs, gates, self.pools.state(layer), recurrence, self.batch.chains)
        self.seconds += time.perf_counter() - started
        return out


def build_worker(options: EngineOptions, collective: Collective = SINGLE_RANK) -> Worker:
    """Return a worker for the model and sizes of ``options``; with several ranks, for this rank's shard. All
    ranks must call it. Raises ModelError when the model cannot be served, ValueError when this machine cannot
    satisfy an option."""
    if options.torch_threads or collective.ranks > 1:
        torch.set_num_threads(max(1, (options.torch_threads or usable_cores()) // collective.ranks))
    folder = Path(options.model)
    whole = load_arch(folder)
    place = resolve_device(options, whole)
    if options.invariant:
        invariance.require(whole, place.device)
    shard = Shard(collective.rank, collective.ranks)
    weights = load_weights(
        folder,
        whole,
        dtype=DTYPES[place.dtype],
        device=place.device,
        load_format=options.load_format,
        shard=shard,
        weights=options.weights,
    )
    arch = shard.arch(whole)
    on_gpu = place.device == "cuda"
    ops = (
        triton_ops(invariant=bool(options.invariant))
        if on_gpu
        else INVARIANT_OPS
        if options.invariant
        else TORCH_OPS
    )
    if options.invariant and on_gpu:
        invariance.use_plain_products()
        weights = invariance.with_even_head(weights)
    model = Transformer(arch, weights, ops, collective)
    if options.invariant:
        invariance.check(
            model, most_rows=max(place.max_batch_tokens, place.max_running), kv_dtype=options.kv_dtype
        )
    # After the weights are loaded: the tiers use the memory that remains.
    info = worker_info(options, arch, weight_bytes=weight_bytes(weights), collective=collective)
    if info.device == "cuda":
        from pensieve.engine.worker.cuda_worker import CudaWorker  # needs Triton

        cuda_worker = CudaWorker(model, info, options)
        cuda_worker.warm_up()
        return cuda_worker
    return TorchWorker(model, info, pipelined_swap_in=options.pipelined_swap_in)
