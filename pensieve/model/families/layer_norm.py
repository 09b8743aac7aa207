"""Readers of families with LayerNorm: OPT, Command R and Command A, StableLM, StarCoder 2.

OPT has biases and learned positions. The attention and MLP of Command R and Command A are beside each other, after one
LayerNorm without bias.
"""

from __future__ import annotations

from typing import Any

from pensieve.model.arch import Arch, Layer, ModelError
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    equal_layers,
    full_layers,
    positive,
    read_rope,
    sliding_layers,
)
from pensieve.model.families.parsing import (
    Config,
    declared_eos_ids,
    default_eos_ids,
    dtype_of,
    generation_defaults,
    parsed_config,
)


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


def read_opt(config: Config, generation: Config) -> Arch:
    """Read config.json and generation_config.json. Raises ModelError."""
    parsed = parsed_config("opt", config, "ffn_dim")
    if not parsed.do_layer_norm_before:
        raise ModelError("do_layer_norm_before false (opt-350m) is not supported")
    hidden, heads = parsed.hidden_size, parsed.num_attention_heads
    if parsed.word_embed_proj_dim != hidden:
        raise ModelError("projected embeddings (word_embed_proj_dim) are not supported")
    if parsed._remove_final_layer_norm or not parsed.layer_norm_elementwise_affine:
        raise ModelError("_remove_final_layer_norm, or layer_norm_elementwise_affine false, is not supported")
    activation = parsed.activation_function
    if activation not in ("relu", "gelu"):
        raise ModelError(f"activation_function {activation} is not supported (supported: relu, gelu)")
    bias = parsed.enable_bias
    return Arch(
        family="opt",
        vocab_size=parsed.vocab_size,
        hidden_size=hidden,
        intermediate_size=parsed.ffn_dim,
        layers=(Layer(),) * parsed.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context_limit=parsed.max_position_embeddings,
        norm="layer",
        norm_eps=1e-5,
        activation=activation,
        gated_mlp=False,
        learned_positions=True,
        position_offset=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied_embeddings=parsed.tie_word_embeddings,
        dtype=dtype_of(config),
        bos_token_id=parsed.bos_token_id,
        eos_token_ids=declared_eos_ids(config, generation) or default_eos_ids(config, generation),
        generation=generation_defaults(generation),
    )
