"""Parses a config.json as transformers does, and reads what the families have in common."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, Final

from pensieve.core import Sampling
from pensieve.model.arch import DTYPE_BYTES, ModelError

Config = dict[str, Any]

CONFIG_CLASSES: Final = {
    "arcee": ("arcee", "ArceeConfig"),
    "bamba": ("bamba", "BambaConfig"),
    "cohere": ("cohere", "CohereConfig"),
    "cohere2": ("cohere2", "Cohere2Config"),
    "cwm": ("cwm", "CwmConfig"),
    "exaone4": ("exaone4", "Exaone4Config"),
    "falcon_h1": ("falcon_h1", "FalconH1Config"),
    "gemma": ("gemma", "GemmaConfig"),
    "gemma2": ("gemma2", "Gemma2Config"),
    "gemma3": ("gemma3", "Gemma3TextConfig"),
    "gemma3_text": ("gemma3", "Gemma3TextConfig"),
    "glm": ("glm", "GlmConfig"),
    "glm4": ("glm4", "Glm4Config"),
    "gpt_oss": ("gpt_oss", "GptOssConfig"),
    "granite": ("granite", "GraniteConfig"),
    "granitemoe": ("granitemoe", "GraniteMoeConfig"),
    "helium": ("helium", "HeliumConfig"),
    "llama": ("llama", "LlamaConfig"),
    "mamba2": ("mamba2", "Mamba2Config"),
    "ministral": ("ministral", "MinistralConfig"),
    "ministral3": ("ministral3", "Ministral3Config"),
    "mistral": ("mistral", "MistralConfig"),
    "mistral3": ("mistral", "MistralConfig"),
    "mixtral": ("mixtral", "MixtralConfig"),
    "olmo2": ("olmo2", "Olmo2Config"),
    "olmo3": ("olmo3", "Olmo3Config"),
    "olmoe": ("olmoe", "OlmoeConfig"),
    "opt": ("opt", "OPTConfig"),
    "phi3": ("phi3", "Phi3Config"),
    "qwen2": ("qwen2", "Qwen2Config"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeConfig"),
    "qwen3": ("qwen3", "Qwen3Config"),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig"),
    "seed_oss": ("seed_oss", "SeedOssConfig"),
    "smollm3": ("smollm3", "SmolLM3Config"),
    "stablelm": ("stablelm", "StableLmConfig"),
    "starcoder2": ("starcoder2", "Starcoder2Config"),
}
"""transformers' module (below ``transformers.models``) and config class of each family, or of its text part."""
_OUTSIDE: Final = ("bos_token_id", "dtype", "eos_token_id", "tie_word_embeddings", "torch_dtype")
"""Fields that count outside ``text_config``."""
_HF_TOP_K = 50
"""Default of ``generate`` when sampling is on and generation_config.json names no top_k."""
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def parsed_config(
    family: str, config: Config, *more: str, sizes: tuple[str, ...] = _SIZES, complete: bool = True
) -> Any:
    """Parse the config with transformers' class; require ``sizes`` and ``more`` above 0. Absent ones count as the
    class's defaults unless the family's files are ``complete``. Raises ModelError with the field."""
    for name in (*sizes, *more):
        if name in config:
            require_positive(name, config[name])
        elif complete:
            raise ModelError(f"{name} is missing")
    if family in ("opt", "llama") and config["hidden_size"] % config["num_attention_heads"]:
        raise ModelError(
            f"hidden_size {config['hidden_size']} is not a multiple of num_attention_heads "
            f"{config['num_attention_heads']}"
        )
    folder, class_name = CONFIG_CLASSES[family]
    module = _config_module(folder)
    try:
        # A copy: the class modifies its arguments.
        parsed = getattr(module, class_name).from_dict(_with_floats(copy.deepcopy(config)))
        if family not in ("opt", "mamba2"):
            parsed.standardize_rope_params()  # as the model does, now with all fields present
    except Exception as error:
        # The class parses untrusted input and raises many types: its own errors, KeyError, ValueError.
        raise ModelError(_parse_error(error, config)) from error
    return parsed


def _with_floats(value: Any) -> Any:
    """Return a part of config.json with infinity as a number. transformers writes it as an object."""
    if isinstance(value, dict) and list(value) == ["__float__"]:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {name: _with_floats(item) for name, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _config_module(folder: str) -> ModuleType:
    """Import transformers' module with the config class of a family, from this folder of ``transformers.models``.

    transformers takes the names of activations from a module that imports torch's compiler and Triton: 3 s of CPU time
    at each start of an engine (transformers 5.23, torch 2.13). No config class here looks at these names, so an empty
    table takes the place of that module during this import.
    """
    stand_in = ModuleType("transformers.activations")
    stand_in.__dict__["ACT2FN"] = {}
    return transformers_module(f"models.{folder}.configuration_{folder}", {"activations": stand_in})


def _parse_error(error: Exception, config: Config) -> str:
    """Return transformers' objection to a config, in one line."""
    lines = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
    field = lines.partition("Validation error for field '")[2].partition("'")[0]
    if field in config:
        return f"{field} is {json.dumps(config[field])}, which is not valid"
    return lines or type(error).__name__


def require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{name} is {json.dumps(value)}; it must be a whole number above 0")


def text_part(config: Config) -> Config:
    """Return ``text_config`` of a family that takes images, too, with the fields that count outside. Raises
    ModelError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {json.dumps(text)}, not an object")
    # Two flags tie the head. transformers follows the outer one, which is true by default.
    outer = {name: config[name] for name in _OUTSIDE if name in config}
    return text | {"tie_word_embeddings": True} | outer


def dtype_of(config: Config) -> str:
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
        if not is_number(value) or not low <= value <= high:
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


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_DEFAULTS: Final = {
    "arcee": (128001,),
    "bamba": (2,),
    "cohere": (255001,),
    "cohere2": (255001,),
    "cwm": (128001, 128008, 128009),
    "exaone4": (2,),
    "falcon_h1": (2,),
    "gemma": (1,),
    "gemma2": (1,),
    "gemma3": (1,),
    "gemma3_text": (1,),
    "glm": (151329, 151336, 151338),
    "glm4": (151329, 151336, 151338),
    "granite": (2,),
    "granitemoe": (2,),
    "helium": (2,),
    "llama": (2,),
    "mamba2": (2,),
    "ministral": (2,),
    "ministral3": (2,),
    "mistral": (2,),
    "mistral3": (2,),
    "mixtral": (2,),
    "olmo2": (50279,),
    "olmo3": (50279,),
    "olmoe": (50279,),
    "opt": (2,),
    "phi3": (32000,),
    "seed_oss": (2,),
    "smollm3": (128001,),
    "stablelm": (0,),
    "starcoder2": (50256,),
}
"""Default of ``eos_token_id`` in transformers' config class; the other families have none."""


def declared_eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids in generation_config.json and config.json, in this order, each once. Models name their
    end of turn in one file and their end of text in the other. Raises ModelError, with file and field, when a
    value is neither an id, a list of ids nor null."""
    ids: list[int] = []
    for file, values in (("generation_config.json", generation), ("config.json", config)):
        ids += [token_id for token_id in _ids(file, values.get("eos_token_id")) if token_id not in ids]
    return tuple(ids)


def default_eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the family's end of text, for a folder without ``eos_token_id`` in either file. Empty if
    the family has none, or if a file has the field, even as null."""
    is_named = "eos_token_id" in config or "eos_token_id" in generation
    return () if is_named else _DEFAULTS.get(str(config.get("model_type", "")), ())


def _ids(file: str, value: object) -> list[int]:
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ModelError(f"{file}: eos_token_id has {json.dumps(token_id)}, which is not a token id")
    return values


_lock = Lock()


def transformers_module(name: str, stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Import ``transformers.NAME``. ``stand_ins``, by name below ``transformers``, take the place of modules that it
    imports and does not need.

    ``import transformers`` reads the source of each of its modules, to learn which names they define: 0.8 s of CPU
    time in the front end, and again in the engine (transformers 5.23). Only a search for names needs that index. So
    empty packages take its place during this import, unless transformers is imported already. A later
    ``import transformers`` runs as always, and finds the modules that were imported here. Other versions may need the
    index (5.17 takes ``AddedToken`` from it): then the whole of transformers is imported, which gives the same module.

    Raises ImportError.
    """
    whole = f"transformers.{name}"
    with _lock:
        added = {f"transformers.{below}": module for below, module in (stand_ins or {}).items()}
        if "transformers" not in sys.modules:
            added |= _packages()
        added = {key: module for key, module in added.items() if key not in sys.modules}
        sys.modules.update(added)
        try:
            return importlib.import_module(whole)
        except ImportError:
            if not added:
                raise
        finally:
            for key in added:
                del sys.modules[key]
        return importlib.import_module(whole)


def _packages() -> dict[str, ModuleType]:
    """Return ``transformers`` and ``transformers.models`` as packages that hold nothing but their folder."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    folder = Path(spec.origin).parent
    packages = {}
    for name, path in (("transformers", folder), ("transformers.models", folder / "models")):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [str(path)]
    packages["transformers"].__dict__["__version__"] = importlib.metadata.version("transformers")
    return packages
