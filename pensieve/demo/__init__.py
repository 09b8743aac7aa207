"""The demo model: what ``--model demo`` serves, and the demonstration that it remembers.

``run`` is ``pensieve demo``, ``long_talk``, ``crowd`` and ``killed`` are its acts, ``conversations`` is what they say.

May import: client, errors, extras, model, own_server, spawn.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped folder: config.json, model.safetensors, generation_config.json, tokenizer files."""
