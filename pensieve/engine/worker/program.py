"""The GPU work for the spans of one step, over memory with fixed addresses.

A ``StepProgram`` takes up to a number of tokens, samples and pages; a smaller step is padded. Two steps
differ only in one block of int32 in device memory, filled by one copy. So the program can be captured once in
a CUDA graph and replayed for every step of its size. Run without a graph it does the same.

``CudaBatch`` has a plan's spans as the arrays that a step uploads.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pensieve.core import Ints, RequestKey
from pensieve.engine.plan import Plan, Span
from pensieve.engine.sampling.sampler import greedy_tokens, sanitize
from pensieve.engine.worker import spans as span_columns
from pensieve.engine.worker.spans import Ints32, SpanColumns
from pensieve.kernels.accepted import ENTRY, MOST_ROWS, StepRows, Undecided, complete_rows, shorten_items
from pensieve.kernels.arguments import HeadPrep, Logits
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.kinds import Geometry, StepKind
from pensieve.kernels.attention.plan import AttentionPlan, DoesNotFit, words_of
from pensieve.kernels.attention.prefixes import PrefixGroupRule
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.ragged_paged_attention import attend
from pensieve.kernels.recurrence import NO_PAGE, Recurrence
from pensieve.kernels.spans import POSITION
from pensieve.kernels.state_chunks import RecurrentPlan, make_recurrent_plan, recurrent
from pensieve.kernels.upload import upload
from pensieve.model.transformer import Transformer

NO_SLOT = span_columns.NO_SLOT
"""Slot of a token whose keys and values are not stored."""
NO_ENTRIES: Final = np.empty((0, ENTRY), np.int32)
NO_DRAFTS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class CudaBatch:
    """T concatenated tokens of S spans, over concatenated page tables. Spans of prefix groups come first,
    group by group; the others keep the plan's order. The device completes undecided spans: see ``kernels.accepted``."""

    tokens: Ints32
    """[T]; ``PENDING`` where ``source`` names the token, or where an undecided span begins."""
    source: Ints32
    """[T]: row of the token in the previous step's samples, or -1."""
    positions: Ints32
    """[T]; of undecided spans, the least."""
    slots: Ints32
    """[T]: slot of each token's keys and values in group 0, ``page * N + offset``, or ``NO_SLOT``; as ``positions``."""
    spans: Ints
    """[S, 4]: first row of q, tokens, position, start of its page table in ``pages``. The position of an undecided span
    is the latest."""
    pages: Ints32
    """All page tables, then all window tables."""
    sample_rows: Ints32
    """The tokens after which one is chosen, in the order of ``Plan.specs``."""
    undecided: Ints32
    """[U, ENTRY]: the undecided spans."""
    drafts: Ints32
    """Their undecided drafts."""
    max_context: int
    prefix_groups: Ints | None = None
    """[n, 3], see ``kernels.attention.prefixes``; None: every span reads all of its context."""
    window_slots: Ints32 | None = None
    """[T]: as ``slots``, in the window group; None: there is none."""
    window_spans: Ints | None = None
    """[S, 4]: ``spans`` with the starts of their window tables in ``pages``."""
    chains: Ints | None = None
    """See ``SpanColumns.chains``; None: the plan has none."""


def make_cuda_batch(
    plan: Plan, page_tokens: int, sampled: Mapping[RequestKey, int], rule: PrefixGroupRule | None = None
) -> CudaBatch:
    """Return the batch of a plan with at least one span. ``sampled``: first row of each request in the previous
    step's samples. ``rule``: decides which spans form prefix groups; None: none do. Raises ValueError like
    ``SpanColumns.from_plan``."""
    columns = SpanColumns.from_plan(plan, page_tokens)
    place: Sequence[int] = range(len(plan.spans))
    host = _span_array(columns)
    # A chain's spans must stay together.
    movable = all(chain.first == chain.last for chain in plan.chains)
    found = rule.find(host, columns.pages) if rule is not None and movable else None
    if found is not None:
        place = np.argsort(found.order).tolist()
        ordered = replace(
            plan,
            spans=tuple(plan.spans[index] for index in found.order.tolist()),
            chains=tuple(
                msgspec.structs.replace(chain, first=place[chain.first], last=place[chain.last])
                for chain in plan.chains
            ),
        )
        columns = SpanColumns.from_plan(ordered, page_tokens)
        host = _span_array(columns)
    source = np.full(len(columns.tokens), -1, dtype=np.int32)
    undecided, drafts = NO_ENTRIES, NO_DRAFTS
    spans = dict(zip(place, plan.spans, strict=True))
    for row, at in columns.pending():
        if spans[at].undecided is None:
            source[row] = sampled[spans[at].request]
    if columns.undecided.any():
        undecided, drafts = _undecided(spans, host, sampled)
        host[:, POSITION] += columns.undecided
    asked = [
        (at, span.num_chosen) for at, span in zip(place, plan.spans, strict=True) if span.sample is not None
    ]
    chosen = columns.chosen_rows([at for at, _ in asked], [count for _, count in asked])
    pages, window_spans = columns.pages, None
    if columns.window_pages is not None:
        window_spans = host + np.array([0, 0, 0, len(pages)])
        pages = np.concatenate([pages, columns.window_pages])
    return CudaBatch(
        tokens=columns.tokens,
        source=source,
        positions=columns.positions.astype(np.int32),
        slots=columns.slots.astype(np.int32),
        spans=host,
        pages=pages,
        sample_rows=chosen.astype(np.int32),
        undecided=undecided,
        drafts=drafts,
        max_context=int((host[:, POSITION] + columns.length).max()),
        prefix_groups=found.table if found is not None else None,
        window_slots=None if columns.window_slots is None else columns.window_slots.astype(np.int32),
        window_spans=window_spans,
        chains=columns.chains if plan.chains else None,
    )


def _undecided(
    spans: Mapping[int, Span], host: Ints, sampled: Mapping[RequestKey, int]
) -> tuple[Ints32, Ints32]:
    """Return ``CudaBatch.undecided`` and ``drafts``. ``spans``: by their row of ``host``."""
    entries, drafts, used = [], [], 0
    for at, span in spans.items():
        if span.undecided is not None:
            first, rows, _, table = host[at].tolist()
            assert max(rows, len(span.undecided)) <= MOST_ROWS, f"{span.request}: too many drafts"
            entries.append((first, rows, sampled[span.request], len(span.undecided), used, table))
            drafts.append(span.undecided)
            used += len(span.undecided)
    return np.array(entries, np.int32), np.concatenate(drafts).astype(np.int32)


def _span_array(columns: SpanColumns) -> Ints:
    first_rows = columns.ends - columns.length
    return np.stack([first_rows, columns.length, columns.start, columns.first_page], axis=1)


ALIGNMENT = 32
"""int32 words; sections start at multiples, since kernels are compiled for aligned pointers."""
NO_CHAIN = (0, 0, NO_PAGE, NO_PAGE, 0, NO_PAGE)
"""A chain of no tokens: padding."""
LT_TOKENS = 128
"""Matrix products of up to this many tokens use cuBLASLt, larger ones cuBLAS. On an H200 a step of a 13B with
10 KV heads takes 0.94 to 0.98 of the time with cuBLASLt at 16 to 128 tokens, and 0.99 to 1.01 at 160 to 256
(``bench/results/graph_sizes_13b_h200.md``); 1.00 at 1 and 8 (``step_parts_13b_h200.md``)."""


class LayerWait(Protocol):
    """Makes the current stream wait for a layer's swap-in (``SwapEngine.wait``)."""

    def __call__(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory and settings shared by all programs of a worker."""

    model: Transformer
    pool: torch.Tensor | Mapping[int, torch.Tensor]
    """Device pages of each layer that attends, [P, 2, Hkv, N, D]."""
    wait: LayerWait
    sampled: torch.Tensor
    """int64 [max samples]: tokens sampled by the latest step."""
    logits: torch.Tensor
    """float32 [max samples, vocab] of the latest step, without NaN or infinity."""
    finite: torch.Tensor
    """bool [max samples]: whether the model's own logits had none."""
    scratch: Scratch
    geometry: Geometry
    page_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """The different windows of the model's layers; None: a layer that sees everything. Each has its own plan."""
    window_tables: bool = False
    """Whether layers with windows have slots and page tables of their own."""
    states: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """State pages of each recurrent layer: inputs of the convolution, and states."""
    polled: bool = False
    """Whether another thread looks at events and changes mappings at any time, as that of an elastic tier does."""


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """Upper limits of a program."""

    tokens: int
    samples: int
    pages: int
    kind: StepKind
    attention: tuple[Capacity, ...]
    """One for each of ``SharedState.windows``."""
    chains: int = 0
    """Chains of few tokens, which are computed one token after the other. 0: the model has no recurrent layers, or the
    program is for one step only, whose chains may be of any length."""
    undecided: int = 0
    """Undecided spans."""
    drafts: int = 0
    """Their undecided drafts."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Hold back the garbage collector: freeing the graphs or pinned memory of an older worker ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepProgram:
    """One step's work on the device, for steps up to a size; see the module docstring."""

    def __init__(self, shared: SharedState, size: ProgramSize, geometry: Geometry | None = None) -> None:
        """``geometry``: of this program's attention; None: the shared one."""
        self.size = size
        self._shared = shared
        self._geometry = geometry or shared.geometry
        self._graph: torch.cuda.CUDAGraph | None = None
        device = shared.sampled.device
        plans = [_words_name(window) for window in shared.windows]
        lengths = {
            "tokens": size.tokens, "source": size.tokens, "positions": size.tokens, "slots": size.tokens,
            **({"window_slots": size.tokens} if shared.window_tables else {}),
            "sample_rows": size.samples, **dict(zip(plans, map(words_of, size.attention), strict=True)),
            **({"chains": 6 * size.chains} if size.chains else {}),
            **(
                {"undecided": ENTRY * size.undecided, "drafts": size.drafts, "rejected": size.tokens}
                if size.undecided else {}
            ),
            "pages": size.pages,
        }  # fmt: skip
        at = 0
        self._at: dict[str, int] = {}
        for name, length in lengths.items():
            self._at[name] = at
            at += -(-length // ALIGNMENT) * ALIGNMENT
        self.words = at
        """int32 words of a full upload."""
        self._block = torch.zeros(at, dtype=torch.int32, device=device)
        view = {name: self._block[start : start + lengths[name]] for name, start in self._at.items()}
        self._view = view
        for name in self._slot_names():
            view[name].fill_(NO_SLOT)
        self._rows = StepRows(view["tokens"], view["source"], view["positions"], view["slots"])
        self._undecided: Undecided | None = None
        if size.undecided:
            entries = view["undecided"].view(-1, ENTRY)
            self._undecided = Undecided(entries, view["drafts"], view["rejected"])
        self._chains: RecurrentPlan | None = None
        if size.chains:
            chains = view["chains"].view(-1, 6)
            chains.copy_(torch.tensor(NO_CHAIN))
            self._chains = RecurrentPlan(((None, chains),), covers_all=False)
        self._plans = {
            window: AttentionPlan(
                size.tokens, replace(self._geometry, window=window), view[_words_name(window)],
                kind=size.kind, capacity=capacity, scratch=shared.scratch,
            )
            for window, capacity in zip(shared.windows, size.attention, strict=True)
        }  # fmt: skip
        """The attention plan of the layers of each window."""

    def pack(self, batch: CudaBatch, staging: npt.NDArray[np.int32]) -> int:
        """Write a step into ``staging`` int32 [words]; return the number of words used. Raises DoesNotFit
        when it is too large; ``staging`` is then invalid."""
        # Only layers that see everything read common prefixes together.
        windowed = batch.spans if batch.window_spans is None else batch.window_spans
        packed = {
            _words_name(window): plan.pack(batch.spans, batch.prefix_groups)
            if window is None
            else plan.pack(windowed)
            for window, plan in self._plans.items()
        }
        count, samples, size = len(batch.tokens), len(batch.sample_rows), self.size
        if count > size.tokens or samples > size.samples or len(batch.pages) > size.pages:
            raise DoesNotFit(f"{count} tokens, {samples} samples, {len(batch.pages)} pages: more than {size}")
        if len(batch.undecided) > size.undecided or len(batch.drafts) > size.drafts:
            raise DoesNotFit(
                f"{len(batch.undecided)} undecided spans, {len(batch.drafts)} drafts: more than {size}"
            )
        parts = [("tokens", batch.tokens, 0), ("source", batch.source, -1), ("positions", batch.positions, 0),
                 ("slots", batch.slots, NO_SLOT), ("sample_rows", batch.sample_rows, 0)]  # fmt: skip
        if self._shared.window_tables:
            assert batch.window_slots is not None
            parts.append(("window_slots", batch.window_slots, NO_SLOT))
        if size.undecided:
            parts += [("undecided", batch.undecided.reshape(-1), 0), ("drafts", batch.drafts, 0),
                      ("rejected", NO_DRAFTS, 0)]  # fmt: skip
        for name, values, padding in parts:
            start, length = self._at[name], len(self._view[name])
            staging[start : start + len(values)] = values
            staging[start + len(values) : start + length] = padding
        for name, words in packed.items():
            staging[self._at[name] : self._at[name] + len(words)] = words
        self._pack_chains(batch, staging)
        end = self._at["pages"] + len(batch.pages)
        staging[self._at["pages"] : end] = batch.pages
        return end

    def _pack_chains(self, batch: CudaBatch, staging: npt.NDArray[np.int32]) -> None:
        """Write the chains into ``staging``, or plan them for this one step."""
        if not self._shared.states:
            return
        assert batch.chains is not None
        if not self.size.chains:
            dtype = self._shared.model.weights.embedding.dtype
            device = self._shared.sampled.device
            self._chains = make_recurrent_plan(batch.chains, self.size.tokens, dtype, device)
            return
        if len(batch.chains) > self.size.chains:
            raise DoesNotFit(f"{len(batch.chains)} chains: more than {self.size}")
        start = self._at["chains"]
        section = staging[start : start + 6 * self.size.chains].reshape(-1, 6)
        section[: len(batch.chains)] = batch.chains
        section[len(batch.chains) :] = NO_CHAIN

    def _slot_names(self) -> tuple[str, ...]:
        """Return the sections with the slots of full layers and of windowed ones."""
        return ("slots", "window_slots") if self._shared.window_tables else ("slots",)

    def upload(self, staging: torch.Tensor, words: int) -> None:
        """Queue the copy of the packed step; ``staging`` is pinned and must not change until the copy is done."""
        upload(self._block, staging, words)

    def run(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture ``run`` in a graph; waits for the device. May be called between two steps."""
        with torch.cuda.stream(stream):
            sampled = self._shared.sampled.clone()  # the next step may need it
            self._compute()  # without spans: compiles kernels and lets libraries choose theirs
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL, too, has a thread that polls events at any time: it must not invalidate the capture.
        polled = self._shared.polled or self._shared.model.collective.ranks > 1
        mode = "thread_local" if polled else "global"
        with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            self._compute()
        with torch.cuda.stream(stream):
            graph.replay()  # without spans: the first replay uploads the graph, which must not delay a step
            self._shared.sampled.copy_(sampled)
        self._graph = graph

    def _compute(self) -> None:
        # Invariant steps of every size take the same library.
        fixed = self._shared.geometry.piece > 0
        with preferred_blas(LT_TOKENS if fixed else self.size.tokens, self._shared.sampled.device):
            self._forward()

    def _forward(self) -> None:
        shared, view, samples = self._shared, self._view, self.size.samples
        # A pending token never passes through the host: the previous step left it on the device.
        complete_rows(self._rows, shared.sampled, self._undecided, view["pages"], shared.page_tokens)
        if self._undecided is not None:
            self._shorten_items(self._undecided)
        logits = shared.model.forward(
            view["tokens"], view["positions"], self._attend, view["sample_rows"], self._recur
        )
        if shared.model.collective.rank != 0:
            return  # rank 0 samples
        logits, finite = sanitize(logits)
        shared.logits[:samples].copy_(logits)
        shared.finite[:samples].copy_(finite)
        shared.sampled[:samples].copy_(greedy_tokens(logits))

    def _shorten_items(self, undecided: Undecided) -> None:
        # Models with windows have a second KV group, and no drafts.
        for plan in self._plans.values():
            items = plan.capacity.narrow, plan.capacity.wide
            tiles = plan.narrow.rows, plan.wide.rows
            positions = self._view["positions"]
            shorten_items(plan.words, positions, undecided.rejected, items, tiles, self._geometry.groups)

    def _attend(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        """``pensieve.model.transformer.Attend`` over the paged pool."""
        # Before the write, not only before the read: a swapped-in page may be the one to append to.
        self._shared.wait(layer)
        pool, arch = self._shared.pool[layer], self._shared.model.arch
        window = arch.layers[layer].window
        slots = self._view[self._slot_names()[-1 if window is not None else 0]]
        q = kv_write(pool, qkv, slots, prep, one_size=self._shared.geometry.piece > 0)
        logits = Logits(arch.attention_scale, arch.softcap, prep.sinks)
        return attend(q, pool, self._plans[window], self._view["pages"], logits)

    def _recur(
        self, layer: int, inputs: torch.Tensor, gates: torch.Tensor, recurrence: Recurrence
    ) -> torch.Tensor:
        """See ``pensieve.model.recurrent.Recur``."""
        self._shared.wait(layer)
        assert self._chains is not None
        return recurrent(inputs, gates, self._shared.states[layer], recurrence, self._chains)


def _words_name(window: int | None) -> str:
    """Return the section of a program's block with the words of a plan."""
    return "words" if window is None else f"words of window {window}"


@contextlib.contextmanager
def preferred_blas(tokens: int, device: torch.device) -> Iterator[None]:
    """Use the library that is faster for matrix products of this many tokens; see ``LT_TOKENS``."""
    if tokens > LT_TOKENS or device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
