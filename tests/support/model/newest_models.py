"""Models of transformers that compute as its newest version does, whatever version is installed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

_GATED_NORMS = ("MambaRMSNormGated", "BambaRMSNormGated")
"""In 5.17, these took the heads of all groups together; mamba-ssm and 5.23 go by group."""


def as_newest(model: Any) -> Any:
    """Return ``model``, whose layers compute as the newest version's do."""
    for layer in model.modules():
        norm = getattr(layer, "norm", None)
        if type(norm).__name__ in _GATED_NORMS and not hasattr(norm, "group_size"):
            norm.forward = functools.partial(_by_group, norm, layer.n_groups)
        if type(layer).__name__ == "GptOssExperts":  # 5.17 has these two fixed
            layer.alpha = getattr(model.config, "swiglu_alpha", layer.alpha)
            layer.limit = getattr(model.config, "swiglu_limit", layer.limit)
    return model


def _by_group(norm: Any, groups: int, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    gated = (x.float() * F.silu(gate.float())).unflatten(-1, (groups, -1))
    gated = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    result: torch.Tensor = norm.weight * gated.flatten(-2).to(x.dtype)
    return result
