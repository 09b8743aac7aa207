"""Writes the blocking client from the asyncio one: ``make twin``, or ``python tests/support/sync_twin.py``.

The substitutions reach docstrings too. ``unasync`` does not, and brings setuptools along; the sources are our own, so a
few patterns say what it would. ``tests/client/test_surface.py`` fails when the written file is old.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "pensieve" / "client"
SOURCE, TWIN = CLIENT / "_aio.py", CLIENT / "_sync.py"
MARK = "# Generated from _aio.py by `make twin`. Do not edit.\n"
DOCSTRING = (
    '"""The blocking client. Thread-safe, except that one turn stream belongs to one reading thread."""'
)
CHANGES = (
    (r'\A""".*?"""', DOCSTRING),
    (r"\b(?:async|await) ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"__a(?=(?:enter|exit)__)", "__"),
    (r"\b_aio_link\b", "_sync_link"),
)


def twin(source: str) -> str:
    """The source of the blocking client, formatted."""
    for pattern, replacement in CHANGES:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    for command in (["check", "--select", "I", "--fix", "-q"], ["format", "-q"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *command, "--stdin-filename", str(TWIN), "-"]
        source = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout
    return MARK + source


if __name__ == "__main__":
    TWIN.write_text(twin(SOURCE.read_text()))
