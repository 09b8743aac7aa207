"""What a decoder layer computes besides matrix products and attention: one set per kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pensieve.kernels import reference
from pensieve.kernels.arguments import Activation


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """Elementwise operations; what each promises stands at its namesake in ``pensieve.kernels.reference``."""

    norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    activate: Callable[[torch.Tensor, bool, Activation], torch.Tensor]


TORCH_OPS = DecoderOps(reference.norm, reference.add_norm, reference.activate)
"""Anywhere torch runs."""


def triton_ops() -> DecoderOps:
    """Fused kernels for a GPU. Raises ImportError on a machine without Triton."""
    from pensieve.kernels.activation import activate
    from pensieve.kernels.norm import add_norm, norm

    return DecoderOps(norm, add_norm, activate)
