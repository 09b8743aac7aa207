"""Random weights in place of a checkpoint, made on the device: for benchmarks, where only shapes and dtypes matter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

from pensieve.model.tensor_slice import WHOLE_TENSOR, TensorSlice

SEED: Final = 20240410
QKV_GAIN: Final = 2.0
"""Queries and keys of this scale make attention pick some tokens out rather than average over all of them."""


class DummySource:
    """Makes any tensor that is asked for. The same name, shape, dtype and kind of device get the same values.

    Weights are normal with a standard deviation of 1/sqrt(inputs), so that activations keep their scale from layer to
    layer and logits spread by about 1; norms do nothing and biases are 0. Embeddings are as small as that rule makes
    them on purpose: what the layers add outweighs them, or a tied head would repeat the token that came in.

    A part of a tensor has the values of the whole one: that is made first, one tensor at a time, and cut.
    """

    name = "dummy weights"

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = SEED) -> None:
        self._dtype, self._device, self._seed = dtype, device, seed
        self._generator = torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        return True

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors are equal. Where one may stand for another, it does."""
        return True

    def get(
        self, names: Sequence[str], shape: tuple[int, ...], cut: TensorSlice = WHOLE_TENSOR
    ) -> torch.Tensor:
        """What ``cut`` leaves of a tensor of ``shape`` for the joined ``names``."""
        return cut.select_joined(self._whole(names, shape))

    def _whole(self, names: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
        if names[0].endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        # Seeded by name: values do not depend on the order in which tensors are asked for.
        self._generator.manual_seed(self._seed ^ zlib.crc32(" ".join(names).encode()))
        gain = QKV_GAIN if names[0].endswith("q_proj.weight") else 1.0
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        return weight.normal_(0.0, gain / shape[-1] ** 0.5, generator=self._generator)
