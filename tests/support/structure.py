"""The floor plan as it stands: every package with its purpose, modules and lines, and names that are defined twice.

python tests/support/structure.py              # as a list, with lines
python tests/support/structure.py --markdown   # the table of docs/packages.md
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # when it runs as a program

from support.sources import LINKS, ROOT, python_files, tree

MOST_LINES = 600


@dataclass(frozen=True)
class Folder:
    path: Path
    purpose: str
    modules: tuple[tuple[str, int], ...]
    """(name, lines) of each, in order."""

    @property
    def lines(self) -> int:
        return sum(lines for _, lines in self.modules)


def folders(*tops: str) -> list[Folder]:
    """Every folder with sources below these top folders (all: none named)."""
    inside: dict[Path, list[Path]] = defaultdict(list)
    for path in python_files(*tops):
        inside[path.parent].append(path)
    return [_folder(path, found) for path, found in sorted(inside.items())]


def _folder(folder: Path, found: list[Path]) -> Folder:
    modules = []
    purpose = ""
    for path in sorted(found):
        if path.name == "__init__.py":
            purpose = (ast.get_docstring(tree(path)) or "").split("\n\n")[0].replace("\n", " ")
        modules.append((path.stem, len((ROOT / path).read_text().splitlines())))
    return Folder(folder, purpose, tuple(modules))


def twice_defined() -> dict[str, list[str]]:
    """Public classes whose name stands for several things in the package → the modules that define them."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files("pensieve", *LINKS.values()):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def table() -> str:
    """Packages of the product and what each is for, as a Markdown table."""
    rows = [
        f"| `{folder.path}/` | {folder.purpose.replace('``', '`')} |"
        for folder in folders("pensieve", *LINKS.values())
        if folder.purpose and folder.path != Path("pensieve")
    ]
    return "\n".join(["| package | what it is for |", "|---|---|", *rows]) + "\n"


def main() -> None:
    if "--markdown" in sys.argv:
        print(table(), end="")
        return
    for folder in folders():
        print(
            f"{folder.path}/  {len(folder.modules)} modules, {folder.lines} lines. {folder.purpose}".rstrip()
        )
        print("    " + ", ".join(f"{name} {lines}" for name, lines in folder.modules))
    print("\nclass names defined more than once:")
    for name, found in twice_defined().items():
        print(f"    {name}: {', '.join(found)}")


if __name__ == "__main__":
    main()
