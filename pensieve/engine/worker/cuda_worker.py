"""The worker on an NVIDIA GPU: queues each plan on the device without waiting.

``launch`` packs a plan into one block of integers, queues its upload, the copies of the plan (``SwapEngine``)
and the step's program, usually as one CUDA graph, and returns. Sampled tokens stay on the device for the next
step. Their copy to the host is queued behind the step, and ``result`` waits for that copy alone.

============================  =====================  =============================================================
memory                        written by             safe because
============================  =====================  =============================================================
staging (pinned, three)       ``launch``             its upload was done two results ago
step block of a program       upload, on ``compute`` every reader is on ``compute``
``sampled``, ``logits``       program, sampler       both on ``compute``
KV pools                      program, copies        ``SwapEngine`` orders copy streams and ``compute``; an elastic
..                                                   tier's memory comes before a plan that may use it is queued, and
..                                                   goes when the marks of its last uses are reached (``Backing``)
host copies of samples        ``TokenFetch``         fresh pinned memory for each step
============================  =====================  =============================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from rich.console import Console

from pensieve.config import EngineTuning
from pensieve.core import RequestKey, Sampling
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.kv.recomputed import ComputedChunks
from pensieve.engine.kv.swap import SwapEngine
from pensieve.engine.plan import (
    NO_PAGE,
    Chain,
    PageCheck,
    PendingStep,
    Plan,
    Sampled,
    SampleSpec,
    Span,
    StepResult,
)
from pensieve.engine.sampling.rows import prepare
from pensieve.engine.sampling.sampler import SampledTokens, TokenFetch, choose
from pensieve.engine.worker.graphs import Programs, most_samples
from pensieve.engine.worker.program import CudaBatch, SharedState, StepProgram, make_cuda_batch
from pensieve.engine.worker.sizing import DTYPES, WorkerInfo, allocate_pools
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import most_copies
from pensieve.kernels.attention.kinds import PIECE_KEYS
from pensieve.kernels.attention.plan import geometry_of
from pensieve.kernels.attention.prefixes import PrefixGroupRule
from pensieve.kernels.state_chunks import LONG
from pensieve.model.transformer import Transformer

NO_SPEC: Final = SampleSpec(Sampling(), 0)
"""Stands for a row whose token is not wanted."""
STAGINGS = 3
"""One is filled while the previous step runs, and the step before that may still be uploading."""


def long_run(info: WorkerInfo) -> Plan | None:
    """Return a step that computes a run of tokens by blocks up to a boundary, and another one after it; None: the model
    has no recurrent layers, or the step does not fit.

    No graph holds these kernels. Compiling them takes a minute: the first turn would look like a stalled engine.
    """
    if len(info.groups) < 2 or info.groups[1].kind != "state":
        return None
    boundary = -(-LONG // info.chunk_tokens) * info.chunk_tokens
    tokens = np.zeros(boundary + LONG, np.int32)
    chunks = -(-len(tokens) // info.chunk_tokens)
    pool = PagePool(info.device_tier.num_bytes, info.device_tier.sizes)
    if len(tokens) > min(info.max_batch_tokens, info.context_limit) or not pool.fits(chunks, 2):
        return None
    table = np.array([pool.take(0) for _ in range(chunks)], np.int32)
    chain = Chain(0, 0, NO_PAGE, pool.take(1), boundary, pool.take(1))
    memory = None if info.device_floor is None else pool.extents
    return Plan(0, (Span(RequestKey(0), 0, tokens, 0),), (table,), chains=(chain,), memory=memory)


class CudaWorker:
    """``StepWorker`` on one GPU."""

    def __init__(self, model: Transformer, info: WorkerInfo, options: EngineTuning | None = None) -> None:
        """Allocate both pools, sized by ``info``; ``options`` sets the switches of the GPU path. Raises ValueError."""
        options = options or EngineTuning()
        self.arch, self.info = model.arch, info
        self._device = torch.device(info.device)
        self._compute = torch.cuda.Stream(self._device)
        self.pools = allocate_pools(model.arch, info)
        self.swap = SwapEngine(
            self.pools,
            self._compute,
            pipelined=options.pipelined_swap_in,
            mechanism=options.swap_mechanism,
            verify=options.verify_swap,
        )
        self.computed = ComputedChunks(self.pools.groups[0])
        self._programs = Programs(self._shared(model), info, self._compute, graphs=options.cuda_graphs)
        self._rule: PrefixGroupRule | None = None
        shared = self._programs.shared
        if options.shared_prefix_attention and None in shared.windows:
            self._rule = PrefixGroupRule(shared.geometry, info.chunk_tokens)
        self._stagings: deque[_Staging] = deque(_Staging(self._programs.words) for _ in range(STAGINGS))
        self._sampled: dict[RequestKey, int] = {}
        """Row of the first token that the latest step chose for each request."""
        self._last_end: torch.cuda.Event | None = None
        torch.cuda.synchronize(self._device)

    def _shared(self, model: Transformer) -> SharedState:
        arch, info = self.arch, self.info
        # Queries are a slice of the fused projection's output; kernels are chosen by the layout of such
        # tensors.
        heads = arch.num_heads + 2 * arch.num_kv_heads
        qkv = torch.empty(1, heads, arch.head_dim, dtype=DTYPES[info.dtype], device=self._device)
        pages = {layer: self.pools.attention(layer) for layer in arch.attention_layers}
        # Attention of a model without any is planned all the same, over a pool of one page.
        one_page = qkv.new_empty(1, 2, arch.num_kv_heads, info.chunk_tokens, arch.head_dim)
        geometry = geometry_of(qkv[:, : arch.num_heads], next(iter(pages.values()), one_page))
        if arch.softcap is not None:
            geometry = replace(geometry, hopper=False)
        if info.is_invariant:
            geometry = replace(geometry, hopper=False, piece=PIECE_KEYS, copied_page=0)
        windows = tuple(dict.fromkeys(layer.window for layer in arch.layers if layer.attends)) or (None,)
        rows = most_samples(info)
        return SharedState(
            model=model,
            pool=pages,
            wait=self.swap.wait,
            sampled=torch.zeros(rows, dtype=torch.int64, device=self._device),
            logits=torch.zeros(rows, arch.vocab_size, device=self._device),
            finite=torch.ones(rows, dtype=torch.bool, device=self._device),
            scratch=Scratch(
                Programs.scratch_rows(info, geometry, windows),
                geometry,
                self._device,
                most_copies(geometry),
            ),
            geometry=geometry,
            page_tokens=info.chunk_tokens,
            windows=windows,
            window_tables=len(info.groups) > 1 and info.groups[1].kind == "window",
            states={
                layer: self.pools.state(layer)
                for layer, described in enumerate(arch.layers)
                if described.state is not None
            },
            polled=self.pools.backing is not None,
        )

    def warm_up(self) -> None:
        """Compile all kernels and capture the graphs of common steps, with progress on stderr."""
        with torch.inference_mode():
            self._programs.capture_all()
        plan = long_run(self.info)
        if plan is not None:
            with Console(stderr=True).status("compiling kernels of recurrent layers"):
                self.run(plan)

    def run(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        """See ``StepWorker.launch``."""
        batch: CudaBatch | None = None
        program: StepProgram | None = None
        staging = self._stagings[0]
        memory = self.pools.grow(plan)  # before anything is queued that might use it
        with torch.cuda.stream(self._compute):
            if plan.spans:
                # Do all host work first: the device then gets copies and step in one go, and no copy delays
                # it while the host still packs.
                batch = make_cuda_batch(plan, self.info.chunk_tokens, self._sampled, self._rule)
                # Its last upload was done two results ago: this returns at once unless the caller launches
                # further ahead.
                staging.uploaded.synchronize()
                program, words = self._programs.pack(batch, staging.array)
            # Copies first: some of the step's kernels must come after them, and each layer waits for its
            # swap-in.
            self.swap.before_step(plan)
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            if batch is not None and program is not None:
                program.upload(staging.tensor, words)
                staging.uploaded.record()
                self._stagings.rotate(-1)
                program.run()
            sums = self._sums(plan)
            self.swap.after_step(plan)
        if memory is not None:
            low, high = memory
            self.pools.shrink(self.swap.marks_of(low, self.pools.device.nbytes - high))
        end = torch.cuda.Event(enable_timing=True)
        before, self._last_end = self._last_end, end
        # The device computes by now: the rest need not be quick.
        requests = None if batch is None else plan.chosen_for
        step = _CudaStep(self, requests, before, begin, end, memory, plan.checks, sums)
        if not plan.chooses_late:
            step.fetched = self.sample(requests, plan.specs, end)
        return step

    def _sums(self, plan: Plan) -> torch.Tensor | None:
        """Queue the checksums of ``plan.checks``, before any later copy can write to their pages."""
        if not plan.checks:
            return None
        for layer in range(self.arch.num_layers):
            self.swap.wait(layer)  # a step without spans has waited for none
        return self.computed.sums(plan.checks)

    @torch.inference_mode()
    def sample(
        self, requests: tuple[RequestKey, ...] | None, specs: Sequence[SampleSpec], end: torch.cuda.Event
    ) -> TokenFetch | None:
        """Queue the sampling that the graph does not do, the copy of the samples to the host, and ``end``. Return
        None when there are no samples, and on ranks that choose none. ``requests``: of each sample; None: the plan had
        no spans."""
        with torch.cuda.stream(self._compute):
            fetched = None if requests is None else self._sample(requests, specs)
            end.record()
        return fetched

    def _sample(self, requests: tuple[RequestKey, ...], specs: Sequence[SampleSpec]) -> TokenFetch | None:
        rows = len(requests)
        # The next plan names its pending tokens by request. The first row of a request comes last, and stays.
        self._sampled = {requests[row]: row for row in range(rows - 1, -1, -1)}
        if rows == 0:
            return None
        shared, collective = self._programs.shared, self._programs.shared.model.collective
        sampled, finite = shared.sampled[:rows], shared.finite[:rows]
        if collective.rank != 0:
            collective.broadcast(sampled)  # rank 0 samples, so that all ranks continue with the same tokens
            return None
        prepared = prepare(specs, self.arch.vocab_size)
        if prepared.plain:
            chosen = SampledTokens(prepared, sampled, finite)
        else:
            chosen = choose(shared.logits[:rows], prepared, finite)
            sampled.copy_(chosen.tokens[:rows])
        collective.broadcast(sampled)
        return chosen.fetch()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self.swap.close()
        self._programs.close()
        self.pools.close()


class _Staging:
    def __init__(self, words: int) -> None:
        self.tensor = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.array = self.tensor.numpy()
        self.uploaded = torch.cuda.Event()


@dataclass(slots=True)
class _CudaStep:
    """``PendingStep`` of a ``CudaWorker``."""

    worker: CudaWorker
    requests: tuple[RequestKey, ...] | None
    """The request of each token that is chosen; None: the plan had no spans."""
    before: torch.cuda.Event | None
    """End of the previous step on the device."""
    begin: torch.cuda.Event
    end: torch.cuda.Event
    """Recorded when the tokens were chosen."""
    memory: tuple[int, int] | None
    checks: tuple[PageCheck, ...]
    sums: torch.Tensor | None
    """Checksums of ``checks``, on the host once ``end`` has passed."""
    fetched: TokenFetch | None = None
    """The tokens chosen; None until then, without any, and on ranks that choose none."""
    unwanted: frozenset[int] = frozenset()
    """Rows whose token is not returned."""

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        """See ``PendingStep.choose``."""
        self.unwanted = frozenset(row for row, spec in enumerate(specs) if spec is None)
        self.fetched = self.worker.sample(self.requests, [spec or NO_SPEC for spec in specs], self.end)

    def result(self) -> StepResult:
        requests = (self.requests or ()) if self.fetched is not None else ()
        chosen = self.fetched.resolve(requests) if self.fetched is not None else []
        self.end.synchronize()
        timings = {"device": self.begin.elapsed_time(self.end) / 1e3}
        if self.before is not None:
            timings["gap"] = self.before.elapsed_time(self.begin) / 1e3
        if self.sums is not None:
            self.worker.computed.compare(self.checks, self.sums)
        swapped = self.worker.swap.counters()
        return StepResult(
            sampled=tuple(
                Sampled(request, token, logprob)
                for row, (request, (token, logprob)) in enumerate(zip(requests, chosen, strict=True))
                if row not in self.unwanted
            ),
            swap_in_bytes=swapped.in_bytes,
            swap_out_bytes=swapped.out_bytes,
            swap_in_seconds=swapped.in_seconds,
            swap_out_seconds=swapped.out_seconds,
            swap_out_backlog=swapped.backlog,
            timings=timings,
            memory=self.memory,
        )
