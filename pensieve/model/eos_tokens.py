"""The tokens that end a turn, as the JSON files of a model folder name them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pensieve.model.arch import ModelError

_DEFAULTS: Final = {"opt": 2, "llama": 2, "mistral": 2}
"""What transformers takes where no file names one, by family."""


def declared_eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that generation_config.json or config.json names, in this order, each once.

    Models name their end of turn in one file and their end of text in the other. Raises ModelError, with file and
    field, when a value is neither an id, a list of ids nor null.
    """
    ids: list[int] = []
    for file, values in (("generation_config.json", generation), ("config.json", config)):
        ids += [one for one in _ids(file, values.get("eos_token_id")) if one not in ids]
    return tuple(ids)


def default_eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The family's end of text, for a folder in which no file says anything of ends; empty if it has none."""
    said = "eos_token_id" in config or "eos_token_id" in generation
    default = None if said else _DEFAULTS.get(str(config.get("model_type", "")))
    return () if default is None else (default,)


def _ids(file: str, value: object) -> list[int]:
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise ModelError(f"{file}: eos_token_id has {json.dumps(one)}, which is no token id")
    return values
