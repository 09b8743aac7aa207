"""A rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one tensor, or of several concatenated ones."""

    rows: tuple[slice, ...] = ()
    """For each tensor; (): all rows."""
    columns: slice | None = None
    """For every tensor; None: all."""
    lengths: tuple[int, ...] = ()
    """Rows of each of several concatenated tensors."""
    view: tuple[int, ...] = ()
    """Shape in which a single tensor is sliced; (): its own."""

    def select(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts as views; nothing is read from a mapped file yet. A single tensor may hold all that
        ``lengths`` names."""
        if len(tensors) == 1 and len(self.lengths) > 1:
            tensors = tensors[0].split(self.lengths)
        if self.view:
            tensors = [tensor.view(self.view) for tensor in tensors]
        rows = self.rows or (_EVERY,) * len(tensors)
        return [
            tensor[kept] if self.columns is None else tensor[kept, self.columns]
            for kept, tensor in zip(rows, tensors, strict=True)
        ]

    def select_joined(self, joined: torch.Tensor) -> torch.Tensor:
        """Slice tensors that are concatenated in ``joined`` and concatenate the parts."""
        if self == WHOLE_TENSOR:
            return joined
        parts = self.select(joined.split(self.lengths) if self.lengths else (joined,))
        return torch.cat(parts).contiguous()


WHOLE_TENSOR = TensorSlice()
NO_ROWS = TensorSlice((slice(0, 0),))
