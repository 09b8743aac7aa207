"""Reads a Hugging Face model folder's JSON files: its architecture, and its recommended sampling. No torch."""

from __future__ import annotations

from pathlib import Path

from pensieve.config import WeightsName
from pensieve.core import Sampling
from pensieve.model.arch import Arch, ModelError
from pensieve.model.families import READERS, generation_defaults
from pensieve.model.files import read_json
from pensieve.model.gguf import gguf_arch, gguf_generation
from pensieve.model.quantisation import quantisation_of


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
    generation = read_json(folder / "generation_config.json") or {}
    try:
        quantisation_of(config)  # refuses an unknown one before any weights are read
        return READERS[family](config, generation)
    except ModelError as error:
        raise ModelError(f"{folder}{_file(error)}{error}") from error


def has_fp8_products(folder: Path, weights: WeightsName) -> bool:
    """Return whether the weights of the model in ``folder`` stay codes of 8 bits (``--weights``). Raises ModelError."""
    if weights != "auto" or folder.is_file():
        return weights == "fp8"
    try:
        kind = quantisation_of(read_json(folder / "config.json") or {})
    except ModelError as error:
        raise ModelError(f"{folder}{_file(error)}{error}") from error
    return kind is not None and kind.codes


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
