"""Where weights come from: what a ``Checkpoint``, a ``GgufCheckpoint`` and a ``DummySource`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pensieve.model.tensor_slice import WHOLE_TENSOR, TensorSlice


class TensorSource(Protocol):
    """A table of tensors by name."""

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors have one shape, and equal values in the dtype in which they are loaded."""
        ...

    def get(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        tensor_slice: TensorSlice = WHOLE_TENSOR,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the ``tensor_slice`` part of the named tensors, concatenated along the first axis; whole,
        they have ``shape`` together. ``dtype`` None: the model's. Raises ModelError."""
        ...

    def has_codes(self, names: Sequence[str]) -> bool:
        """Return whether the named matrices are stored as 8-bit codes with scales by row, made for such products."""
        ...

    def get_codes(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``get``, as the codes of matrices and the scales of their rows, float32 [out]: those stored, or made from
        the values. ``tensor_slice`` takes whole rows."""
        ...
