"""What every result file has: the command, the commit and the device of its figures, and tables."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def portable(arguments: Sequence[str]) -> str:
    """A command line without folders of this machine: absolute paths are cut to their last part."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in arguments)


def commit() -> str:
    """Short hash of the commit in hand, ``+`` for changes on top; empty outside of a clone."""
    head = _said("git", "rev-parse", "--short", "HEAD")
    return head + ("+" if head and _said("git", "status", "--porcelain") else "")


def gpu_name() -> str:
    """The name of the first NVIDIA device; empty without one."""
    return _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as the lines of a Markdown table; a row without a column has an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]


def write_report(folder: Path, name: str, report: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write ``name``.json and, with ``lines``, ``name``.md below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _said(program: str, *arguments: str) -> str:
    """What a program prints; empty when it is not there or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run(
        [path, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
