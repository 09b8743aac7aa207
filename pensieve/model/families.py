"""Readers that turn the config.json of a family into an ``Arch``. A family is one ``model_type``.

transformers' own config class parses the file first, so defaults, nulls, types and both spellings of rotary
positions are interpreted as transformers does. The readers map the result and reject unsupported values.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Literal, get_args

from pensieve.core import Sampling
from pensieve.model.arch import DTYPE_BYTES, Arch, ModelError, Rope
from pensieve.model.eos_tokens import declared_eos_ids, default_eos_ids

Config = dict[str, Any]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "seed_oss"]
"""Families that ``_llama_like`` reads. OPT has a reader of its own, ``_opt``."""

_CLASSES: Final = {
    "opt": "OPTConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "seed_oss": "SeedOssConfig",
}
"""transformers' config class of each family in READERS."""
_HF_TOP_K = 50
"""Default of ``generate`` when sampling is on and generation_config.json names no top_k."""
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _parsed(family: str, config: Config, *sizes: str) -> Any:
    """Parse the config with transformers' class; require ``sizes`` above 0. Raises ModelError with the field."""
    sizes = (*_SIZES, *sizes)
    for name in sizes:
        if name not in config:
            raise ModelError(f"{name} is missing")
        _require_positive(name, config[name])
    if family in ("opt", "llama") and config["hidden_size"] % config["num_attention_heads"]:
        raise ModelError(
            f"hidden_size {config['hidden_size']} is not a multiple of num_attention_heads "
            f"{config['num_attention_heads']}"
        )
    module = _config_module(family)
    try:
        # A copy: the class modifies its arguments.
        parsed = getattr(module, _CLASSES[family]).from_dict(copy.deepcopy(config))
        if family != "opt":
            parsed.standardize_rope_params()  # as the model does, now with all fields present
    except Exception as error:
        # The class parses untrusted input and raises many types: its own errors, KeyError, ValueError.
        raise ModelError(_parse_error(error, config)) from error
    return parsed


def _config_module(family: str) -> ModuleType:
    """Import transformers' module with the config class of a family.

    transformers takes the names of activations from a module that imports torch's compiler and Triton: 3 s of CPU time
    at each start of an engine (transformers 5.23, torch 2.13). No config class here looks at these names, so an empty
    table takes the place of that module during this import.
    """
    name, heavy = f"transformers.models.{family}.configuration_{family}", "transformers.activations"
    if name in sys.modules or heavy in sys.modules:
        return importlib.import_module(name)
    stand_in = ModuleType(heavy)
    stand_in.__dict__["ACT2FN"] = {}
    sys.modules[heavy] = stand_in
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[heavy]


def _parse_error(error: Exception, config: Config) -> str:
    """Return transformers' objection to a config, in one line."""
    lines = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
    field = lines.partition("Validation error for field '")[2].partition("'")[0]
    if field in config:
        return f"{field} is {json.dumps(config[field])}, which is not valid"
    return lines or type(error).__name__


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{name} is {json.dumps(value)}; it must be a whole number above 0")


def _opt(config: Config, generation: Config) -> Arch:
    parsed = _parsed("opt", config, "ffn_dim")
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
        num_layers=parsed.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context_limit=parsed.max_position_embeddings,
        norm="layer",
        norm_eps=1e-5,
        activation=activation,
        gated_mlp=False,
        rope=None,
        position_offset=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied_embeddings=parsed.tie_word_embeddings,
        dtype=_dtype(config),
        bos_token_id=parsed.bos_token_id,
        eos_token_ids=declared_eos_ids(config, generation) or default_eos_ids(config, generation),
        generation=generation_defaults(generation),
    )


def _llama_like(family: Family) -> Callable[[Config, Config], Arch]:
    """Return the reader of a family with RMS norm, rotary positions and a gated MLP."""

    def read(config: Config, generation: Config) -> Arch:
        parsed = _parsed(family, config, "intermediate_size")
        heads, kv_heads = parsed.num_attention_heads, parsed.num_key_value_heads
        if parsed.hidden_act not in ("silu", "swish"):
            raise ModelError(f"hidden_act {parsed.hidden_act} is not supported (supported: silu)")
        _require_positive("num_key_value_heads", kv_heads)
        head_dim = getattr(parsed, "head_dim", None)
        head_dim = parsed.hidden_size // heads if head_dim is None else head_dim
        _require_positive("head_dim", head_dim)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd, and rotary positions rotate pairs")
        # transformers ignores this field of Mistral (never a bias) and Qwen2 (always one on q, k and v).
        attention_bias = family in ("llama", "qwen3", "seed_oss") and parsed.attention_bias
        return Arch(
            family=family,
            vocab_size=parsed.vocab_size,
            hidden_size=parsed.hidden_size,
            intermediate_size=parsed.intermediate_size,
            num_layers=parsed.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_limit=_context_limit(family, parsed),
            norm="rms",
            norm_eps=parsed.rms_norm_eps,
            activation="silu",
            gated_mlp=True,
            rope=_rope(parsed.rope_parameters),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=parsed.attention_out_bias if family == "seed_oss" else attention_bias,
            mlp_bias=family in ("llama", "seed_oss") and parsed.mlp_bias,
            qk_norm=family == "qwen3",
            tied_embeddings=parsed.tie_word_embeddings,
            dtype=_dtype(config),
            bos_token_id=parsed.bos_token_id,
            eos_token_ids=declared_eos_ids(config, generation) or default_eos_ids(config, generation),
            generation=generation_defaults(generation),
        )

    return read


READERS: dict[str, Callable[[Config, Config], Arch]] = {
    "opt": _opt,
    **{family: _llama_like(family) for family in get_args(Family)},
}
"""The reader of each ``model_type`` in config.json."""


def _context_limit(family: Family, parsed: Any) -> int:
    """Return the longest context that attention sees in full: inside a sliding window nothing slides."""
    limit: int = parsed.max_position_embeddings
    kinds = set(getattr(parsed, "layer_types", None) or ())
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        raise ModelError(f"layer_types has {min(map(str, others))}, which is not supported")
    window = getattr(parsed, "sliding_window", None)
    if window is None:
        if "sliding_attention" in kinds:
            raise ModelError("layer_types has sliding_attention, but there is no sliding_window that is used")
        return limit
    if kinds == {"full_attention"} and family in ("qwen2", "qwen3"):
        return limit
    # transformers' cache of a Llama applies a window that its attention ignores: inside it both are the same.
    _require_positive("sliding_window", window)
    return min(limit, int(window))


def _rope(parameters: Config) -> Rope:
    """Read the rotary positions. ``parameters``: merged by transformers' class from ``rope_parameters``, or
    from ``rope_scaling`` and ``rope_theta``."""
    kind = parameters.get("rope_type")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise ModelError("partial_rotary_factor other than 1 is not supported")

    def number(name: str) -> float:
        value: Any = parameters.get(name)
        if not _is_number(value) or value <= 0:
            raise ModelError(f"{name} of the rotary positions is {json.dumps(value)}, not a number above 0")
        return float(value)

    theta = number("rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low == high:
            raise ModelError("low_freq_factor and high_freq_factor of the rotary positions are equal")
        original = int(number("original_max_position_embeddings"))
        return Rope(theta, "llama3", number("factor"), low, high, original)
    raise ModelError(f"rope_type {kind!r} is not supported (supported: default, linear, llama3)")


def _dtype(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name} is not supported (supported: {', '.join(DTYPE_BYTES)})")
    return name


def generation_defaults(config: Config) -> Sampling:
    """Return the sampling of transformers' ``generate`` for this generation_config.json. Raises ModelError,
    which names the field, on an invalid value."""

    def number(name: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        value = config.get(name)
        if value is None:
            return default
        if not _is_number(value) or not low <= value <= high:
            raise ModelError(f"generation_config.json: {name} is {json.dumps(value)}, which is not valid")
        return float(value)

    do_sample = config.get("do_sample")
    if do_sample not in (None, True, False) or (
        isinstance(do_sample, int | float) and not isinstance(do_sample, bool)
    ):
        raise ModelError(
            f"generation_config.json: do_sample is {json.dumps(do_sample)}, neither true nor false"
        )
    penalty = number("repetition_penalty", 1.0, low=0.0) or 1.0
    if not do_sample:
        return Sampling(repetition_penalty=penalty)
    top_k = int(number("top_k", 0.0)) if "top_k" in config else _HF_TOP_K
    return Sampling(
        temperature=number("temperature", 1.0),
        top_k=top_k,
        top_p=number("top_p", 1.0, 0.0, 1.0),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=penalty,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
