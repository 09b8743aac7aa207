"""What the ranks of one model do together inside a step: each computes with its shard of the weights.

All ranks call the same methods in the same order with tensors of the same shapes. The values that come back are the
same on every rank to the last bit, or the ranks' residual streams would drift apart.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """The ranks of one model. On a GPU a call queues its work on the current stream, and can be captured in a graph."""

    @property
    def rank(self) -> int:
        """Which one this is; rank 0 leads: its samples count."""
        ...

    @property
    def ranks(self) -> int: ...

    def room(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory in which ``sum`` likes to find a part; None: anywhere will do. It is the same at every call."""
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, to be used before the next ``room``; ``part`` is contiguous, and overwritten."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Everybody's ``part`` [...], contiguous, by rank: [ranks, ...]."""
        ...

    def share(self, values: torch.Tensor) -> None:
        """Overwrite ``values``, contiguous, with those of rank 0."""
        ...

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number over all ranks. Waits for them; not for inside of a step."""
        ...


class Alone:
    """The only rank of a model that is not divided."""

    rank = 0
    ranks = 1

    def room(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]

    def share(self, values: torch.Tensor) -> None:
        pass

    def least(self, numbers: list[int]) -> list[int]:
        return numbers


ALONE = Alone()
