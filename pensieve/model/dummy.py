"""Random weights instead of a checkpoint, made on the device; for benchmarks, where only shapes and dtypes matter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

from pensieve.kernels.fp8_reference import code_dtype, encode
from pensieve.model.tensor_slice import WHOLE_TENSOR, TensorSlice

SEED: Final = 20240410
QKV_GAIN: Final = 2.0
"""Queries and keys of this scale make attention select some tokens rather than average over all."""


class DummySource:
    """Makes any requested tensor. The same name, shape, dtype and kind of device give the same values.

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
