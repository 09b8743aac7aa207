"""The demo model: what ``--model demo`` serves, and the scripts that made it.

``words`` and ``facts`` say what dialogues are about, ``dialogues`` turns them into training text, ``scenario`` into
scripted conversations with names and values that training never saw. None of these imports torch.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped folder: config.json, model.safetensors, generation_config.json, tokenizer files."""
