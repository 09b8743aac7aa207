"""Finds the folder on this machine for what a user calls a model. No torch."""

from __future__ import annotations

from pathlib import Path

from pensieve.machine import user_path
from pensieve.model.arch import ModelError

DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "model"
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Weights, configuration, tokenizer and chat template; never pickled weights or code."""


def resolve_model(name: str) -> Path:
    """The folder of ``name``: a local folder, ``demo``, or a hub id, which is downloaded when it is not here yet.
    Absolute: an engine has another working folder.

    Raises ModelError when there is no such model or the hub cannot be reached.
    """
    if name == "demo":
        if not (DEMO_FOLDER / "config.json").is_file():
            raise ModelError(f"the demo model is not part of this installation ({DEMO_FOLDER} is missing)")
        return DEMO_FOLDER
    if not name.strip():
        raise ModelError("no model named: give a folder, a hub id or demo")
    folder = user_path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: no config.json; not a model folder")
        return folder.absolute()
    if is_path(name):
        raise ModelError(f"{name}: no such folder")
    return _download(name)


def is_path(name: str) -> bool:
    """Whether it can only be meant as a folder: hub ids have one slash at most, inside."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def display_name(name: str) -> str:
    """What others are told of the model that a user calls ``name``: a folder is told by its own name, not its path."""
    folder = user_path(name)
    return folder.resolve().name if folder.is_dir() else name


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise ModelError(f"{hub_id}: neither a folder here nor a hub id") from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{hub_id}: not a local folder, and the hub refused it: {_first_line(error)}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{hub_id}: not a local folder, and the hub cannot be reached; download it where there is network and "
            "pass its folder"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
