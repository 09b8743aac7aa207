"""Mixtures of experts: a router picks some of a layer's MLPs for each token, and their results are added up.

The rows of a step are put in order of their expert, so that a product reads each expert's weights once. Dtypes and
rounding follow transformers: the router's logits have the model's dtype, a softmax over all experts is computed in
float32, and each product is rounded before its bias, its weight and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pensieve.kernels.arguments import Activation
from pensieve.model.arch import Experts
from pensieve.model.ops import DecoderOps


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one mixture: E experts of width I, hidden size H. A rank of several has a part of the width."""

    router: torch.Tensor
    """[E, H]"""
    router_bias: torch.Tensor | None
    """[E]"""
    up: torch.Tensor
    """[E, H, 2 * I], of any strides: the columns of the gates and of the projections."""
    up_bias: torch.Tensor | None
    """[E, 2 * I]"""
    down: torch.Tensor
    """[E, I, H], of any strides."""
    down_bias: torch.Tensor | None
    """[E, H]; None also on all ranks but the first, since the ranks' results are added up."""
    shared: SharedExpert | None


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that takes part in every token."""

    up: torch.Tensor
    """[2 * I, H]: rows of the gate, then of the projection."""
    down: torch.Tensor
    """[H, I]"""
    gate: torch.Tensor
    """[1, H]: the result is multiplied by the sigmoid of this product."""


def mixture(
    x: torch.Tensor, weights: ExpertWeights, experts: Experts, activation: Activation, ops: DecoderOps
) -> torch.Tensor:
    """Return the mixture's result for ``x`` [T, H], in its shape and dtype; a rank's part of it with several ranks.
    Does not wait for a GPU and does the same work whatever the values: can be captured in a graph there."""
    do, shared = ops.experts, weights.shared
    shares, picked = do.pick_experts(
        F.linear(x, weights.router, weights.router_bias),
        experts.per_token,
        softmax_first=experts.softmax == "all",
        renormalised=experts.renormalised,
        rounded=experts.weights_rounded,
    )
    ends, tokens, rows = do.group_rows(picked, experts.count)
    up = do.grouped_product(x, weights.up, weights.up_bias, ends, read=tokens)
    clamped = experts.clamped
    inner = ops.activate(up, True, activation) if clamped is None else do.clamped_glu(up, *clamped)
    each = do.grouped_product(inner, weights.down, weights.down_bias, ends, write=rows)
    total = do.combine_rows(each, shares)
    if shared is None:
        return total
    inner = ops.activate(F.linear(x, shared.up), True, activation)
    return total + F.linear(x, shared.gate).sigmoid() * F.linear(inner, shared.down)
