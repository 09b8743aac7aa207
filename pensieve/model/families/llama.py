"""Readers of the families that resemble Llama: RMS norm, rotary positions, and differences that fit in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pensieve.model.arch import Arch
from pensieve.model.families.common import (
    activation_of,
    cache_limit,
    common_fields,
    equal_layers,
    full_layers,
    read_rope,
    sliding_layers,
)
from pensieve.model.families.parsing import Config, parsed_config


def reader_of(family: str) -> Callable[[Config, Config], Arch]:
    """Return the reader of one of ``FIELDS``."""

    def read(config: Config, generation: Config) -> Arch:
        parsed = parsed_config(family, config, "intermediate_size")
        activation = activation_of("hidden_act", parsed.hidden_act, "silu")
        fields = common_fields(family, parsed, config, generation)
        fields |= {
            "norm": "rms",
            "norm_eps": parsed.rms_norm_eps,
            "activation": activation,
            "gated_mlp": True,
        }
        return Arch(**fields | _layers(family, parsed, fields["head_dim"]) | FIELDS[family](parsed))

    return read


def _layers(family: str, parsed: Any, head_dim: int) -> dict[str, Any]:
    """Return ``layers``, and the context limit if it is not what config.json says."""
    if family in ("qwen2", "qwen3", "ministral"):
        rope = read_rope(parsed, head_dim)
        return {"layers": sliding_layers(parsed, lambda kind: rope)}
    if family == "olmo3":
        return {"layers": sliding_layers(parsed, lambda kind: read_rope(parsed, head_dim, kind))}
    if family == "mistral":
        return {"layers": equal_layers(parsed, read_rope(parsed, head_dim))}
    return {"layers": full_layers(parsed, read_rope(parsed, head_dim)), "context_limit": cache_limit(parsed)}


def _biases(parsed: Any) -> dict[str, Any]:
    return {"qkv_bias": parsed.attention_bias, "output_bias": parsed.attention_bias}


def _olmo(parsed: Any) -> dict[str, Any]:
    return _biases(parsed) | {"norms": "after", "qk_norm": "projection"}


FIELDS: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "llama": lambda parsed: _biases(parsed) | {"mlp_bias": parsed.mlp_bias},
    # transformers ignores attention_bias here (never a bias), and in Qwen2 (always one on q, k and v).
    "mistral": lambda parsed: {},
    "ministral": lambda parsed: {},
    "qwen2": lambda parsed: {"qkv_bias": True},
    "qwen3": lambda parsed: _biases(parsed) | {"qk_norm": "head"},
    "seed_oss": lambda parsed: {
        "qkv_bias": parsed.attention_bias,
        "output_bias": parsed.attention_out_bias,
        "mlp_bias": parsed.mlp_bias,
    },
    "olmo2": _olmo,
    "olmo3": _olmo,
}
"""The fields of each family's ``Arch`` that are not Llama's."""
