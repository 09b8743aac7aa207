"""The demo model: what ``--model demo`` serves, and the demonstration that it remembers.

``talk`` says what is spoken about, ``run`` is ``pensieve demo``, ``acts`` are its parts, ``training`` made the
model (and stays in the repository: it is no part of an installed package).

May import: client, errors, extras, model, own_server, spawn.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped folder: config.json, model.safetensors, generation_config.json, tokenizer files."""
