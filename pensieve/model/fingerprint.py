"""A name for a model by its content, so that a history is never continued by another model unnoticed. No torch.

Covered are config.json (but for the fields that only say which program wrote it) and, of every file that is loaded
(``files.weight_files``): its name, its size, its header (names, types and shapes of all tensors) and
``SAMPLES`` blocks of 4 KiB spread evenly over its data. That takes well under a second for a model of any size. A
change of single weights between the samples goes unseen; another checkpoint, another fine-tune or another training step
does not: they change all weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from pensieve.model.files import MissingWeights, read_json, weight_files
from pensieve.model.gguf import gguf_fingerprint

SAMPLES: Final = 16
BLOCK_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""
_INCIDENTAL: Final = frozenset({"transformers_version", "_name_or_path"})


def model_fingerprint(folder: Path, *, weights: bool = True) -> str:
    """SHA-256 (hex) of the model in ``folder``. ``weights`` False: there are none to look at, as with random ones.

    Raises ModelError when config.json is no JSON object or the index cannot be used, OSError when a file is unreadable.
    """
    if folder.is_file():
        return gguf_fingerprint(folder, weights=weights)
    digest = hashlib.sha256()
    digest.update(_config(folder / "config.json"))
    try:
        files = weight_files(folder) if weights else []
    except MissingWeights:
        files = []  # the engine, which loads them, says what is missing
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        _add_file(digest, file)
    if not weights:
        digest.update(b"\0random weights")
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
