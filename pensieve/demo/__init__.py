"""The demo model, served by ``--model demo``, and ``pensieve demo``, which shows that it remembers.

``run`` is the command, ``long_talk``, ``crowd`` and ``killed`` are its acts, and ``conversations`` generates
their turns.

May import: client, errors, extras, model, own_server, spawn.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped folder: config.json, model.safetensors, generation_config.json, tokenizer files."""
