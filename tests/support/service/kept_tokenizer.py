"""Servers under test that read the tokenizer as another process has read it, without importing transformers.

That import takes half of the start of a server that has no real engine. Real folders are read in ``tests/tokenizer``,
and by every server of ``tests/e2e``.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
from pathlib import Path

from pensieve.tokenizer import chat
from pensieve.tokenizer.folder import TokenizerFolder, read_folder
from support.tokenizers_ import byte_level, write_folder

KEPT = "tokenizer.pickle"
SHAPE = {"vocab_size": 512, "model_type": "llama"}


@functools.cache
def _pickled() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return pickle.dumps(read_folder(write_folder(Path(folder), byte_level(), **SHAPE)))


def write_kept_folder(folder: Path) -> Path:
    """A model folder for ``use_kept_tokenizers``; other programs read its files."""
    write_folder(folder, byte_level(), **SHAPE)
    (folder / KEPT).write_bytes(_pickled())
    return folder


def use_kept_tokenizers() -> None:
    """From now on this process unpickles the tokenizer of a folder that has one."""

    def read(folder: Path) -> TokenizerFolder:
        kept = folder / KEPT
        if not kept.is_file():
            return read_folder(folder)
        found: TokenizerFolder = pickle.loads(kept.read_bytes())
        return found

    chat.read_folder = read
