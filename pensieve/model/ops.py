"""Operations of a decoder layer besides matrix products and attention: one set per kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.kernels import expert_reference, fp8_reference, invariant, reference
from pensieve.kernels.arguments import Activation

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class PickExperts(Protocol):
    def __call__(
        self, logits: torch.Tensor, per_token: int, *, softmax_first: bool, renormalised: bool, rounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GroupedProduct(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        *,
        read: torch.Tensor | None = None,
        write: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertOps:
    """Operations of a mixture of experts; ``pensieve.kernels.expert_reference`` documents each under the same name."""

    pick_experts: PickExperts
    group_rows: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    grouped_product: GroupedProduct
    clamped_glu: Callable[[torch.Tensor, float, float], torch.Tensor]
    combine_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _apply(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x)


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """Operations; ``pensieve.kernels.reference``, ``fp8_reference`` and ``invariant`` document each under the same
    name."""

    norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    activate: Callable[[torch.Tensor, bool, Activation], torch.Tensor]
    experts: ExpertOps
    linear: Product = F.linear
    scaled_linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = (
        fp8_reference.scaled_linear
    )
    pointwise: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor] = _apply


TORCH_OPS = DecoderOps(
    reference.norm,
    reference.add_norm,
    reference.activate,
    ExpertOps(
        expert_reference.pick_experts,
        expert_reference.group_rows,
        expert_reference.grouped_product,
        expert_reference.clamped_glu,
        expert_reference.combine_rows,
    ),
)
INVARIANT_OPS = DecoderOps(
    reference.norm,
    reference.add_norm,
    invariant.activate,
    ExpertOps(
        expert_reference.pick_experts,
        expert_reference.group_rows,
        invariant.grouped_product,
        invariant.clamped_glu,
        invariant.combine_rows,
    ),
    invariant.linear,
    partial(fp8_reference.scaled_linear, linear=invariant.linear),
    invariant.pointwise,
)
"""Operations on a CPU whose results for a token do not depend on the rest of the step, to the bit."""


def triton_ops(*, invariant: bool = False) -> DecoderOps:
    """Return fused kernels for a GPU. ``invariant``: every product by the same library, whatever its rows. Raises
    ImportError without Triton."""
    from pensieve.kernels.activation import activate
    from pensieve.kernels.expert_rows import combine_rows, group_rows, pick_experts
    from pensieve.kernels.fp8_product import scaled_linear
    from pensieve.kernels.grouped_product import clamped_glu, grouped_product
    from pensieve.kernels.norm import add_norm, norm
    from pensieve.kernels.row_product import linear

    experts = ExpertOps(pick_experts, group_rows, grouped_product, clamped_glu, combine_rows)
    product = F.linear if invariant else linear
    return DecoderOps(norm, add_norm, activate, experts, product, scaled_linear)
