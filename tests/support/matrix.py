"""The faults that Pensieve promises to stand, and the tests that provoke each: ``docs/faults.md`` is made of this.

    python tests/support/matrix.py            what the page says
    python tests/support/matrix.py --write    write the page

A test names the rows that it provokes with ``@pytest.mark.fault(39, 40)``. Markers are found in the sources, so nothing
need be imported or run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from support.matrix_rows import GROUPS, ROWS, UNTESTED  # noqa: E402
from support.sources import ROOT, nodes, python_files  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
HEAD = """# Faults, promises, and the tests that provoke them

Each row is a fault that a server in use will meet, the promise that holds then, and the tests that provoke the
fault and check the promise. The page is made from the tests' own markers: `python tests/support/matrix.py --write`.

`tests/robustness/run.py` looks for faults that no single test can show. Clients talk while servers, engines, Redis,
disks and connections fail at random. The program records every request and answer, and a checker decides whether
the promises allow that history. [bench/results/robustness.md](../bench/results/robustness.md) has the results of a
run. The short version is `tests/robustness/test_under_faults.py`, which also plants five bugs that the same checker
has to find.
"""


@dataclass(frozen=True, order=True)
class Provoked:
    """A test that names a row."""

    row: int
    path: Path
    name: str


def _rows(decorator: ast.expr) -> Iterator[int]:
    """The numbers in ``pytest.mark.fault(...)``; none for any other expression."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
        for argument in decorator.args:
            if not isinstance(argument, ast.Constant) or not isinstance(argument.value, int):
                raise TypeError(f"a fault is named by its number, not by {ast.unparse(argument)}")
            yield argument.value


@cache
def provoked() -> tuple[Provoked, ...]:
    """All markers of all tests."""
    found = []
    for path in python_files("tests"):
        if not path.name.startswith("test_"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                rows = [row for decorator in node.decorator_list for row in _rows(decorator)]
                found += [Provoked(row, path, node.name) for row in rows]
    return tuple(sorted(found))


def page() -> str:
    """The whole page."""
    tests: dict[int, list[Provoked]] = {}
    for one in provoked():
        tests.setdefault(one.row, []).append(one)
    lines = [HEAD]
    for title, first, last in GROUPS:
        lines += [f"## {title}", "", "| # | fault | promise | tests |", "|---:|---|---|---|"]
        for row in range(first, last + 1):
            fault, promise = ROWS[row]
            lines.append(f"| {row} | {fault} | {promise} | {_cell(tests.get(row, []), row)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(tests: list[Provoked], row: int) -> str:
    by_file: dict[Path, list[str]] = {}
    for one in tests:
        by_file.setdefault(one.path, []).append(one.name.removeprefix("test_").replace("_", " "))
    shown = [f"`{path}`: {', '.join(names)}" for path, names in sorted(by_file.items())]
    return "<br>".join([*shown, *([UNTESTED[row]] if row in UNTESTED else [])])


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
