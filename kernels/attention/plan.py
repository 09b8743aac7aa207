"""A step's attention plan: work lists in device memory, and the scratch that their pieces write. All layers
share it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.copies import place as with_copies
from pensieve.kernels.attention.group_lists import PREFIX_GROUP_KIND, UNLIMITED, make_group_lists
from pensieve.kernels.attention.hopper import launch as hopper
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.work_lists import (
    COPIES,
    COPY,
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
from pensieve.kernels.checks import check_window
from pensieve.kernels.kv_codec import is_coded
from pensieve.kernels.spans import Ints, Spans


class DoesNotFit(ValueError):
    """The step needs more memory than the plan has."""


class AttentionPlan:
    """The plan of one step or, in memory of a fixed capacity, of all steps that replay one captured graph.

    For a graph: make a plan with ``capacity_for`` the graph's kind and sizes, and capture ``attend`` calls
    that run it. Before each replay, copy the result of ``pack`` to the beginning of ``words``. A plan in
    zeroed memory has no work, which is safe for warm-up.
    """

    def __init__(
        self,
        num_rows: int,
        geometry: Geometry,
        words: torch.Tensor,
        *,
        kind: StepKind,
        capacity: Capacity,
        scratch: Scratch | None = None,
    ) -> None:
        """``num_rows``: rows of q. ``words``: int32 [at least ``words_of(capacity)``] on the device, zeroed by the
        caller, to hold the plan. Raises ValueError when words or scratch are too small or the window is not
        positive."""
        check_window(geometry.window)
        self.num_rows, self.geometry, self.kind, self.capacity = num_rows, geometry, kind, capacity
        self.narrow, self.wide = kind.narrow_tile(geometry.tiles), geometry.tiles.wide
        if words.dtype != torch.int32 or words.dim() != 1 or len(words) < words_of(capacity):
            raise ValueError(
                f"words are {words.dtype} {tuple(words.shape)}: int32 [{words_of(capacity)}] at least is needed"
            )
        if not words.is_contiguous():
            raise ValueError("words must be contiguous")
        self.words = words
        self.scratch = scratch or Scratch(capacity.partial_rows, geometry, words.device, capacity.copies)
        if self.scratch.rows < capacity.partial_rows:
            raise ValueError(f"a scratch of {self.scratch.rows} rows, {capacity.partial_rows} are needed")
        if len(self.scratch.numbers) < capacity.copies:
            raise ValueError(f"a scratch of {len(self.scratch.numbers)} copies, {capacity.copies} are needed")

    @classmethod
    def from_spans(
        cls,
        spans: Spans,
        num_rows: int,
        geometry: Geometry,
        device: torch.device,
        *,
        capacity: Capacity | None = None,
        prefix_groups: Ints | None = None,
    ) -> AttentionPlan:
        """Return the plan of one step, exactly as large as needed without ``capacity``. ``prefix_groups``:
        see ``pack``."""
        check_window(geometry.window)
        kind = classify(spans, geometry) if prefix_groups is None else PREFIX_GROUP_KIND
        work = _work(spans, prefix_groups, num_rows, geometry, kind, capacity)
        capacity = capacity or _need(work)
        plan = cls(num_rows, geometry, make_words(capacity, device), kind=kind, capacity=capacity)
        plan._upload(plan._packed(work))
        return plan

    def pack(self, spans: Spans, prefix_groups: Ints | None = None) -> npt.NDArray[np.int32]:
        """Return the words of a step, to be copied to the beginning of ``words``; only as many as its work needs.
        ``prefix_groups``: the table of ``prefixes.PrefixGroups``, for plans of the kind ``PREFIX_GROUP_KIND`` without
        a window. Raises DoesNotFit when the step exceeds the capacity; without groups it may still fit. Raises
        ValueError for prefix groups in a windowed plan."""
        work = _work(spans, prefix_groups, self.num_rows, self.geometry, self.kind, self.capacity)
        return self._packed(work)

    def refill(self, spans: Spans, prefix_groups: Ints | None = None) -> None:
        """Replace the plan's step, ordered with launches by the current stream. Copies from pageable memory,
        which may make the host wait; a server copies the result of ``pack`` itself. Raises as ``pack`` does
        and then changes nothing."""
        self._upload(self.pack(spans, prefix_groups))

    def check(self, q: torch.Tensor, pool: torch.Tensor) -> None:
        """Raises ValueError unless the plan was made for queries and pools of these shapes and element size."""
        made_for = (self.num_rows, self.geometry.heads, self.geometry.kv_heads, self.geometry.head_dim)
        given = (len(q), q.shape[1], pool.shape[2], q.shape[2])
        if is_coded(pool) != self.geometry.coded:
            raise ValueError(
                f"the plan is for a {'coded' if self.geometry.coded else 'plain'} pool, not {pool.dtype}"
            )
        if made_for != given or q.element_size() != self.geometry.element_bytes:
            raise ValueError(
                f"the plan is for [T, Hq, Hkv, D] = {list(made_for)} of {self.geometry.element_bytes} bytes, "
                f"the call has {list(given)} of {q.element_size()}"
            )
        read = self.scratch.copies if self.geometry.copied_page else pool
        if self.capacity.wide and self.wide.hopper and not hopper.addressable(q, read):
            raise ValueError("the plan needs tensors that bulk copies can address")

    def _packed(self, work: WorkLists) -> npt.NDArray[np.int32]:
        need = _need(work)
        for name in ("narrow", "wide", "merges", "partial_rows", "copies"):
            if getattr(need, name) > getattr(self.capacity, name):
                raise DoesNotFit(
                    f"the step needs {name}={getattr(need, name)}, the plan holds {getattr(self.capacity, name)}"
                )
        narrow_at = HEADER + ITEM * need.wide
        merges_at = narrow_at + ITEM * need.narrow
        copies_at = merges_at + MERGE * need.merges
        words = np.empty(copies_at + COPY * need.copies, dtype=np.int32)
        words[:HEADER] = 0
        for which, count, place in (
            (NARROW, need.narrow, narrow_at),
            (WIDE, need.wide, HEADER),
            (MERGES, need.merges, merges_at),
        ):
            words[which], words[LISTS_AT + which] = count, place
        words[SHARE_AT], words[COPIES] = work.wide_programs, need.copies
        words[HEADER:narrow_at] = work.wide.reshape(-1)
        words[narrow_at:merges_at] = work.narrow.reshape(-1)
        words[merges_at:copies_at] = work.merges.reshape(-1)
        words[copies_at:] = work.copies.reshape(-1)
        return words

    def _upload(self, packed: npt.NDArray[np.int32]) -> None:
        # Pageable memory: the driver has read it when the call returns, so the array may be freed.
        self.words[: len(packed)].copy_(torch.from_numpy(packed), non_blocking=True)


def _work(
    spans: Spans,
    prefix_groups: Ints | None,
    num_rows: int,
    geometry: Geometry,
    kind: StepKind,
    capacity: Capacity | None,
) -> WorkLists:
    if prefix_groups is None:
        work = make_work_lists(spans, num_rows, geometry, kind)
    elif geometry.window is not None:
        raise ValueError("a windowed plan forms no prefix groups: its queries do not see their beginnings")
    elif kind is not PREFIX_GROUP_KIND:
        raise DoesNotFit(f"a plan for {kind.value} steps has no launches for prefix groups")
    else:
        work = make_group_lists(spans, prefix_groups, num_rows, geometry, capacity or UNLIMITED)
    return with_copies(work, geometry) if geometry.copied_page else work


def words_of(capacity: Capacity) -> int:
    """Most words that a plan of this capacity needs."""
    items = ITEM * (capacity.narrow + capacity.wide)
    return HEADER + items + MERGE * capacity.merges + COPY * capacity.copies


def make_words(capacity: Capacity, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return zeroed memory for a plan of this capacity."""
    return torch.zeros(words_of(capacity), dtype=torch.int32, device=device)


def geometry_of(q: torch.Tensor, pool: torch.Tensor) -> Geometry:
    """Return the geometry of a call. A CPU, where only the interpreter runs, counts as 4 multiprocessors."""
    geometry = Geometry(q.shape[1], pool.shape[2], q.shape[2], q.element_size(), multiprocessors_of(q.device))
    read = pool
    if is_coded(pool):
        geometry = replace(geometry, coded=True)
        if q.dtype != torch.bfloat16:
            return geometry
        geometry = replace(geometry, copied_page=pool.shape[3])
        read = q.new_empty(1, *pool.shape[1:])
    fits = hopper.supports(geometry, q.dtype, pool.shape[3], q.device)
    return replace(geometry, hopper=fits and hopper.addressable(q, read))


def geometry_for(heads: int, pool: torch.Tensor, dtype: torch.dtype | None = None) -> Geometry:
    """Return the geometry of all calls with ``heads`` query heads of ``dtype``, by default the pool's, and one layer's
    ``pool`` [P, 2, Hkv, N, D]. It holds for queries in memory of their own and for queries beside keys and values."""
    return geometry_of(pool.new_empty(1, heads, pool.shape[4], dtype=dtype or pool.dtype), pool)


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _need(work: WorkLists) -> Capacity:
    return Capacity(
        len(work.narrow), len(work.wide), len(work.merges), work.partial_rows, copies=len(work.copies)
    )
