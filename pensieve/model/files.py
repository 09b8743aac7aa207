"""Finds the weight files of a model folder. No torch.

The choice is that of transformers: ``transformers_weights`` of config.json if set, else the ``SINGLE`` file,
else the files that the ``INDEX`` names. An index beside the single file is ignored: it is left over from an
earlier save.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pensieve.model.arch import ModelError

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
