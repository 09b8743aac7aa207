"""Resolves a user's name of a model to a local folder or file, and downloads it from a hub if it is not here. No torch.

The hub is Hugging Face's, or the one in HF_ENDPOINT. Files go to the cache of ``huggingface_hub`` (HF_HOME);
each gets its name when it is complete."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pensieve import extras
from pensieve.gguf import is_gguf
from pensieve.machine import user_path
from pensieve.model.arch import ModelError
from pensieve.model.gguf import gguf_arch
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


_PATTERNS: Final = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Weights, configuration, tokenizer and chat template; never pickled weights or code."""
_HOSTS: Final = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/")
_PART: Final = re.compile(r"-(\d{5})-of-\d{5}$")
_QUANT: Final = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F?P?16|F?P?32|F16|F32)[A-Za-z0-9_]*)$", re.IGNORECASE
)
PREFERRED: Final = "Q4_K_M"
"""Default quantisation, as in other programs."""


def is_hub_name(name: str) -> bool:
    """Return whether a name begins with a hub's host."""
    return _HOSTS.match(name) is not None


def download(name: str) -> Path:
    """Download ``ORG/REPO`` and return its folder, or a file of it for ``ORG/REPO:QUANT``; both may begin
    with ``hf.co/``. From a repository with only GGUF files, takes ``Q4_K_M`` or the only quantisation. Raises
    ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo, _, quant = _HOSTS.sub("", name).partition(":")
    unreachable: Exception | None = None
    try:
        files, unreachable = _files(repo)
        if unreachable is not None and quant and not files:
            raise unreachable
        patterns = _gguf_files(name, files, quant) or _PATTERNS
        # Offline, another call is pointless.
        folder = Path(
            snapshot_download(repo, allow_patterns=patterns, local_files_only=unreachable is not None)
        )
    except ModelError as error:
        raise error if unreachable is None else _unreachable_error(name, unreachable) from error
    except HFValidationError as error:
        raise ModelError(f"{name}: neither a folder here nor a hub id") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{name}: not here, and the hub refused it: {_first_line(error)}") from error
    except Exception as error:  # errors of its HTTP client, which differs between versions
        raise _unreachable_error(name, unreachable or error) from error
    return folder if patterns is _PATTERNS else folder / patterns[0]


def _unreachable_error(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"{name}: not here, and the hub cannot be reached ({_first_line(error)}); download it where there is network "
        "and pass its folder or GGUF file"
    )


def _files(repo: str) -> tuple[list[str], Exception | None]:
    """Return the names of the repository's files; if the hub is unreachable, the cached ones and the error."""
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HFValidationError

    try:
        return [file.rfilename for file in HfApi().model_info(repo).siblings or ()], None
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # as above
        try:
            cached = scan_cache_dir().repos
        except CacheNotFound:
            cached = frozenset()
        found = [one for one in cached if one.repo_id == repo and one.repo_type == "model"]
        files = {
            str(file.file_path.relative_to(revision.snapshot_path))
            for one in found
            for revision in one.revisions
            if "main" in revision.refs
            for file in revision.files
        }
        return sorted(files), error


def _gguf_files(name: str, files: Sequence[str], quant: str) -> list[str]:
    """Return the GGUF files to download, all parts of a split model, the first in front; empty for a model folder."""
    found = [file for file in sorted(files) if file.endswith(".gguf") and "mmproj" not in file.lower()]
    if not quant and (not found or any(file.endswith(".safetensors") for file in files)):
        return []
    extras.require("gguf")
    by_quant: dict[str, list[str]] = {}
    for file in found:
        by_quant.setdefault(_quant_of(file), []).append(file)
    spelled = {label.lower(): label for label in by_quant}
    names = {file.lower(): [file] for file in found}
    wanted = (quant or (PREFERRED if len(by_quant) != 1 else next(iter(by_quant)))).lower()
    chosen = by_quant[spelled[wanted]] if wanted in spelled else names.get(wanted)
    if chosen is None:
        there = ", ".join(by_quant) or "no GGUF file"
        asked = f"no quantisation {quant}" if quant else "several GGUF files"
        raise ModelError(
            f"{name}: {asked} there; the repository has {there}{'' if quant else ': name one behind a colon'}"
        )
    if len({_PART.sub("", Path(file).stem) for file in chosen}) > 1:
        raise ModelError(
            f"{name}: several files are {quant}; name one of {', '.join(chosen)} behind the colon"
        )
    return chosen


def _quant_of(file: str) -> str:
    """Return the quantisation at the end of a file's name, or the whole name."""
    stem = _PART.sub("", Path(file).stem)
    match = _QUANT.search(stem)
    return match[1] if match else file


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
