"""Clients that take seconds to import, for the workers that run a test of them: every worker collects all tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def lazily(name: str) -> Any:
    """Return the package ``name``, imported when an attribute is first read. Raises ImportError if it is missing."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not installed; run: make setup")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
