"""Operations of a decoder layer besides matrix products and attention: one set per kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pensieve.kernels import reference
from pensieve.kernels.arguments import Activation


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """Elementwise operations; ``pensieve.kernels.reference`` documents each under the same name."""

    norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    activate: Callable[[torch.Tensor, bool, Activation], torch.Tensor]


TORCH_OPS = DecoderOps(reference.norm, reference.add_norm, reference.activate)


def triton_ops() -> DecoderOps:
    """Return fused kernels for a GPU. Raises ImportError without Triton."""
    from pensieve.kernels.activation import activate
    from pensieve.kernels.norm import add_norm, norm

    return DecoderOps(norm, add_norm, activate)
