"""Loads a program of bench/ as a module; that folder is not importable."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench"


def load_bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``bench/NAME.py``, with its folder on the path as when it runs as a script."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_" + name.replace("/", "_"), BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
