"""A turn has one writer: no module but ``run`` assigns a field of ``TurnRun``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.sources import ROOT, python_files, tree

OWNER = Path("pensieve/server/turns/run.py")


def fields_of(owner: ast.Module, name: str) -> set[str]:
    """What a class assigns to ``self``."""
    (found,) = (node for node in owner.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {field for field, base, _ in assigned(found) if base == "self"}


def assigned(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Field, what it is a field of (source text) and line of each assignment below ``node``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load):
            yield one.attr, ast.unparse(one.value), one.lineno
        elif isinstance(one, ast.Call) and ast.unparse(one.func) in ("setattr", "object.__setattr__"):
            field = one.args[1]
            yield (
                field.value if isinstance(field, ast.Constant) else "*",
                ast.unparse(one.args[0]),
                one.lineno,
            )


def foreign_writes(source: ast.Module, fields: set[str]) -> list[tuple[str, int]]:
    """Assignments to these fields: of anything where ``TurnRun`` is known, elsewhere of what is called a run."""
    knows = "TurnRun" in ast.unparse(source)
    return [
        (f"{base}.{field}", line)
        for field, base, line in assigned(source)
        if base != "self" and field in {*fields, "*"} and (knows or base == "run" or "_runs" in base)
    ]


def test_nobody_else_writes_a_turn() -> None:
    fields = fields_of(tree(OWNER), "TurnRun")
    assert {"state", "orders", "seed", "ticket", "_listeners"} <= fields
    found = {
        f"{path}:{line}": written
        for path in python_files("pensieve", "store", "tests")
        if path != OWNER
        and (path.parts[:2] == ("pensieve", "server") or "TurnRun" in ast.unparse(tree(path)))
        for written, line in foreign_writes(tree(path), fields)
    }
    assert found == {}


def test_the_state_has_one_line_that_writes_it() -> None:
    """All transitions go through the table."""
    writes = [line for field, base, line in assigned(tree(OWNER)) if (field, base) == ("state", "self")]
    source = (ROOT / OWNER).read_text().splitlines()
    assert [source[line - 1].strip() for line in writes] == [
        "self.state = TurnState.BEGINNING",
        "self.state = after",
    ]


def test_the_checker_sees_a_write() -> None:
    """Of each kind: plain, augmented, in a tuple, by ``setattr``, and through any name where ``TurnRun`` is known."""
    writes = (
        "found.seed = 1\n"
        "turn.orders += (2,)\n"
        "setattr(turn, 'state', 3)\n"
        "made.ticket, x = None, 1\n"
        "self._runs[key].hints = None\n"
        "turn.elsewhere()\n"
        "self.seed = 1\n"
    )
    fields = {"seed", "orders", "state", "ticket", "hints"}
    known = foreign_writes(ast.parse(f"from a import TurnRun\n{writes}"), fields)
    assert sorted(line for _, line in known) == [2, 3, 4, 5, 6]
    unknown = foreign_writes(ast.parse(f"{writes}run.seed = 1\n"), fields)
    assert sorted(line for _, line in unknown) == [5, 8]
