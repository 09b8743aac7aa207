"""A step's work list in device memory, with the scratch that its pieces write; shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pensieve.kernels.attention_plan import ITEM, MERGE, Geometry, Work, choose_wide, make_work
from pensieve.kernels.attention_tiles import Tile, TileSet, choose_tiles, width_of
from pensieve.kernels.span_table import HostSpans

COUNTS = 4
"""First words: narrow items, wide items, merges; one is unused."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Most work that a plan in fixed memory takes. A launch with capacity 0 is never made."""

    narrow: int
    wide: int
    merges: int
    partial_rows: int


class AttentionPlan:
    """The plan of a step, or, with a capacity, of all steps that replay one captured graph.

    For a graph: make a plan with a capacity, store it in the ``plans`` of the captured span table under
    ``plan_key(q, pool)``, capture, and call ``refill`` with the spans of each step before its replay.
    """

    def __init__(
        self,
        host: HostSpans,
        num_rows: int,
        geometry: Geometry,
        device: torch.device,
        *,
        tiles: TileSet | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        """``host`` int64 [S, 4]: the spans; ``num_rows``: rows of q. Raises ValueError as ``refill`` does."""
        self.geometry, self.num_rows = geometry, num_rows
        self.tiles = tiles or choose_tiles(geometry.head_dim, geometry.element_bytes)
        self.wide = choose_wide(host, geometry, self.tiles)
        self.narrow = self.tiles.narrow
        work = self._work(host)
        need = _need(work)
        self.capacity = capacity or need
        self.beside = self.capacity.narrow > 0 and self.capacity.wide > 0
        if self.beside:
            self.narrow = self.tiles.narrow_beside
            work = self._work(host)
            self.capacity = capacity or _need(work)
        self.wide_at = COUNTS + ITEM * self.capacity.narrow
        self.merges_at = self.wide_at + ITEM * self.capacity.wide
        words = self.merges_at + MERGE * self.capacity.merges
        scratch = max(1, self.capacity.partial_rows) * geometry.kv_heads
        self.words = torch.zeros(words, dtype=torch.int32, device=device)
        self.partial = torch.empty(scratch, width_of(geometry.head_dim), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(scratch, dtype=torch.float32, device=device)
        self.hold = torch.zeros(1, dtype=torch.int32, device=device)
        """Written, never read: see the launch of narrow items beside wide ones."""
        self._store(work)

    def refill(self, host: HostSpans) -> None:
        """Take on another step; ordered with launches by the current stream.

        Raises ValueError, and changes nothing, when the step needs more than the capacity.
        """
        self._store(self._work(host))

    def launches(self) -> list[tuple[Tile, int, int, int]]:
        """Tile, index of the count, first word of the items, and most items, of every launch; wide first."""
        both = [
            (self.wide, 1, self.wide_at, self.capacity.wide),
            (self.narrow, 0, COUNTS, self.capacity.narrow),
        ]
        return [launch for launch in both if launch[3] > 0]

    def _work(self, host: HostSpans) -> Work:
        return make_work(host, self.num_rows, self.geometry, self.tiles, self.narrow, self.wide)

    def _store(self, work: Work) -> None:
        need = _need(work)
        for name in ("narrow", "wide", "merges", "partial_rows"):
            if getattr(need, name) > getattr(self.capacity, name):
                raise ValueError(
                    f"the step needs {name}={getattr(need, name)}, the plan holds {getattr(self.capacity, name)}"
                )
        words = np.zeros(len(self.words), dtype=np.int32)
        words[:3] = len(work.narrow), len(work.wide), len(work.merges)
        for start, part in ((COUNTS, work.narrow), (self.wide_at, work.wide), (self.merges_at, work.merges)):
            words[start : start + part.size] = part.reshape(-1)
        # Pageable memory: the driver has read it when the call returns, so the array may go.
        self.words.copy_(torch.from_numpy(words), non_blocking=True)


def plan_key(q: torch.Tensor, pool: torch.Tensor) -> str:
    """Name under which a span table keeps the plan for such tensors."""
    return f"attention/{tuple(q.shape)}/{pool.shape[2]}/{q.dtype}"


def geometry_of(q: torch.Tensor, pool: torch.Tensor) -> Geometry:
    """Geometry of a call; a CPU, where only the interpreter runs, counts as 4 multiprocessors."""
    processors = 4
    if q.is_cuda:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return Geometry(q.shape[1], pool.shape[2], q.shape[2], q.element_size(), processors)


def _need(work: Work) -> Capacity:
    return Capacity(len(work.narrow), len(work.wide), len(work.merges), work.partial_rows)
