"""Resolves a user's name of a model to a local folder or file. No torch."""

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


def resolve_model(name: str, stop: threading.Event | None = None) -> Path:
    """Return the folder or GGUF file of ``name``: a local path, ``demo``, ``smollm2``, or a hub id.

    The result is absolute: an engine has another working folder. Downloads a missing model; setting ``stop``
    aborts the download of ``smollm2``. A returned GGUF file can be served. Raises ModelError when there is no
    such model or it cannot be downloaded, ModuleNotFoundError when an extra is missing.
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
        return _servable_file(path, name)
    if name == SMOLLM2:
        return _servable_file(smollm2(stop), name)
    if name.lower().endswith(_SUFFIX) and not is_hub_name(name) and ":" not in name:
        raise ModelError(f"{name}: no such file")
    if is_path(name):
        raise ModelError(f"{name}: no such folder")
    found = download(name)
    if not found.exists():
        raise ModelError(f"{name}: has neither a model folder nor a GGUF file")
    return _folder(found) if found.is_dir() else _servable_file(found, name)


def is_path(name: str) -> bool:
    """Return whether ``name`` must be a folder or file: hub ids have at most one slash, inside."""
    return not is_hub_name(name) and (
        name.startswith((".", "/", "~")) or name.partition(":")[0].count("/") > 1
    )


def display_name(name: str) -> str:
    """Return the public name of the model ``name``: of a folder or file its own name, not its path."""
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


def _servable_file(path: Path, name: str) -> Path:
    """Return the absolute path of a GGUF file; raise on one that cannot be served, before a server starts."""
    try:
        found = path.is_file() and is_gguf(path)
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror})") from error
    if not found:
        raise ModelError(f"{name}: neither a model folder nor a GGUF file")
    extras.require("gguf")
    gguf_arch(path)
    return path.absolute()
