"""The reader of OPT: LayerNorm, biases and learned positions."""

from __future__ import annotations

from pensieve.model.arch import Arch, Layer, ModelError
from pensieve.model.eos_tokens import declared_eos_ids, default_eos_ids
from pensieve.model.families.parsing import Config, dtype_of, generation_defaults, parsed_config


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
