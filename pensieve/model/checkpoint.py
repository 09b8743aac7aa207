"""The safetensors files of a model folder as one table of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from pensieve.model.arch import ModelError

PROGRESS_BYTES: Final = 1 << 30
"""Loading less than this shows no progress bar."""

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry along; they are computed here."""


class Checkpoint:
    """Tensors by name over all safetensors files of a folder; remembers which were asked for."""

    def __init__(self, folder: Path, stack: ExitStack, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.where: dict[str, Any] = {}
        self.used: set[str] = set()
        files = _files(folder)
        try:
            for file in files:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                self.where.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read ({error})") from error
        total = sum(file.stat().st_size for file in files)
        progress = stack.enter_context(_progress(total))
        self.advance = _advance(progress, f"loading {folder.name}", len(self.where))

    def get(self, names: list[str], shape: tuple[int, ...]) -> torch.Tensor:
        """The named tensors one after another along the first axis, together of ``shape``."""
        missing = [name for name in names if name not in self.where]
        if missing:
            raise ModelError(
                f"{self.folder}: no tensor {missing[0]} among {len(self.where)} in the checkpoint"
            )
        self.used.update(names)
        parts = [self.where[name].get_tensor(name).to(self.device, self.dtype) for name in names]
        self.advance(len(names))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: {' + '.join(names)} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        return tensor

    def require_all_used(self, tied: bool) -> None:
        """Raises ModelError on tensors that nobody asked for: they would be silently without effect."""
        left = {name for name in self.where if not name.endswith(_IGNORED_SUFFIXES)} - self.used
        if tied:
            left.discard("lm_head.weight")
        if left:
            names = ", ".join(sorted(left)[:3])
            raise ModelError(
                f"{self.folder}: {len(left)} tensors that this architecture has no use for: {names}"
            )


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, else the only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read ({error!r})") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{folder}: no {absent[0]} (weights must be safetensors files)")
    return files


def _progress(total_bytes: int) -> Progress:
    # On stderr: the server's stdout carries its ready line and nothing else.
    return Progress(transient=True, disable=total_bytes < PROGRESS_BYTES, console=Console(stderr=True))


def _advance(progress: Progress, title: str, total: int) -> Callable[[int], None]:
    task = progress.add_task(title, total=total)
    return lambda count: progress.advance(task, count)
