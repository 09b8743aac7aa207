"""Which part of a tensor is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one tensor, or of several that belong together."""

    rows: tuple[slice, ...] = ()
    """Of each tensor; (): all of each."""
    columns: slice | None = None
    """Of every tensor; None: all."""
    lengths: tuple[int, ...] = ()
    """Rows that each of several tensors has before it is cut."""

    def select(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts, as views: of a file that is mapped, nothing is read yet."""
        rows = self.rows or (_EVERY,) * len(tensors)
        return [
            tensor[kept] if self.columns is None else tensor[kept, self.columns]
            for kept, tensor in zip(rows, tensors, strict=True)
        ]

    def select_joined(self, joined: torch.Tensor) -> torch.Tensor:
        """The parts one behind the other, of tensors that lie one behind the other; ``joined`` itself if it is all."""
        if self == WHOLE_TENSOR:
            return joined
        parts = self.select(joined.split(self.lengths) if self.lengths else (joined,))
        return torch.cat(parts).contiguous()


WHOLE_TENSOR = TensorSlice()
NO_ROWS = TensorSlice((slice(0, 0),))
