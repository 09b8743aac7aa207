"""Reads a Hugging Face model folder's JSON files: its architecture, and its recommended sampling. No torch."""

from __future__ import annotations

from pathlib import Path

from pensieve.core import Sampling
from pensieve.model.arch import Arch, ModelError
from pensieve.model.families import READERS, generation_defaults
from pensieve.model.files import read_json
from pensieve.model.gguf import gguf_arch, gguf_generation


def load_arch(folder: Path) -> Arch:
    """Return the architecture of the model in ``folder``. Reads config.json and, if present,
    generation_config.json; of a GGUF file its metadata. Raises ModelError."""
    if folder.is_file():
        return gguf_arch(folder)
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: no config.json")
    family = str(config.get("model_type", ""))
    if family not in READERS:
        classes = config.get("architectures")
        names = ", ".join(
            map(str, classes if isinstance(classes, list) and classes else [family or "none named"])
        )
        raise ModelError(f"{folder}: architecture {names} is not supported (supported: {', '.join(READERS)})")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        named = f" (quant_method {method})" if method else ""
        raise ModelError(
            f"{folder}/config.json: quantization_config{named}: quantised checkpoints are not supported"
        )
    generation = read_json(folder / "generation_config.json") or {}
    try:
        return READERS[family](config, generation)
    except ModelError as error:
        raise ModelError(f"{folder}{_file(error)}{error}") from error


def load_generation(folder: Path) -> Sampling:
    """Return the sampling that a model's authors recommend; greedy without ``do_sample``. Raises ModelError."""
    if folder.is_file():
        return gguf_generation(folder)
    try:
        return generation_defaults(read_json(folder / "generation_config.json") or {})
    except ModelError as error:
        raise ModelError(f"{folder}{_file(error)}{error}") from error


def _file(error: ModelError) -> str:
    """Return the text between folder and error: config.json, unless the error names its file."""
    named = str(error).startswith(("config.json", "generation_config.json"))
    return "/" if named else "/config.json: "
