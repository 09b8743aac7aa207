"""Readers of Command R and Command A: attention and MLP beside each other, after one LayerNorm without bias."""

from __future__ import annotations

from typing import Any

from pensieve.model.arch import Arch, ModelError
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    full_layers,
    positive,
    read_rope,
    sliding_layers,
)
from pensieve.model.families.parsing import Config, parsed_config


def read_cohere(config: Config, generation: Config) -> Arch:
    """Read Command R. Raises ModelError."""
    parsed = parsed_config("cohere", config, "intermediate_size")
    if parsed.use_qk_norm:
        raise ModelError("use_qk_norm true (Command R+) is not supported")
    fields = _fields("cohere", parsed, config, generation)
    fields["context_limit"] = cache_limit(parsed)
    return Arch(**fields, layers=full_layers(parsed, read_rope(parsed, fields["head_dim"], interleaved=True)))


def read_cohere2(config: Config, generation: Config) -> Arch:
    """Read Command R7B and Command A: layers that slide rotate, and the others know no positions. Raises ModelError."""
    parsed = parsed_config("cohere2", config, "intermediate_size")
    fields = _fields("cohere2", parsed, config, generation)
    rope = read_rope(parsed, fields["head_dim"], interleaved=True)
    layers = sliding_layers(parsed, lambda kind: rope if kind == "sliding_attention" else None)
    return Arch(**fields, layers=layers)


def _fields(family: str, parsed: Any, config: Config, generation: Config) -> dict[str, Any]:
    return common_fields(family, parsed, config, generation) | {
        "norm": "layer",
        "norm_bias": False,
        "norm_eps": positive("layer_norm_eps", parsed.layer_norm_eps),
        "activation": activation_of("hidden_act", parsed.hidden_act, "silu"),
        "gated_mlp": True,
        "parallel_blocks": True,
        "qkv_bias": parsed.attention_bias,
        "output_bias": parsed.attention_bias,
        "logit_scale": positive("logit_scale", parsed.logit_scale),
    }
