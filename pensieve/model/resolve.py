"""Finds the folder or file on this machine for what a user calls a model. No torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from pensieve import extras
from pensieve.gguf import is_gguf
from pensieve.machine import user_path
from pensieve.model.arch import ModelError
from pensieve.model.gguf import gguf_arch
from pensieve.model.hub import download, is_hub_name
from pensieve.model.smollm2 import SMOLLM2, smollm2

DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "model"
_SUFFIX: Final = ".gguf"


def resolve_model(name: str, leaving: threading.Event | None = None) -> Path:
    """The folder of ``name``, or its GGUF file: a local one, ``demo``, ``smollm2``, or a hub id. Absolute: an engine
    has another working folder. Downloads what is not here yet; ``leaving`` ends the download of ``smollm2``.

    A GGUF file is one that can be served. Raises ModelError when there is no such model or it cannot be fetched,
    ModuleNotFoundError when an extra is missing.
    """
    if name == "demo":
        if not (DEMO_FOLDER / "config.json").is_file():
            raise ModelError(f"the demo model is not part of this installation ({DEMO_FOLDER} is missing)")
        return DEMO_FOLDER
    if not name.strip():
        raise ModelError("no model named: give a folder, a GGUF file, a hub id, demo or smollm2")
    path = user_path(name)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return _checked(path, name)
    if name == SMOLLM2:
        return _checked(smollm2(leaving), name)
    if name.lower().endswith(_SUFFIX) and not is_hub_name(name) and ":" not in name:
        raise ModelError(f"{name}: no such file")
    if is_path(name):
        raise ModelError(f"{name}: no such folder")
    found = download(name)
    return _folder(found) if found.is_dir() else _checked(found, name)


def is_path(name: str) -> bool:
    """Whether it can only be meant as a folder or file: hub ids have one slash at most, inside."""
    return not is_hub_name(name) and (
        name.startswith((".", "/", "~")) or name.partition(":")[0].count("/") > 1
    )


def display_name(name: str) -> str:
    """What others are told of the model that a user calls ``name``: a folder or file is told by its own name, not its
    path."""
    path = user_path(name)
    if path.is_dir():
        return path.resolve().name
    return path.name.removesuffix(_SUFFIX) if path.is_file() else name


def _folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob(f"*{_SUFFIX}"))
        instead = f"; give one of its files: {', '.join(files[:3])}" if files else ""
        raise ModelError(f"{folder}: no config.json; not a model folder{instead}")
    return folder.absolute()


def _checked(path: Path, name: str) -> Path:
    """A GGUF file, absolute; what cannot be served in it is refused here, before a server starts for it."""
    try:
        found = path.is_file() and is_gguf(path)
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror})") from error
    if not found:
        raise ModelError(f"{name}: neither a model folder nor a GGUF file")
    extras.require("gguf")
    gguf_arch(path)
    return path.absolute()
