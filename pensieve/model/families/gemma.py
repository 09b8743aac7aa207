"""Readers of Gemma: RMS norms with weights around 1 stored around 0, a scaled embedding, and from Gemma 2 on windows,
norms before and after each block, and soft caps."""

from __future__ import annotations

import json
import math
from typing import Any

from pensieve.model.arch import Arch, ModelError, Rope
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    full_layers,
    positive,
    read_rope,
    sliding_layers,
)
from pensieve.model.families.parsing import Config, parsed_config, text_part


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
    if parsed.attn_logit_softcapping is not None:
        raise ModelError(
            f"attn_logit_softcapping is {parsed.attn_logit_softcapping}, which transformers ignores"
        )

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
