"""The fields of an ``Arch`` that all families have, and what their layers see and rotate; mixtures of experts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

from pensieve.model.arch import Experts, Layer, ModelError, Rope
from pensieve.model.families.parsing import (
    Config,
    declared_eos_ids,
    default_eos_ids,
    dtype_of,
    generation_defaults,
    is_number,
    require_positive,
)

_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""``Arch.activation`` of each name that transformers gives an activation."""


def common_fields(family: str, parsed: Any, config: Config, generation: Config) -> dict[str, Any]:
    """Return the fields of an ``Arch`` that every family with rotary positions has under the same names. Raises
    ModelError."""
    heads, kv_heads = parsed.num_attention_heads, parsed.num_key_value_heads
    require_positive("num_key_value_heads", kv_heads)
    head_dim = getattr(parsed, "head_dim", None)
    head_dim = parsed.hidden_size // heads if head_dim is None else head_dim
    require_positive("head_dim", head_dim)
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd, and rotary positions rotate pairs")
    return {
        "family": family,
        "vocab_size": parsed.vocab_size,
        "hidden_size": parsed.hidden_size,
        "intermediate_size": parsed.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "context_limit": parsed.max_position_embeddings,
        "tied_embeddings": parsed.tie_word_embeddings,
        "dtype": dtype_of(config),
        "bos_token_id": parsed.bos_token_id,
        "eos_token_ids": declared_eos_ids(config, generation) or default_eos_ids(config, generation),
        "generation": generation_defaults(generation),
    }


def activation_of(field: str, name: Any, *supported: str) -> Any:
    """Return the ``Arch.activation`` of transformers' name for it. Raises ModelError, which names the field, unless
    it is one of ``supported`` (as in ``Arch``)."""
    found = _ACTIVATIONS.get(name)
    if found not in supported:
        known = ", ".join(
            name for name, ours in _ACTIVATIONS.items() if ours in supported and name != "swish"
        )
        raise ModelError(f"{field} {name} is not supported (supported: {known})")
    return found


def positive(field: str, value: Any) -> float:
    """Return a number of config.json. Raises ModelError, which names the field, unless it is above 0."""
    if not is_number(value) or value <= 0:
        raise ModelError(f"{field} is {json.dumps(value)}, not a number above 0")
    return float(value)


def window_of(parsed: Any) -> int | None:
    """Return the sliding window; None if there is none, or if it is never narrower than the context."""
    window = getattr(parsed, "sliding_window", None)
    if window is None:
        return None
    require_positive("sliding_window", window)
    return int(window) if window < parsed.max_position_embeddings else None


def layer_kinds(parsed: Any) -> list[Literal["full_attention", "sliding_attention"]]:
    """Return ``layer_types``; it must name one of the two kinds for each layer. Raises ModelError."""
    kinds = list(getattr(parsed, "layer_types", None) or ())
    others = set(kinds) - {"full_attention", "sliding_attention"}
    if others:
        raise ModelError(f"layer_types has {min(map(str, others))}, which is not supported")
    if kinds and len(kinds) != parsed.num_hidden_layers:
        raise ModelError(
            f"layer_types has {len(kinds)} entries, num_hidden_layers is {parsed.num_hidden_layers}"
        )
    if "sliding_attention" in kinds and getattr(parsed, "sliding_window", None) is None:
        raise ModelError("layer_types has sliding_attention, but there is no sliding_window that is used")
    return kinds


def sliding_layers(parsed: Any, rope: Callable[[str], Rope | None]) -> tuple[Layer, ...]:
    """Return the layers of a family in which ``layer_types`` says which of them slide. ``rope``: the positions of
    each kind of layer. Raises ModelError."""
    window = window_of(parsed)
    kinds = layer_kinds(parsed)
    ropes = {kind: rope(kind) for kind in dict.fromkeys(kinds)}
    return tuple(
        Layer(window=window if kind == "sliding_attention" else None, rope=ropes[kind]) for kind in kinds
    )


def equal_layers(parsed: Any, rope: Rope | None) -> tuple[Layer, ...]:
    """Return the layers of a family in which all slide if there is a window. Raises ModelError when
    ``layer_types`` says that only some do: transformers ignores it in these families, but not in their cache."""
    if len(set(layer_kinds(parsed))) > 1:
        raise ModelError("layer_types with layers of several kinds is not supported in this family")
    return (Layer(window=window_of(parsed), rope=rope),) * int(parsed.num_hidden_layers)


def full_layers(parsed: Any, rope: Rope | None) -> tuple[Layer, ...]:
    """Return the layers of a family whose attention knows no window."""
    return (Layer(rope=rope),) * int(parsed.num_hidden_layers)


def cache_limit(parsed: Any) -> int:
    """Return the context limit of a family whose attention knows no window. transformers' cache applies one that
    config.json has nevertheless; inside it both are the same."""
    limit: int = parsed.max_position_embeddings
    kinds, window = layer_kinds(parsed), getattr(parsed, "sliding_window", None)
    if window is None or set(kinds) == {"full_attention"}:
        return limit
    require_positive("sliding_window", window)
    return min(limit, int(window))


def read_rope(
    parsed: Any, head_dim: int, kind: str | None = None, *, partial: bool = False, interleaved: bool = False
) -> Rope:
    """Read the rotary positions from ``rope_parameters`` as transformers' class merged it. ``kind``: the entry of
    ``layer_types`` whose positions are meant, if they differ. ``partial``: the family may rotate a part of each head.
    Raises ModelError."""
    every: Config = parsed.rope_parameters
    values: Config = every if kind is None else every[kind]
    share = values.get("partial_rotary_factor")
    rotated = head_dim
    if share not in (None, 1):
        if not partial:
            raise ModelError("partial_rotary_factor other than 1 is not supported")
        rotated = int(head_dim * _number(values, "partial_rotary_factor"))
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise ModelError(
                f"partial_rotary_factor {share} rotates {rotated} of {head_dim} values of a head"
            )
    theta, scaling = _number(values, "rope_theta"), values.get("rope_type")
    whole = replace(
        _SCALINGS.get(str(scaling), _refused)(values, Rope(theta)),
        rotated=None if rotated == head_dim else rotated,
        interleaved=interleaved,
    )
    if scaling != "yarn":
        return whole
    # transformers looks for ``truncate`` beside the kinds of layers, not inside them.
    return replace(whole, truncate=bool(every.get("truncate", True)))


def _refused(values: Config, rope: Rope) -> Rope:
    kind = values.get("rope_type")
    raise ModelError(f"rope_type {kind!r} is not supported (supported: {', '.join(_SCALINGS)})")


def _linear(values: Config, rope: Rope) -> Rope:
    return replace(rope, scaling="linear", factor=_number(values, "factor"))


def _llama3(values: Config, rope: Rope) -> Rope:
    low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
    if low == high:
        raise ModelError("low_freq_factor and high_freq_factor of the rotary positions are equal")
    original = int(_number(values, "original_max_position_embeddings"))
    return Rope(rope.theta, "llama3", _number(values, "factor"), low, high, original)


def _yarn(values: Config, rope: Rope) -> Rope:
    factor = _number(values, "factor")
    magnitude = values.get("attention_factor")
    if magnitude is None:
        scale, all_dim = (values.get(name) for name in ("mscale", "mscale_all_dim"))
        if scale and all_dim:
            magnitude = _magnitude(factor, _number(values, "mscale"))
            magnitude /= _magnitude(factor, _number(values, "mscale_all_dim"))
        else:
            magnitude = _magnitude(factor, 1.0)
    else:
        magnitude = _number(values, "attention_factor")
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        original_context=int(_number(values, "original_max_position_embeddings")),
        beta_fast=_number(values, "beta_fast") if values.get("beta_fast") else 32.0,
        beta_slow=_number(values, "beta_slow") if values.get("beta_slow") else 1.0,
        magnitude=magnitude,
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(values: Config, name: str) -> float:
    return positive(f"{name} of the rotary positions", values.get(name))


_SCALINGS: Final[dict[str, Callable[[Config, Rope], Rope]]] = {
    "default": lambda values, rope: rope,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""The reader of each ``rope_type``."""


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
        # Versions of transformers before these two were options compute with the published values.
        clamped=(
            positive("swiglu_alpha", getattr(parsed, "swiglu_alpha", 1.702)),
            positive("swiglu_limit", getattr(parsed, "swiglu_limit", 7.0)),
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
