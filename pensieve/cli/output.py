"""Where tables and findings are printed: stdout, as wide as a terminal is, or as wide as it takes."""

from __future__ import annotations

import os
from typing import Final

from rich.console import Console

UNBOUND: Final = 10_000
"""Columns of what has no width of its own, such as a pipe: more than a row takes, and nothing is cut for it."""


def stdout() -> Console:
    """On stdout. Into a pipe or a file a row is one line with all its columns, unless COLUMNS says how many there are.

    Rich would take 80 columns there, or those of a terminal that is stdin.
    """
    console = Console(highlight=False)
    # Not ``is_terminal``: FORCE_COLOR makes that true of a pipe, too.
    if console.file.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(highlight=False, width=UNBOUND)
