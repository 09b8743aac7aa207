"""Readers of the families that resemble Llama: RMS norm, rotary positions, and differences that fit in a line; Gemma.

Gemma's norms have weights around 1 stored around 0, and its embedding is scaled. From Gemma 2 on there are windows,
norms before and after each block, and soft caps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pensieve.model.arch import Arch, ModelError, Rope
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    equal_layers,
    expert_layers,
    experts_of,
    full_layers,
    positive,
    read_rope,
    sliding_layers,
)
from pensieve.model.families.parsing import Config, is_number, parsed_config, text_part

Fields = dict[str, Any]


def reader_of(family: str) -> Callable[[Config, Config], Arch]:
    """Return the reader of one of ``FIELDS``."""

    def read(config: Config, generation: Config) -> Arch:
        parsed = parsed_config(family, config, "intermediate_size")
        activation = activation_of("hidden_act", parsed.hidden_act, *_ACTIVATIONS.get(family, ("silu",)))
        fields = common_fields(family, parsed, config, generation)
        fields |= {
            "norm": "rms",
            "norm_eps": parsed.rms_norm_eps,
            "activation": activation,
            "gated_mlp": True,
        }
        fields |= _LAYERS.get(family, _full)(parsed, fields["head_dim"]) | FIELDS[family](parsed)
        experts = experts_of(family, config, parsed)
        if experts is not None:
            fields |= {"experts": experts, "layers": expert_layers(fields["layers"], parsed)}
        return Arch(**fields)

    return read


def read_mistral3(config: Config, generation: Config) -> Arch:
    """Read the text part of a Mistral that takes images, too. Raises ModelError."""
    text = text_part(config)
    family = text.get("model_type")
    if family not in ("mistral", "ministral3"):
        raise ModelError(
            f"model_type of text_config is {json.dumps(family)} (supported: mistral, ministral3)"
        )
    return replace(reader_of(family)(text, generation), family="mistral3")


_ACTIVATIONS: Final[dict[str, tuple[str, ...]]] = {"arcee": ("relu2", "silu")}
"""Supported activations where they are not SiLU alone."""


def _full(parsed: Any, head_dim: int, *, partial: bool = False, interleaved: bool = False) -> Fields:
    rope = read_rope(parsed, head_dim, partial=partial, interleaved=interleaved)
    return {"layers": full_layers(parsed, rope), "context_limit": cache_limit(parsed)}


def _equal(parsed: Any, head_dim: int, *, partial: bool = False) -> Fields:
    return {"layers": equal_layers(parsed, read_rope(parsed, head_dim, partial=partial))}


def _sliding(parsed: Any, head_dim: int) -> Fields:
    rope = read_rope(parsed, head_dim)
    return {"layers": sliding_layers(parsed, lambda kind: rope)}


def _rope_by_kind(parsed: Any, head_dim: int) -> Fields:
    return {"layers": sliding_layers(parsed, lambda kind: read_rope(parsed, head_dim, kind))}


def _exaone4(parsed: Any, head_dim: int) -> Fields:
    """Beside layers that slide, the others know no positions."""
    rope, hybrid = read_rope(parsed, head_dim), parsed.sliding_window is not None
    layers = sliding_layers(parsed, lambda kind: None if hybrid and kind == "full_attention" else rope)
    return {"layers": layers}


def _smollm3(parsed: Any, head_dim: int) -> Fields:
    """``no_rope_layers`` has 0 for each layer that knows no positions, 1 for the others."""
    rotates = parsed.no_rope_layers
    if len(rotates) != parsed.num_hidden_layers or any(flag not in (0, 1) for flag in rotates):
        raise ModelError(f"no_rope_layers is {json.dumps(rotates)}, not a 0 or 1 for each layer")
    if "sliding_attention" in parsed.layer_types and not parsed.use_sliding_window:
        raise ModelError("layer_types has sliding_attention, but use_sliding_window is false")
    rope = read_rope(parsed, head_dim)
    layers = sliding_layers(parsed, lambda kind: rope)
    return {
        "layers": tuple(
            layer if flag else replace(layer, rope=None) for layer, flag in zip(layers, rotates, strict=True)
        )
    }


def _qwen2_moe(parsed: Any, head_dim: int) -> Fields:
    if parsed.use_sliding_window:
        return _sliding(parsed, head_dim)
    if "sliding_attention" in parsed.layer_types:
        raise ModelError("layer_types has sliding_attention, but use_sliding_window is false")
    return {"layers": full_layers(parsed, read_rope(parsed, head_dim))}


_LAYERS: Final[dict[str, Callable[[Any, int], Fields]]] = {
    "cwm": _sliding,
    "exaone4": _exaone4,
    "glm": lambda parsed, head_dim: _full(parsed, head_dim, partial=True, interleaved=True),
    "glm4": lambda parsed, head_dim: _full(parsed, head_dim, partial=True, interleaved=True),
    "gpt_oss": _sliding,
    "helium": lambda parsed, head_dim: _full(parsed, head_dim, interleaved=True),
    "ministral": _sliding,
    "ministral3": _equal,
    "mistral": _equal,
    "mixtral": _equal,
    "olmo3": _rope_by_kind,
    "phi3": lambda parsed, head_dim: _equal(parsed, head_dim, partial=True),
    "qwen2": _sliding,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _sliding,
    "qwen3_moe": _equal,
    "smollm3": _smollm3,
}
"""``layers``, and the context limit where it is not what config.json says. The others: ``_full``."""


def _biases(parsed: Any) -> Fields:
    return {"qkv_bias": parsed.attention_bias, "output_bias": parsed.attention_bias}


def _llama(parsed: Any) -> Fields:
    return _biases(parsed) | {"mlp_bias": parsed.mlp_bias}


def _olmo(parsed: Any) -> Fields:
    return _biases(parsed) | {"norms": "after", "qk_norm": "projection"}


def _granite(parsed: Any) -> Fields:
    return _llama(parsed) | _multipliers(parsed)


def _multipliers(parsed: Any) -> Fields:
    return {
        "embedding_scale": positive("embedding_multiplier", parsed.embedding_multiplier),
        "residual_scale": positive("residual_multiplier", parsed.residual_multiplier),
        "score_scale": positive("attention_multiplier", parsed.attention_multiplier),
        "logit_scale": 1.0 / positive("logits_scaling", parsed.logits_scaling),
    }


def _ministral3(parsed: Any) -> Fields:
    beta = parsed.rope_parameters.get("llama_4_scaling_beta")
    if not is_number(beta):
        raise ModelError(f"llama_4_scaling_beta of the rotary positions is {json.dumps(beta)}, not a number")
    original = parsed.rope_parameters.get("original_max_position_embeddings")
    return {"query_growth": (float(beta), positive("original_max_position_embeddings", original))}


FIELDS: Final[dict[str, Callable[[Any], Fields]]] = {
    "llama": _llama,
    # transformers ignores attention_bias here (never a bias), and in Qwen2 (always one on q, k and v).
    "mistral": lambda parsed: {},
    "qwen2": lambda parsed: {"qkv_bias": True},
    "qwen3": lambda parsed: _biases(parsed) | {"qk_norm": "head"},
    "seed_oss": lambda parsed: {
        "qkv_bias": parsed.attention_bias,
        "output_bias": parsed.attention_out_bias,
        "mlp_bias": parsed.mlp_bias,
    },
    "arcee": lambda parsed: _llama(parsed) | {"gated_mlp": False},
    "cwm": lambda parsed: {"mlp_bias": parsed.mlp_bias},
    "exaone4": lambda parsed: {"norms": "after", "qk_norm": "head"},
    "glm": lambda parsed: {"qkv_bias": parsed.attention_bias},
    "glm4": lambda parsed: {"qkv_bias": parsed.attention_bias, "norms": "both"},
    "gpt_oss": lambda parsed: _biases(parsed) | {"sinks": True},
    "granite": _granite,
    "granitemoe": lambda parsed: _biases(parsed) | _multipliers(parsed),
    "helium": lambda parsed: {"qkv_bias": parsed.attention_bias, "mlp_bias": parsed.mlp_bias},
    "ministral": lambda parsed: {},
    "ministral3": _ministral3,
    "mixtral": lambda parsed: {},
    "olmo2": _olmo,
    "olmo3": _olmo,
    "olmoe": lambda parsed: _biases(parsed) | {"qk_norm": "projection"},
    "phi3": lambda parsed: {},
    "qwen2_moe": lambda parsed: {"qkv_bias": parsed.qkv_bias},
    "qwen3_moe": lambda parsed: _biases(parsed) | {"qk_norm": "head"},
    "smollm3": _llama,
}
"""The fields of each family's ``Arch`` that are not Llama's."""


def read_gemma(config: Config, generation: Config) -> Arch:
    """Read the first Gemma. Raises ModelError."""
    parsed = parsed_config("gemma", config, "intermediate_size")
    fields = _fields("gemma", parsed, config, generation, "hidden_act")
    fields["context_limit"] = cache_limit(parsed)
    return Arch(**fields, layers=full_layers(parsed, read_rope(parsed, fields["head_dim"])))


def read_gemma2(config: Config, generation: Config) -> Arch:
    """Read Gemma 2. Raises ModelError."""
    parsed = parsed_config("gemma2", config, "intermediate_size")
    fields = _fields("gemma2", parsed, config, generation, "hidden_activation")
    rope = read_rope(parsed, fields["head_dim"])
    return Arch(**fields, **_newer(parsed), layers=sliding_layers(parsed, lambda kind: rope))


def read_gemma3(config: Config, generation: Config) -> Arch:
    """Read the text part of a Gemma 3 that takes images, too. Raises ModelError."""
    text = text_part(config) | {"model_type": "gemma3_text"}
    return _gemma3("gemma3", text, generation, complete=False)


def read_gemma3_text(config: Config, generation: Config) -> Arch:
    """Read Gemma 3 without images. Raises ModelError."""
    return _gemma3("gemma3_text", config, generation, complete=True)


def _gemma3(family: str, config: Config, generation: Config, *, complete: bool) -> Arch:
    parsed = parsed_config(family, config, "intermediate_size", complete=complete)
    fields = _fields(family, parsed, config, generation, "hidden_activation")
    both = ("attn_logit_softcapping", "final_logit_softcapping")
    for name in both if family == "gemma3" else both[:1]:
        if getattr(parsed, name) is not None:
            raise ModelError(f"{name} is {getattr(parsed, name)}, which transformers ignores")

    def rope(kind: str) -> Rope:
        return read_rope(parsed, fields["head_dim"], kind)

    return Arch(**fields, **_newer(parsed), qk_norm="head", layers=sliding_layers(parsed, rope))


def _fields(family: str, parsed: Any, config: Config, generation: Config, activation: str) -> dict[str, Any]:
    if parsed.use_bidirectional_attention:
        named = json.dumps(parsed.use_bidirectional_attention)
        raise ModelError(f"use_bidirectional_attention is {named}, which is not supported")
    return common_fields(family, parsed, config, generation) | {
        "norm": "rms",
        "norm_eps": parsed.rms_norm_eps,
        "unit_offset": True,
        "activation": activation_of(activation, getattr(parsed, activation), "gelu_tanh", "silu"),
        "gated_mlp": True,
        "qkv_bias": parsed.attention_bias,
        "output_bias": parsed.attention_bias,
        "embedding_scale": math.sqrt(parsed.hidden_size),
    }


def _newer(parsed: Any) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share."""
    return {
        "norms": "both",
        "score_scale": positive("query_pre_attn_scalar", parsed.query_pre_attn_scalar) ** -0.5,
        "softcap": _cap("attn_logit_softcapping", parsed),
        "logit_softcap": _cap("final_logit_softcapping", parsed),
    }


def _cap(field: str, parsed: Any) -> float | None:
    value = getattr(parsed, field)
    return None if value is None else positive(field, value)
