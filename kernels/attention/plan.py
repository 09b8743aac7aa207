"""A step's attention, planned: its work lists in device memory, with the scratch that its pieces write.

All layers of a step run one plan: ``attend(q, pool, plan, tables, ...)`` of ``kernels.ragged_paged_attention``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.hopper import launch as hopper
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.party_lists import KIND, UNLIMITED, make_group_lists
from pensieve.kernels.attention.work_lists import (
    HEADER,
    ITEM,
    LISTS_AT,
    MERGE,
    MERGES,
    NARROW,
    SHARE_AT,
    WIDE,
    WorkLists,
    make_work_lists,
)
from pensieve.kernels.spans import Ints, Spans

PREFIX_GROUP_KIND = KIND
"""The kind of every step in which spans read a beginning together."""


class DoesNotFit(ValueError):
    """A step needs more memory than its plan has."""


class AttentionPlan:
    """The plan of a step, or, in memory of a fixed capacity, of all steps that replay one captured graph.

    For a graph: make a plan with ``capacity_for`` the graph's kind and sizes, and capture ``attend`` calls that run it.
    Before each replay, copy what ``pack`` returns for the step to the beginning of ``words``. Memory of 0 words is a
    plan without work, which is safe to warm up with.
    """

    def __init__(
        self,
        num_rows: int,
        geometry: Geometry,
        device: torch.device,
        *,
        kind: StepKind,
        capacity: Capacity,
        words: torch.Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """``num_rows``: rows of q. ``words``: int32 [at least ``words_of(capacity)``] on ``device``, zeroed by the
        caller, for the plan to lie in; without them the plan takes memory of its own. Raises ValueError when words or
        scratch are too small."""
        self.num_rows, self.geometry, self.kind, self.capacity = num_rows, geometry, kind, capacity
        self.narrow, self.wide = kind.narrow_tile(geometry.tiles), geometry.tiles.wide
        if words is None:
            words = torch.zeros(words_of(capacity), dtype=torch.int32, device=device)
        if words.dtype != torch.int32 or words.dim() != 1 or len(words) < words_of(capacity):
            raise ValueError(
                f"words are {words.dtype} {tuple(words.shape)}: int32 [{words_of(capacity)}] at least is needed"
            )
        if not words.is_contiguous() or words.device.type != device.type:
            raise ValueError(f"words must be contiguous and on {device}")
        self.words = words
        self.scratch = scratch or Scratch(capacity.partial_rows, geometry, device)
        if self.scratch.rows < capacity.partial_rows:
            raise ValueError(f"a scratch of {self.scratch.rows} rows, {capacity.partial_rows} are needed")

    @classmethod
    def from_spans(
        cls,
        spans: Spans,
        num_rows: int,
        geometry: Geometry,
        device: torch.device,
        *,
        capacity: Capacity | None = None,
        parties: Ints | None = None,
    ) -> AttentionPlan:
        """The plan of one step, of just its size unless ``capacity`` is given; ``parties``: see ``pack``."""
        kind = classify(spans, geometry) if parties is None else PREFIX_GROUP_KIND
        work = _work(spans, parties, num_rows, geometry, kind, capacity)
        plan = cls(num_rows, geometry, device, kind=kind, capacity=capacity or _need(work))
        plan._upload(plan._packed(work))
        return plan

    def pack(self, spans: Spans, parties: Ints | None = None) -> npt.NDArray[np.int32]:
        """The words of a step, to be put at the beginning of ``words``: only as many as the step's own work takes.
        ``parties``: what ``prefixes`` found, for plans of the kind ``PARTY_KIND``. Raises DoesNotFit when the step
        needs more than the capacity: without parties it may yet fit."""
        work = _work(spans, parties, self.num_rows, self.geometry, self.kind, self.capacity)
        return self._packed(work)

    def refill(self, spans: Spans, parties: Ints | None = None) -> None:
        """Take on another step, ordered with launches by the current stream. Copies from pageable memory, for which
        the host may have to wait: a server copies ``pack`` itself. Raises as ``pack`` does and then changes nothing."""
        self._upload(self.pack(spans, parties))

    def check(self, q: torch.Tensor, pool: torch.Tensor) -> None:
        """Raises ValueError unless the plan was made for queries and pools of these shapes and sizes."""
        made_for = (self.num_rows, self.geometry.heads, self.geometry.kv_heads, self.geometry.head_dim)
        given = (len(q), q.shape[1], pool.shape[2], q.shape[2])
        if made_for != given or q.element_size() != self.geometry.element_bytes:
            raise ValueError(
                f"the plan is for [T, Hq, Hkv, D] = {list(made_for)} of {self.geometry.element_bytes} bytes, "
                f"the call has {list(given)} of {q.element_size()}"
            )
        if self.capacity.wide and self.wide.hopper and not hopper.addressable(q, pool):
            raise ValueError("the plan is for tensors that bulk copies can address, and these are not such")

    def _packed(self, work: WorkLists) -> npt.NDArray[np.int32]:
        need = _need(work)
        for name in ("narrow", "wide", "merges", "partial_rows"):
            if getattr(need, name) > getattr(self.capacity, name):
                raise DoesNotFit(
                    f"the step needs {name}={getattr(need, name)}, the plan holds {getattr(self.capacity, name)}"
                )
        narrow_at = HEADER + ITEM * need.wide
        merges_at = narrow_at + ITEM * need.narrow
        words = np.empty(merges_at + MERGE * need.merges, dtype=np.int32)
        words[:HEADER] = 0
        for which, count, place in (
            (NARROW, need.narrow, narrow_at),
            (WIDE, need.wide, HEADER),
            (MERGES, need.merges, merges_at),
        ):
            words[which], words[LISTS_AT + which] = count, place
        words[SHARE_AT] = work.wide_programs
        words[HEADER:narrow_at] = work.wide.reshape(-1)
        words[narrow_at:merges_at] = work.narrow.reshape(-1)
        words[merges_at:] = work.merges.reshape(-1)
        return words

    def _upload(self, packed: npt.NDArray[np.int32]) -> None:
        # Pageable memory: the driver has read it when the call returns, so the array may go.
        self.words[: len(packed)].copy_(torch.from_numpy(packed), non_blocking=True)


def _work(
    spans: Spans,
    parties: Ints | None,
    num_rows: int,
    geometry: Geometry,
    kind: StepKind,
    capacity: Capacity | None,
) -> WorkLists:
    if parties is None:
        return make_work_lists(spans, num_rows, geometry, kind)
    if kind is not PREFIX_GROUP_KIND:
        raise DoesNotFit(f"a plan for {kind.value} steps has no launches for spans that read together")
    return make_group_lists(spans, parties, num_rows, geometry, capacity or UNLIMITED)


def words_of(capacity: Capacity) -> int:
    """Words that a plan of this capacity needs at most."""
    return HEADER + ITEM * (capacity.narrow + capacity.wide) + MERGE * capacity.merges


def geometry_of(q: torch.Tensor, pool: torch.Tensor) -> Geometry:
    """The geometry of a call. A CPU, where only the interpreter runs, counts as 4 multiprocessors."""
    geometry = Geometry(q.shape[1], pool.shape[2], q.shape[2], q.element_size(), multiprocessors_of(q.device))
    fits = hopper.supports(geometry, q.dtype, pool.shape[3], q.device)
    return replace(geometry, hopper=fits and hopper.addressable(q, pool))


def geometry_for(heads: int, pool: torch.Tensor) -> Geometry:
    """The geometry of all calls with ``heads`` query heads and one layer's ``pool`` [P, 2, Hkv, N, D], whether the
    queries lie in memory of their own or beside keys and values."""
    return geometry_of(pool.new_empty(1, heads, pool.shape[4]), pool)


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _need(work: WorkLists) -> Capacity:
    return Capacity(len(work.narrow), len(work.wide), len(work.merges), work.partial_rows)
