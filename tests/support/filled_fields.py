"""Which fields a module's calls of ``_same`` name. Others are filled from values, or messages, by their own names."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def named_fields(module: ModuleType) -> dict[str, set[str]]:
    """Return the fields that each call of ``_same`` sets by keyword, by the class that it makes."""
    assert module.__file__ is not None
    calls = ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
    return {
        ast.unparse(call.args[0]).rpartition(".")[2]: {str(keyword.arg) for keyword in call.keywords}
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "_same"
    }
