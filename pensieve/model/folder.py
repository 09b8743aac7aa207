"""Reads a Hugging Face model folder: its architecture, recommended sampling, weight files and fingerprint. No torch.

The weight files are those that transformers chooses: ``transformers_weights`` of config.json if set, else the
``SINGLE`` file, else the files that the ``INDEX`` names. An index beside the single file is ignored: it is left over
from an earlier save.

The fingerprint identifies a model by its content, so that another model never continues a history unnoticed. It covers
config.json, except fields that only name the program that wrote it. Of every weight file it covers the name, size,
header (names, types and shapes of all tensors) and ``SAMPLES`` blocks of 4 KiB, spread evenly over the data. That takes
well under a second for a model of any size. Changes of single weights between the samples go unseen; another
checkpoint, fine-tune or training step does not, since it changes all weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from pensieve.config import WeightsName
from pensieve.core import Sampling
from pensieve.model.arch import Arch, ModelError
from pensieve.model.families import READERS, generation_defaults
from pensieve.model.gguf import gguf_arch, gguf_fingerprint, gguf_generation
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


SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER: Final = "adapter_model.safetensors"


class MissingWeights(ModelError):
    """The folder has no loadable weights; the message says what it has instead."""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None without a file. Raises ModelError when it is not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object")
    return data


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, in reading order: if two files have a tensor, the last one counts.
    Raises ModelError when the folder has none, when one is missing, or when the index cannot be read."""
    chosen = _chosen(folder)
    if chosen is None:
        raise MissingWeights(_missing_message(folder))
    if chosen.name.endswith(".index.json"):
        return _indexed(folder, chosen)
    return [chosen]


def _chosen(folder: Path) -> Path | None:
    """Return the weight file or the index."""
    config = read_json(folder / "config.json") or {}
    named = config.get("transformers_weights")
    if named is not None:
        suffixes = (".safetensors", ".safetensors.index.json")
        if not isinstance(named, str) or not named.endswith(suffixes) or not _is_inside(named):
            raise ModelError(
                f"{folder / 'config.json'}: transformers_weights is {named!r}, not a safetensors file or index of the "
                "folder"
            )
        if not (folder / named).is_file():
            raise ModelError(
                f"{folder / 'config.json'}: transformers_weights names {named}, which is missing"
            )
        return folder / named
    return next((folder / name for name in (SINGLE, INDEX) if (folder / name).is_file()), None)


def _indexed(folder: Path, index: Path) -> list[Path]:
    weights = (read_json(index) or {}).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelError(f"{index}: weight_map is not an object that gives each tensor its file")
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or not _is_inside(name):
            raise ModelError(
                f"{index}: weight_map gives {tensor} the file {name!r}, not a safetensors file of the folder"
            )
    files = [folder / name for name in sorted(set(weights.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise MissingWeights(
            f"{index}: weight_map names {absent[0]}, which is missing ({len(absent)} of {len(files)} files are)"
        )
    return files


def _is_inside(name: str) -> bool:
    """Return whether a name is inside the folder. Links are not followed: a hub's cache consists of them."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and name not in ("", ".")


def _missing_message(folder: Path) -> str:
    for name in _PICKLED:
        if (folder / name).is_file():
            return (
                f"{folder}: no {SINGLE}; {name} is pickled, which may run code when it is read: convert it with "
                "transformers, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
    if (folder / _ADAPTER).is_file():
        return f"{folder}: no {SINGLE}; {_ADAPTER} is an adapter: merge it into its base model first"
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return f"{folder}: no {SINGLE} and no {INDEX} that names {others[0]}"
    return f"{folder}: no {SINGLE} (weights must be safetensors files)"


SAMPLES: Final = 16
BLOCK_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""
_INCIDENTAL: Final = frozenset({"transformers_version", "_name_or_path"})


def model_fingerprint(folder: Path, *, weights: bool = True, form: WeightsName = "full") -> str:
    """Return the SHA-256 (hex) of the model in ``folder``. ``weights`` False: ignore weights, as with random
    ones. ``form``: with 8-bit codes (``has_fp8_products``) the model computes something else. Raises ModelError
    when config.json is no JSON object or the index is invalid, OSError when a file is unreadable."""
    fp8 = has_fp8_products(folder, form)
    if folder.is_file():
        whole = gguf_fingerprint(folder, weights=weights)
        return hashlib.sha256(f"{whole}\0fp8 weights".encode()).hexdigest() if fp8 else whole
    digest = hashlib.sha256()
    digest.update(_config(folder / "config.json"))
    try:
        files = weight_files(folder) if weights else []
    except MissingWeights:
        files = []  # the engine reports this when it loads them
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        _add_file(digest, file)
    if not weights:
        digest.update(b"\0random weights")
    if fp8:
        digest.update(b"\0fp8 weights")
    return digest.hexdigest()


def _config(path: Path) -> bytes:
    config = read_json(path)
    if config is None:
        return b""
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    return json.dumps(kept, sort_keys=True).encode()


def _add_file(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
        digest.update(size.to_bytes(8, "little") + length + header)
        start = len(length) + len(header)
        last = max(start, size - BLOCK_BYTES)
        for sample in range(SAMPLES):
            file.seek(start + (last - start) * sample // (SAMPLES - 1))
            digest.update(file.read(BLOCK_BYTES))
