"""Mixtures of experts, as the families that have them describe them in config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pensieve.model.arch import Experts, Layer, ModelError
from pensieve.model.families.common import positive
from pensieve.model.families.parsing import Config, require_positive


def experts_of(family: str, config: Config, parsed: Any) -> Experts | None:
    """Return the mixture of a family's layers; None if the family has none. Raises ModelError."""
    if family not in _EXPERTS:
        return None
    count = "num_local_experts" if family in _LOCAL else "num_experts"
    # transformers writes and reads both names.
    if "num_experts" not in config and "num_local_experts" not in config:
        raise ModelError(f"{count} is missing")
    if "num_experts_per_tok" not in config:
        raise ModelError("num_experts_per_tok is missing")
    require_positive(count, getattr(parsed, count))
    require_positive("num_experts_per_tok", parsed.num_experts_per_tok)
    return _EXPERTS[family](parsed)


def expert_layers(layers: tuple[Layer, ...], parsed: Any) -> tuple[Layer, ...]:
    """Return the layers of a family with experts, those that have some marked. Raises ModelError."""
    step, dense = getattr(parsed, "decoder_sparse_step", 1), getattr(parsed, "mlp_only_layers", None) or []
    require_positive("decoder_sparse_step", step)
    if not isinstance(dense, list) or any(not isinstance(index, int) for index in dense):
        raise ModelError(f"mlp_only_layers is {json.dumps(dense)}, not a list of layers")
    return tuple(
        replace(layer, mlp="dense" if index in dense or (index + 1) % step else "experts")
        for index, layer in enumerate(layers)
    )


def _gpt_oss(parsed: Any) -> Experts:
    return Experts(
        count=parsed.num_local_experts,
        per_token=parsed.num_experts_per_tok,
        width=parsed.intermediate_size,
        softmax="picked",
        bias=True,
        clamped=(
            positive("swiglu_alpha", parsed.swiglu_alpha),
            positive("swiglu_limit", parsed.swiglu_limit),
        ),
    )


def _granitemoe(parsed: Any) -> Experts:
    return Experts(
        count=parsed.num_local_experts,
        per_token=parsed.num_experts_per_tok,
        width=parsed.intermediate_size,
        softmax="picked",
    )


def _mixtral(parsed: Any) -> Experts:
    return Experts(
        count=parsed.num_local_experts,
        per_token=parsed.num_experts_per_tok,
        width=parsed.intermediate_size,
        softmax="all",
        renormalised=True,
        weights_rounded=False,
    )


def _olmoe(parsed: Any) -> Experts:
    if parsed.clip_qkv is not None:
        raise ModelError(f"clip_qkv is {json.dumps(parsed.clip_qkv)}, which is not supported")
    return _renormalised(parsed, parsed.intermediate_size)


def _qwen(parsed: Any) -> Experts:
    require_positive("moe_intermediate_size", parsed.moe_intermediate_size)
    return _renormalised(parsed, parsed.moe_intermediate_size)


def _qwen_with_shared(parsed: Any) -> Experts:
    require_positive("shared_expert_intermediate_size", parsed.shared_expert_intermediate_size)
    return replace(_qwen(parsed), shared_width=parsed.shared_expert_intermediate_size)


def _renormalised(parsed: Any, width: int) -> Experts:
    """Return experts whose weights are renormalised if config.json says so."""
    return Experts(
        count=parsed.num_experts,
        per_token=parsed.num_experts_per_tok,
        width=width,
        softmax="all",
        renormalised=bool(parsed.norm_topk_prob),
    )


_LOCAL: Final = ("gpt_oss", "granitemoe", "mixtral")
"""Families whose published files say ``num_local_experts``."""
_EXPERTS: Final[dict[str, Callable[[Any], Experts]]] = {
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen_with_shared,
    "qwen3_moe": _qwen,
    "qwen3_next": _qwen_with_shared,
}
"""The mixture of each family that has one."""
