"""Identifies a model by its content, so that another model never continues a history unnoticed. No torch.

The hash covers config.json, except fields that only name the program that wrote it. Of every loaded file
(``files.weight_files``) it covers the name, size, header (names, types and shapes of all tensors) and ``SAMPLES``
blocks of 4 KiB, spread evenly over the data. That takes well under a second for a model of any size. Changes
of single weights between the samples go unseen; another checkpoint, fine-tune or training step does not,
since it changes all weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from pensieve.config import WeightsName
from pensieve.model.files import MissingWeights, read_json, weight_files
from pensieve.model.folder import has_fp8_products
from pensieve.model.gguf import gguf_fingerprint

SAMPLES: Final = 16
BLOCK_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""
_INCIDENTAL: Final = frozenset({"transformers_version", "_name_or_path"})


def model_fingerprint(folder: Path, *, weights: bool = True, form: WeightsName = "full") -> str:
    """Return the SHA-256 (hex) of the model in ``folder``. ``weights`` False: ignore weights, as with random
    ones. ``form``: with 8-bit codes (``folder.has_fp8_products``) the model computes something else. Raises ModelError
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
