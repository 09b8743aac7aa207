"""Clients that take seconds to import, for the workers that run a test of them: every worker collects all tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def lazily(name: str) -> Any:
    """Return a stand-in for the package ``name``, which imports it when one of its public attributes is first read.

    Raises ImportError if it is missing.
    """
    if importlib.util.find_spec(name) is None:
        raise ImportError(f"{name} is not installed; run: make setup")
    return _Later(name)


class _Later:
    """No module whose loader is lazy: pytest asks all that a test file names for private attributes, which loads it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
