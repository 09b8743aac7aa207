"""The repository's own files and what its modules import, for the tests about the repository itself."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"pensieve/kernels": "kernels", "pensieve/store": "store"}
"""Link in the package → folder at the root that it stands for."""


NOT_OURS = {".git", ".venv", ".site", "__pycache__", "node_modules", "build", "dist", ".hypothesis"}
"""Folders that a checkout without git is searched without; git knows what is ignored by itself."""


@cache
def files() -> tuple[Path, ...]:
    """What belongs to the repository, relative to its root: tracked, or new and not ignored. Links are not followed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return tuple(sorted(_walk(ROOT)))
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (Path(name) for name in listed.split("\0") if name)
    return tuple(sorted(path for path in paths if (ROOT / path).exists() or (ROOT / path).is_symlink()))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in NOT_OURS and not entry.name.endswith((".egg-info", "_cache")):
                yield from _walk(entry)
        elif entry.suffix != ".pyc":
            yield entry.relative_to(ROOT)


def python_files(*folders: str) -> tuple[Path, ...]:
    """Our Python sources in these top folders (all: none given), generated stubs left out."""
    return tuple(
        path
        for path in files()
        if path.suffix == ".py"
        and (not folders or path.parts[0] in folders)
        and path.parts[:2] != ("pensieve", "v1")
    )


def module_name(path: Path) -> str:
    """Import name of a source of the package: ``kernels/x.py`` is ``pensieve.kernels.x``."""
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts if parts[0] == "pensieve" else ("pensieve", *parts))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of one source in the order of ``ast.walk``, made once for all tests.

    Left out: whether a name is read or written, which is a node of its own below each name.
    """
    found: list[ast.AST] = [tree(path)]
    for node in found:
        for name in node._fields:
            below = getattr(node, name)
            if isinstance(below, list):
                found += [one for one in below if isinstance(one, ast.AST)]
            elif isinstance(below, ast.AST) and not isinstance(below, ast.expr_context):
                found.append(below)
    return tuple(found)


@dataclass(frozen=True)
class Import:
    """One imported name; ``lazy``: inside a function."""

    module: str
    name: str | None
    lazy: bool
    line: int


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Absolute imports of one source, those under ``if TYPE_CHECKING`` left out."""
    return tuple(_found(tree(path), lazy=False))


def _found(node: ast.AST, lazy: bool) -> Iterator[Import]:
    inside: Iterable[ast.AST] = _blocks(node)
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, None, lazy, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (Import(node.module or "", alias.name, lazy, node.lineno) for alias in node.names)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        inside = node.orelse
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in inside:
        yield from _found(child, lazy)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """What holds statements below a node, and the statements themselves: an expression holds none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, name, None)
        if isinstance(below, list):
            yield from below


def _is_type_checking(test: ast.expr) -> bool:
    if isinstance(test, ast.Attribute):
        return test.attr == "TYPE_CHECKING" and isinstance(test.value, ast.Name) and test.value.id == "typing"
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
