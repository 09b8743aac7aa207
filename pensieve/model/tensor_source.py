"""Where weights come from: the protocol of all sources, the part of a tensor that a rank loads, and random weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from pensieve.kernels.fp8_reference import code_dtype, encode
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


SEED: Final = 20240410
QKV_GAIN: Final = 2.0
"""Queries and keys of this scale make attention select some tokens rather than average over all."""


class DummySource:
    """Makes any requested tensor, for benchmarks, where only shapes and dtypes matter.

    The same name, shape, dtype and kind of device give the same values.

    Weights are normal with a standard deviation of 1/sqrt(inputs), so that activations keep their scale from
    layer to layer and logits spread by about 1; norms are identities and biases 0. Embeddings are
    deliberately as small as that rule makes them: the layers' output outweighs them, or a tied head would
    repeat the input token.

    A part of a tensor has the values of the whole: the whole is made first, one tensor at a time, and sliced.
    """

    name = "dummy weights"

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = SEED) -> None:
        self._dtype, self._device, self._seed = dtype, device, seed
        self._generator = torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        return True

    def same(self, one: str, other: str) -> bool:
        """Always true: any tensor may replace another."""
        return True

    def get(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        tensor_slice: TensorSlice = WHOLE_TENSOR,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return tensor_slice.select_joined(self._whole(names, shape, dtype or self._dtype))

    def has_codes(self, names: Sequence[str]) -> bool:
        return True

    def get_codes(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.get(names, shape, tensor_slice)
        codes = torch.empty_like(values, dtype=code_dtype(self._device, self._dtype))
        scales = torch.empty(len(values), dtype=torch.float32, device=self._device)
        encode(values, codes, scales)
        return codes, scales

    def _whole(self, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if names[0].endswith((".bias", "_bias", ".sinks")):
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        # Seeded by name: values do not depend on the order of requests.
        self._generator.manual_seed(self._seed ^ zlib.crc32(" ".join(names).encode()))
        gain = QKV_GAIN if names[0].endswith("q_proj.weight") else 1.0
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        return weight.normal_(0.0, gain / shape[-1] ** 0.5, generator=self._generator)
