"""A turn has one writer: no module but ``run`` changes a field of ``TurnRun``, and its state goes by the table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.sources import ROOT, imports, python_files, tree
from support.writers import Owned, foreign_writes, writes_in

TURN_RUN = Owned("TurnRun", Path("pensieve/server/turns/run.py"))


def knowing() -> list[Path]:
    """The sources of the package, and those elsewhere that import a module of it."""
    return [
        path
        for path in python_files("pensieve", "store", "kernels", "bench")
        if TURN_RUN.module.parent in path.parents
        or any(f"{found.module}.".startswith("pensieve.server.turns.") for found in imports(path))
    ]


def test_no_other_module_changes_a_turn() -> None:
    assert {"state", "orders", "seed", "ticket", "_listeners"} <= TURN_RUN.fields
    assert foreign_writes(TURN_RUN, knowing()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "found.seed = 1",
        "run.orders += (2,)",
        "setattr(run, 'state', 3)",
        "made.ticket, x = None, 1",
        "self._runs[key].hints = None",
        "del run.hints",
    ],
)
def test_a_change_from_outside_is_found(statement: str) -> None:
    assert len(writes_in(ast.parse(f"def f(run: TurnRun):\n    {statement}"), TURN_RUN)) == 1


def test_the_state_changes_in_one_line() -> None:
    writes = [
        node.lineno
        for node in ast.walk(tree(TURN_RUN.module))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    ]
    source = (ROOT / TURN_RUN.module).read_text().splitlines()
    assert [source[line - 1].strip() for line in writes] == [
        "self.state = RunState.BEGINNING",
        "self.state = after",
    ]
