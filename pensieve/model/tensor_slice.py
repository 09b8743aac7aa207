"""A rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.model.arch import ModelError

_EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one tensor, or of several concatenated ones."""

    rows: tuple[slice, ...] = ()
    """For each stretch; (): all rows."""
    columns: slice | None = None
    """For every tensor; None: all."""
    lengths: tuple[int, ...] = ()
    """Rows of each stretch. A tensor is one stretch or several; (): each is one."""
    view: tuple[int, ...] = ()
    """Shape in which a single tensor is sliced; (): its own."""

    def stretches(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the parts of each tensor as views; nothing is read from a mapped file yet. Raises ModelError when a
        tensor ends inside a stretch."""
        lengths, rows, found = list(self.lengths), list(self.rows), []
        if self.view:
            tensors = [tensor.view(self.view) for tensor in tensors]
        for tensor in tensors:
            own = [len(tensor)] if not lengths else [lengths.pop(0)]
            while sum(own) < len(tensor):
                own.append(lengths.pop(0))
            if sum(own) != len(tensor):
                raise ModelError(f"a tensor has {len(tensor)} rows, not the {own[0]} that config.json says")
            kept = [rows.pop(0) if rows else _EVERY for _ in own]
            parts = [part[chosen] for part, chosen in zip(tensor.split(own), kept, strict=True)]
            found.append(parts if self.columns is None else [part[:, self.columns] for part in parts])
        return found

    def select(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of all tensors in order, as views."""
        return [part for parts in self.stretches(tensors) for part in parts]

    def select_joined(self, joined: torch.Tensor) -> torch.Tensor:
        """Slice tensors that are concatenated in ``joined`` and concatenate the parts."""
        if self == WHOLE_TENSOR:
            return joined
        return torch.cat(self.select((joined,))).contiguous()


WHOLE_TENSOR = TensorSlice()
NO_ROWS = TensorSlice((slice(0, 0),))
