"""What the ranks of one model do together inside a step: each computes with its shard of the weights.

All ranks call the same methods in the same order with tensors of the same shapes. The values that come back are the
same on every rank to the last bit, or the ranks' residual streams would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

BufferIndex = Literal[0, 1]
"""The block of a layer that a sum ends, attention or MLP: sums of the two alternate, whatever a step is made of."""
AddNorm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], tuple[torch.Tensor, torch.Tensor]
]
"""``pensieve.kernels.reference.add_norm``, or what keeps its promise on another device."""


class ReduceBuffer(Protocol):
    """Where a rank puts its part of a sum, [T, W], when there is a better place for it than any."""

    memory: torch.Tensor
    pieces: int
    """In how many pieces by rows the part should be made, so that one can be passed on while the next is made."""

    def rows_ready(self, start: int, end: int) -> None:
        """Rows ``start`` to ``end`` of the part are queued on the current stream."""
        return

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over all ranks, added to ``x`` in place, and the norm of that: as ``add_norm``, which it may use."""
        ...


class Collective(Protocol):
    """The ranks of one model. On a GPU a call queues its work on the current stream, and can be captured in a graph."""

    rank: int
    """Which one this is; rank 0 leads: its samples count."""
    ranks: int

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        """For a part of that shape; None, as always for one of no rows: anywhere will do, and ``sum`` takes it.
        Rooms of the same slot share their memory, and no two sums in a row have the same slot."""
        return None

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; ``part`` is contiguous, and overwritten."""
        ...

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Everybody's ``part`` [...], contiguous, by rank: [ranks, ...]."""
        ...

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite ``values``, contiguous, with those of rank 0."""
        ...

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        """The least of each number over all ranks. Waits for them; not for inside of a step."""
        ...


class SingleRank(Collective):
    """The only rank of a model that is not divided."""

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
