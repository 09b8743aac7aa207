"""Readers of the families with recurrent layers: Mamba-2 and its hybrids, and Qwen's gated delta rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from pensieve.model.arch import Arch, Layer, ModelError, Multipliers, RecurrentMixer, StateShape
from pensieve.model.families.common import (
    activation_of,
    common_fields,
    expert_layers,
    experts_of,
    positive,
    read_rope,
)
from pensieve.model.families.parsing import (
    Config,
    declared_eos_ids,
    default_eos_ids,
    dtype_of,
    generation_defaults,
    is_number,
    parsed_config,
    require_positive,
)

CONTEXT_LIMIT = 131_072
"""Context limit of a Mamba-2 whose config.json has no ``max_position_embeddings``: the recurrence itself has none."""
NO_HEADS: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
"""The geometry of attention of a model without any: no layer has it."""


def read_mamba2(config: Config, generation: Config) -> Arch:
    """Read Mamba-2. Raises ModelError."""
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_heads",
        "head_dim",
        "state_size",
        "n_groups",
    )
    parsed = parsed_config("mamba2", config, sizes=(*sizes, "conv_kernel"))
    limit = config.get("max_position_embeddings", CONTEXT_LIMIT)
    require_positive("max_position_embeddings", limit)
    state = _ssd_state(
        parsed.num_heads, parsed.head_dim, parsed.n_groups, parsed.state_size, parsed.conv_kernel
    )
    mixer = RecurrentMixer(
        "ssd",
        parsed.n_groups,
        "before norm",
        conv_bias=parsed.use_conv_bias,
        input_bias=parsed.use_bias,
        output_bias=parsed.use_bias,
        step_limit=_step_limit(parsed.time_step_limit),
    )
    return Arch(
        family="mamba2",
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=state.heads * state.value_dim,
        layers=(Layer(attends=False, state=state, mlp="none"),) * parsed.num_hidden_layers,
        **NO_HEADS,
        context_limit=limit,
        norm="rms",
        norm_eps=parsed.layer_norm_epsilon,
        activation=activation_of("hidden_act", parsed.hidden_act, "silu"),
        gated_mlp=True,
        recurrent=mixer,
        float32_residual=parsed.residual_in_fp32,
        tied_embeddings=parsed.tie_word_embeddings,
        dtype=dtype_of(config),
        bos_token_id=parsed.bos_token_id,
        eos_token_ids=declared_eos_ids(config, generation) or default_eos_ids(config, generation),
        generation=generation_defaults(generation),
    )


def read_bamba(config: Config, generation: Config) -> Arch:
    """Read Bamba: layers of Mamba-2 or, where ``attn_layer_indices`` says, of attention. Raises ModelError."""
    parsed = parsed_config("bamba", config, "intermediate_size", *_MAMBA_SIZES)
    fields = _mamba_fields("bamba", parsed, config, generation)
    state = _mamba_state(parsed)
    rope = read_rope(parsed, fields["head_dim"], partial=True)
    attends = [kind == "full_attention" for kind in parsed.layers_block_type]
    others = set(parsed.attn_layer_indices or ()) - set(range(parsed.num_hidden_layers))
    if others:
        raise ModelError(f"attn_layer_indices has {min(others)}, which is no layer")
    mixer = replace(_mamba_mixer(parsed), gate="before norm", output_bias=parsed.mamba_proj_bias)
    layers = tuple(Layer(rope=rope) if full else Layer(attends=False, state=state) for full in attends)
    return Arch(**fields, layers=layers, recurrent=mixer if not all(attends) else None)


def read_falcon_h1(config: Config, generation: Config) -> Arch:
    """Read Falcon-H1: each layer has attention and a Mamba-2 side by side. Raises ModelError."""
    parsed = parsed_config("falcon_h1", config, "intermediate_size", *_MAMBA_SIZES)
    fields = _mamba_fields("falcon_h1", parsed, config, generation)
    state = _mamba_state(parsed)
    mixer = _mamba_mixer(parsed)
    if not parsed.mamba_rms_norm:
        mixer = replace(mixer, gate="no norm")
    elif not parsed.mamba_norm_before_gate:
        mixer = replace(mixer, gate="before norm")
    layer = Layer(rope=read_rope(parsed, fields["head_dim"]), state=state)
    return Arch(
        **fields,
        layers=(layer,) * parsed.num_hidden_layers,
        recurrent=replace(mixer, output_bias=parsed.projectors_bias),
        multipliers=_multipliers(parsed),
        embedding_scale=positive("embedding_multiplier", parsed.embedding_multiplier),
        logit_scale=positive("lm_head_multiplier", parsed.lm_head_multiplier),
    )


def read_qwen3_next(config: Config, generation: Config) -> Arch:
    """Read Qwen3-Next. Raises ModelError."""
    parsed = parsed_config("qwen3_next", config, "intermediate_size", *_DELTA_SIZES)
    arch = _qwen("qwen3_next", parsed, config, generation)
    if parsed.num_experts == 0:
        return arch
    layers = expert_layers(arch.layers, parsed)
    if not any(layer.has_experts for layer in layers):
        return arch
    return replace(arch, layers=layers, experts=experts_of("qwen3_next", config, parsed))


def read_qwen3_5(config: Config, generation: Config) -> Arch:
    """Read Qwen3.5's text model. In a folder with images, it is the ``text_config`` of config.json, and images are not
    supported. Raises ModelError."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {json.dumps(text)}, which is not valid")
    # Without a head of its own in the checkpoint, the model is tied whichever of the two says so.
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    outer: Config = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
    text = outer | text | {"tie_word_embeddings": tied}
    nested = "text_config" in config
    parsed = parsed_config("qwen3_5_text", text, "intermediate_size", *_DELTA_SIZES, complete=not nested)
    return _qwen("qwen3_5_text", parsed, text, generation)


_MAMBA_SIZES = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_DELTA_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def _mamba_fields(family: str, parsed: Any, config: Config, generation: Config) -> dict[str, Any]:
    """Return the fields of an ``Arch`` that Bamba and Falcon-H1 share."""
    return common_fields(family, parsed, config, generation) | {
        "norm": "rms",
        "norm_eps": parsed.rms_norm_eps,
        "activation": activation_of("hidden_act", parsed.hidden_act, "silu"),
        "gated_mlp": True,
        "qkv_bias": parsed.attention_bias,
        "output_bias": parsed.attention_bias,
        "mlp_bias": parsed.mlp_bias,
    }


def _mamba_state(parsed: Any) -> StateShape:
    return _ssd_state(
        parsed.mamba_n_heads,
        parsed.mamba_d_head,
        parsed.mamba_n_groups,
        parsed.mamba_d_state,
        parsed.mamba_d_conv,
    )


def _mamba_mixer(parsed: Any) -> RecurrentMixer:
    return RecurrentMixer(
        "ssd",
        parsed.mamba_n_groups,
        "after norm",
        conv_bias=parsed.mamba_conv_bias,
        input_bias=parsed.mamba_proj_bias,
        step_limit=_step_limit(parsed.time_step_limit),
    )


def _qwen(family: str, parsed: Any, config: Config, generation: Config) -> Arch:
    """Return the ``Arch`` of a Qwen with gated delta rules."""
    fields = common_fields(family, parsed, config, generation)
    kinds = list(parsed.layer_types)
    others = set(kinds) - {"full_attention", "linear_attention"}
    if others or len(kinds) != parsed.num_hidden_layers:
        raise ModelError(f"layer_types is {json.dumps(kinds)}, which is not supported")
    keys, values = parsed.linear_num_key_heads, parsed.linear_num_value_heads
    if values % keys:
        raise ModelError(f"linear_num_value_heads {values} do not divide over linear_num_key_heads {keys}")
    key_dim, value_dim = parsed.linear_key_head_dim, parsed.linear_value_head_dim
    channels = 2 * keys * key_dim + values * value_dim
    state = StateShape(channels, _conv_width("linear_conv_kernel_dim", parsed), values, key_dim, value_dim)
    rope = read_rope(parsed, fields["head_dim"], partial=True)
    full, linear = Layer(rope=rope), Layer(attends=False, state=state)
    has_states = "linear_attention" in kinds
    return Arch(
        **fields,
        layers=tuple(full if kind == "full_attention" else linear for kind in kinds),
        norm="rms",
        norm_eps=parsed.rms_norm_eps,
        unit_offset=True,
        activation=activation_of("hidden_act", parsed.hidden_act, "silu"),
        gated_mlp=True,
        qkv_bias=parsed.attention_bias,
        output_bias=parsed.attention_bias,
        qk_norm="head",
        attention_gate=True,
        recurrent=RecurrentMixer("gated_delta", keys, "after norm", norm_per_head=True)
        if has_states
        else None,
    )


def _ssd_state(heads: int, head_dim: int, groups: int, state_size: int, width: int) -> StateShape:
    if heads % groups:
        raise ModelError(f"{heads} Mamba heads do not divide over {groups} groups")
    if width < 2:
        raise ModelError(f"a Mamba convolution of width {width} is not supported")
    return StateShape(heads * head_dim + 2 * groups * state_size, width, heads, state_size, head_dim)


def _conv_width(field: str, parsed: Any) -> int:
    width: int = getattr(parsed, field)
    if width < 2:
        raise ModelError(f"{field} {width} is not supported")
    return width


def _step_limit(limit: Any) -> tuple[float, float]:
    """Return the bounds of the step size; JSON may spell infinity ``Infinity``, or as a large number."""
    values = list(limit) if isinstance(limit, list | tuple) else []
    if len(values) != 2 or not all(is_number(value) or value == math.inf for value in values):
        raise ModelError(f"time_step_limit is {json.dumps(limit)}, not two numbers")
    return float(values[0]), float(values[1])


def _multipliers(parsed: Any) -> Multipliers:
    parts = tuple(positive("ssm_multipliers", value) for value in parsed.ssm_multipliers)
    mlp = [positive("mlp_multipliers", value) for value in parsed.mlp_multipliers]
    if len(parts) != 5 or len(mlp) != 2:
        raise ModelError("ssm_multipliers must be five numbers, mlp_multipliers two")
    return Multipliers(
        attention_input=positive("attention_in_multiplier", parsed.attention_in_multiplier),
        key=positive("key_multiplier", parsed.key_multiplier),
        attention_output=positive("attention_out_multiplier", parsed.attention_out_multiplier),
        recurrent_input=positive("ssm_in_multiplier", parsed.ssm_in_multiplier),
        recurrent_parts=(parts[0], parts[1], parts[2], parts[3], parts[4]),
        recurrent_output=positive("ssm_out_multiplier", parsed.ssm_out_multiplier),
        mlp_gate=mlp[0],
        mlp_output=mlp[1],
    )
