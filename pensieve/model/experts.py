"""Mixtures of experts: a router picks some of a layer's MLPs for each token, and their results are added up.

The rows of a step are put in order of their expert, so that a product reads each expert's weights once. Dtypes and
rounding follow transformers: the router's logits have the model's dtype, a softmax over all experts is computed in
float32, and each product is rounded before its bias, its weight and the sum.
"""

from __future__ import annotations

import torch

from pensieve.kernels.arguments import Activation
from pensieve.model.arch import Experts
from pensieve.model.ops import DecoderOps
from pensieve.model.weights import ExpertWeights


def mixture(
    x: torch.Tensor, weights: ExpertWeights, experts: Experts, activation: Activation, ops: DecoderOps
) -> torch.Tensor:
    """Return the mixture's result for ``x`` [T, H], in its shape and dtype; a rank's part of it with several ranks.
    Does not wait for a GPU and does the same work whatever the values: can be captured in a graph there."""
    do, up, down = ops.experts, weights.up, weights.down
    shares, picked = do.pick_experts(
        ops.linear(x, weights.router.weight, weights.router.bias),
        experts.per_token,
        softmax_first=experts.softmax == "all",
        renormalised=experts.renormalised,
        rounded=experts.weights_rounded,
    )
    ends, tokens, rows = do.group_rows(picked, experts.count)
    each = do.grouped_product(x, up.weight, up.bias, ends, read=tokens)
    clamped = experts.clamped
    each = ops.activate(each, True, activation) if clamped is None else do.clamped_glu(each, *clamped)
    each = do.grouped_product(each, down.weight, down.bias, ends, write=rows)
    total, shared = do.combine_rows(each, shares), weights.shared
    if shared is None or weights.shared_gate is None:
        return total
    inner = ops.activate(ops.linear(x, shared.up.weight, None), True, activation)
    share = ops.pointwise(torch.sigmoid, ops.linear(x, weights.shared_gate.weight, None))
    return total + share * ops.linear(inner, shared.down.weight, None)
