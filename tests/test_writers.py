"""The central objects have one writer each: no other module changes a field of theirs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.sources import imports, python_files
from support.writers import Owned, foreign_writes, writes_in

REQUEST = Owned(
    "Request",
    Path("pensieve/engine/scheduling/request.py"),
    others={
        "manager.py:session": "CachedSession",
        "manager.py:other": "CachedSession",
        "batch.py:turn": "Turn of the simulator",
    },
)


def sources(folder: str, module: str) -> list[Path]:
    """The sources of a folder, and those elsewhere that import a module or something in it."""
    return [
        path
        for path in python_files("pensieve", "store", "kernels", "bench")
        if Path(folder) in path.parents
        or any(f"{found.module}.".startswith(f"{module}.") for found in imports(path))
    ]


def test_only_a_request_changes_its_fields() -> None:
    assert foreign_writes(REQUEST, sources("pensieve/engine", "pensieve.engine.scheduling")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "request.length = 3",
        "request.length += 1",
        "one.request.finished = None",
        "request.missing[0] = (1, 2)",
        "del request.missing[0]",
        "request.missing.clear()",
        "request.tokens[1:2] = 7",
        "a, request.path = 1, None",
        "for request.length in range(3): pass",
        "setattr(request, 'num_known', 1)",
    ],
)
def test_a_change_from_outside_is_found(statement: str) -> None:
    assert len(writes_in(ast.parse(f"def f(request: Request):\n    {statement}"), REQUEST)) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "x = request.length",
        "request.leave()",
        "length = 3",
        "request.other = 3",
        "turn = Turn(); turn.length = 1",
    ],
)
def test_a_question_is_none_and_neither_is_a_change_of_something_else(statement: str) -> None:
    assert writes_in(ast.parse(f"def f(request: Request):\n    {statement}"), REQUEST) == []
