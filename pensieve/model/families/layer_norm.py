"""Readers of families with LayerNorm and rotary positions: StableLM and StarCoder 2."""

from __future__ import annotations

from pensieve.model.arch import Arch, ModelError
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    equal_layers,
    full_layers,
    positive,
    read_rope,
)
from pensieve.model.families.parsing import Config, parsed_config


def read_stablelm(config: Config, generation: Config) -> Arch:
    """Read StableLM. Raises ModelError."""
    parsed = parsed_config("stablelm", config, "intermediate_size")
    if parsed.qk_layernorm:
        raise ModelError("qk_layernorm true is not supported")
    fields = common_fields("stablelm", parsed, config, generation) | {"context_limit": cache_limit(parsed)}
    return Arch(
        **fields,
        layers=full_layers(parsed, read_rope(parsed, fields["head_dim"], partial=True)),
        norm="layer",
        norm_eps=positive("layer_norm_eps", parsed.layer_norm_eps),
        activation=activation_of("hidden_act", parsed.hidden_act, "silu"),
        gated_mlp=True,
        parallel_blocks=parsed.use_parallel_residual,
        qkv_bias=parsed.use_qkv_bias,
    )


def read_starcoder2(config: Config, generation: Config) -> Arch:
    """Read StarCoder 2. Raises ModelError."""
    parsed = parsed_config("starcoder2", config, "intermediate_size")
    fields = common_fields("starcoder2", parsed, config, generation)
    return Arch(
        **fields,
        layers=equal_layers(parsed, read_rope(parsed, fields["head_dim"])),
        norm="layer",
        norm_eps=positive("norm_epsilon", parsed.norm_epsilon),
        activation=activation_of("hidden_act", parsed.hidden_act, "gelu_tanh", "silu"),
        gated_mlp=False,
        qkv_bias=parsed.use_bias,
        output_bias=parsed.use_bias,
        mlp_bias=parsed.use_bias,
    )
