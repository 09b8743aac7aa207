"""Where tables and findings are printed: stdout, as wide as a terminal is, or as wide as it takes."""

from __future__ import annotations

import shutil
from typing import Final

from rich.console import Console

UNBOUND: Final = 10_000
"""Columns of what has no width of its own, such as a pipe: more than a row takes, and nothing is cut for it."""


def stdout() -> Console:
    """On stdout. Into a pipe or a file a row is one line with all its columns, unless COLUMNS says how many there are.

    Rich would take 80 columns there, or those of a terminal that is stdin.
    """
    console = Console(highlight=False)
    if console.file.isatty():  # FORCE_COLOR makes ``is_terminal`` true of a pipe, too
        return console
    return Console(highlight=False, width=shutil.get_terminal_size((UNBOUND, 24)).columns)
