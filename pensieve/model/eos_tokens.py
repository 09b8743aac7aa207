"""End-of-turn tokens from the JSON files of a model folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pensieve.model.arch import ModelError

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
