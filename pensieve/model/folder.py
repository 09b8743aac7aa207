"""What the JSON files of a Hugging Face model folder say: its architecture, and the sampling its authors recommend.

No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pensieve.core import Sampling
from pensieve.model.arch import Arch, ModelError
from pensieve.model.families import READERS, generation_defaults
from pensieve.model.gguf import gguf_arch, gguf_generation


def load_arch(folder: Path) -> Arch:
    """The architecture of the model in ``folder``.

    Reads config.json and, when there, generation_config.json; of a GGUF file its metadata. Raises ModelError.
    """
    if folder.is_file():
        return gguf_arch(folder)
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: no config.json")
    family = str(config.get("model_type", ""))
    if family not in READERS:
        names = ", ".join(config.get("architectures") or [family or "none named"])
        raise ModelError(f"{folder}: architecture {names} is not supported (supported: {', '.join(READERS)})")
    if config.get("quantization_config"):
        raise ModelError(f"{folder}: quantised checkpoints are not supported")
    generation = _read_json(folder / "generation_config.json") or {}
    try:
        return READERS[family](config, generation)
    except KeyError as error:
        raise ModelError(f"{folder}/config.json: {error.args[0]} is missing") from error


def load_generation(folder: Path) -> Sampling:
    """What a model's authors recommend; greedy unless they say ``do_sample``. Raises ModelError."""
    if folder.is_file():
        return gguf_generation(folder)
    return generation_defaults(_read_json(folder / "generation_config.json") or {})


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None when there is no such file. Raises ModelError when it is not one."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object")
    return data
