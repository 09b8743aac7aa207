"""Collective operations of the ranks of one model inside a step. Each rank computes with its shard of the
weights.

All ranks call the same methods in the same order with tensors of the same shapes. Results are the same on
every rank to the last bit, or the ranks' residual streams would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

BufferIndex = Literal[0, 1]
"""The block of a layer that an all-reduce ends, attention or MLP: the two alternate in every step."""
AddNorm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], tuple[torch.Tensor, torch.Tensor]
]
"""``pensieve.kernels.reference.add_norm``, or its equivalent on another device."""


class ReduceBuffer(Protocol):
    """Memory for a rank's part [T, W] of an all-reduce, from which the all-reduce is faster than from other memory."""

    memory: torch.Tensor
    pieces: int
    """Pieces by rows in which to compute the part, so that one can be sent while the next is computed."""

    def rows_ready(self, start: int, end: int) -> None:
        """Called when rows ``start`` to ``end`` of the part are queued on the current stream."""
        return

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the sum over all ranks to ``x`` in place and return both, as ``add_norm`` does (which it may use)."""
        ...


class Collective(Protocol):
    """The ranks of one model. On a GPU a call queues its work on the current stream and can be captured in a graph."""

    rank: int
    """This rank. Rank 0 leads: its samples count."""
    ranks: int

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        """Return memory for a part of this shape. None (always for no rows): use any memory, and ``all_reduce``.
        Buffers of the same index share memory. Two consecutive all-reduces never have the same index."""
        return None

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; ``part`` is contiguous and overwritten."""
        ...

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return each rank's ``part`` [...], contiguous, by rank: [ranks, ...]."""
        ...

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite ``values``, contiguous, with those of rank 0."""
        ...

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        """Return the minimum of each number over all ranks. Waits for them; not for use inside a step."""
        ...


class SingleRank(Collective):
    """The only rank of an undivided model."""

    rank = 0
    ranks = 1

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]

    def broadcast(self, values: torch.Tensor) -> None:
        pass

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        return numbers


SINGLE_RANK = SingleRank()
