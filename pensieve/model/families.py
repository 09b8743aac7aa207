"""Readers that make an ``Arch`` of the config.json of a family. Defaults are those of Hugging Face's config classes.

Newer files carry ``rope_parameters`` and ``dtype``, older ones ``rope_theta``, ``rope_scaling`` and ``torch_dtype``;
both are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pensieve.core import Sampling
from pensieve.model.arch import DTYPE_BYTES, Arch, ModelError, Rope

Config = dict[str, Any]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_HF_TOP_K = 50
"""What ``generate`` uses when sampling is on and generation_config.json does not name a top_k."""


def _opt(config: Config, generation: Config) -> Arch:
    if not config.get("do_layer_norm_before", True):
        raise ModelError("OPT with layer norm after the block (opt-350m) is not supported")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("word_embed_proj_dim", hidden) != hidden:
        raise ModelError("OPT with projected embeddings (word_embed_proj_dim) is not supported")
    if config.get("_remove_final_layer_norm") or not config.get("layer_norm_elementwise_affine", True):
        raise ModelError("OPT without a final layer norm or without norm weights is not supported")
    activation = config.get("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ModelError(f"OPT with activation {activation} is not supported")
    bias = bool(config.get("enable_bias", True))
    return Arch(
        family="opt",
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["ffn_dim"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context_limit=int(config["max_position_embeddings"]),
        norm="layer",
        norm_eps=1e-5,
        activation=activation,
        gated_mlp=False,
        rope=None,
        position_offset=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        dtype=_dtype(config),
        bos_token_id=config.get("bos_token_id", 2),
        eos_token_ids=_eos(config, generation, default=2),
        generation=generation_defaults(generation),
    )


def _llama_like(family: Family) -> Callable[[Config, Config], Arch]:
    """The reader of a family with RMS norm, rotary positions and a gated MLP."""

    def read(config: Config, generation: Config) -> Arch:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"{family} with activation {config['hidden_act']} is not supported")
        default_kv = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family, heads)
        attention_bias = family != "qwen2" and bool(config.get("attention_bias", False))
        return Arch(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or default_kv),
            head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
            context_limit=_context_limit(family, config),
            norm="rms",
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation="silu",
            gated_mlp=True,
            rope=_rope(config),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_dtype(config),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos(config, generation, default=2 if family in ("llama", "mistral") else None),
            generation=generation_defaults(generation),
        )

    return read


READERS: dict[str, Callable[[Config, Config], Arch]] = {
    "opt": _opt,
    "llama": _llama_like("llama"),
    "mistral": _llama_like("mistral"),
    "qwen2": _llama_like("qwen2"),
    "qwen3": _llama_like("qwen3"),
}
"""The reader of each ``model_type`` of config.json."""


def _context_limit(family: Family, config: Config) -> int:
    """The longest context that attention sees in full: inside a sliding window nothing slides."""
    limit = int(config["max_position_embeddings"])
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    kinds = config.get("layer_types")
    slides = config.get("use_sliding_window", family == "mistral")
    if kinds is not None:
        slides = "sliding_attention" in kinds
    return min(limit, int(window)) if slides and window is not None else limit


def _rope(config: Config) -> Rope:
    parameters: Config = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = _or(parameters.get("rope_theta", config.get("rope_theta")), 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError("partial rotary positions are not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(parameters["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise ModelError(f"RoPE scaling {kind!r} is not supported (supported: default, linear, llama3)")


def _dtype(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"weights of type {name} are not supported (supported: {', '.join(DTYPE_BYTES)})")
    return name


def _eos(config: Config, generation: Config, default: int | None) -> tuple[int, ...]:
    """generation_config.json wins: chat models list more end tokens there than config.json does."""
    value = generation.get("eos_token_id", config.get("eos_token_id", default))
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def generation_defaults(config: Config) -> Sampling:
    """The sampling that transformers' ``generate`` would do with this generation_config.json."""
    penalty = float(config.get("repetition_penalty") or 1.0)
    if not config.get("do_sample"):
        return Sampling(repetition_penalty=penalty)
    top_k = config.get("top_k", _HF_TOP_K)
    return Sampling(
        temperature=_or(config.get("temperature"), 1.0),
        top_k=int(top_k or 0),
        top_p=_or(config.get("top_p"), 1.0),
        min_p=_or(config.get("min_p"), 0.0),
        repetition_penalty=penalty,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
