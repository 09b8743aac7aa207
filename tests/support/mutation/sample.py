"""Statement mutants of Python sources, drawn by seed.

A mutant leaves out one statement, or makes one condition always true or always false. Tests miss these faults most
often: a wrong value shows up somewhere, a missing line does not.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS: dict[str, str] = {
    "engine": "pensieve/engine",
    "server": "pensieve/server",
    "store": "store",
    "http": "pensieve/http",
}
"""Part of the product → folder that its mutants come from."""

NEEDS_GPU = (
    "pensieve/engine/kv/swap.py",
    "pensieve/engine/kv/timeline.py",
    "pensieve/engine/ranks/collectives.py",
    "pensieve/engine/worker/program.py",
    "pensieve/engine/worker/cuda_worker.py",
    "pensieve/engine/worker/graphs.py",
    "pensieve/engine/worker/sizing.py",
)
"""Files whose statements run on a GPU only. ``make test-gpu`` covers them."""

LOGGERS = {"log", "logger", "logging", "warnings"}
"""Calls on these names are left alone: the words of a log line are no promise."""


@dataclass(frozen=True)
class Mutant:
    """One replacement of text in one file.

    ``first`` and ``last`` are the lines (from 1) of the statement, ``start`` and ``end`` the offsets in characters.
    """

    part: str
    path: str
    first: int
    last: int
    start: int
    end: int
    replacement: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.first} {self.kind}: {' '.join(self.text.split())[:90]}"

    @property
    def identity(self) -> tuple[str, str, str]:
        """The mutant without its line number, which other changes of the file move."""
        return self.path, self.kind, " ".join(self.text.split())

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def draw(root: Path, seed: int, count: int, parts: list[str]) -> list[Mutant]:
    """``count`` mutants, equally many of each part (the first parts get what is left over)."""
    drawn: list[Mutant] = []
    for index, part in enumerate(parts):
        every = [mutant for path in _sources(root, part) for mutant in mutants(root, part, path)]
        share = count // len(parts) + (index < count % len(parts))
        drawn += random.Random(f"{seed} {part}").sample(every, min(share, len(every)))
    return drawn


def _sources(root: Path, part: str) -> Iterator[str]:
    for path in sorted((root / PARTS[part]).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in NEEDS_GPU:
            yield name


def mutants(root: Path, part: str, path: str) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    source = (root / path).read_text()
    lines = _line_starts(source)

    def offset(line: int, column: int) -> int:
        # ast counts columns in bytes of UTF-8.
        begin = lines[line - 1]
        return begin + len(source[begin:].encode()[:column].decode())

    def made(node: ast.stmt | ast.expr, replacement: str, kind: str, lineno: int) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        return Mutant(part, path, lineno, node.end_lineno, start, end, replacement, kind, source[start:end])

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and _can_be_left_out(node):
            yield made(node, "pass", "omitted", node.lineno)
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and not _is_constant(node.test):
            for value in ("True", "False"):
                if not (isinstance(node, ast.While) and value == "True"):
                    yield made(node.test, value, f"condition {value}", node.test.lineno)


def _can_be_left_out(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(value, ast.Call) and _root_name(value.func) not in LOGGERS
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue)


def _is_constant(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) or (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING")


def _root_name(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts
