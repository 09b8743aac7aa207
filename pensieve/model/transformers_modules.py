"""Imports single modules of transformers, without its index of all models."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import ModuleType

_lock = Lock()


def transformers_module(name: str, stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Import ``transformers.NAME``. ``stand_ins``, by name below ``transformers``, take the place of modules that it
    imports and does not need.

    ``import transformers`` reads the source of each of its modules, to learn which names they define: 0.8 s of CPU
    time in the front end, and again in the engine (transformers 5.23). Only a search for names needs that index. So
    empty packages take its place during this import, unless transformers is imported already. A later
    ``import transformers`` runs as always, and finds the modules that were imported here. Other versions may need the
    index (5.17 takes ``AddedToken`` from it): then the whole of transformers is imported, which gives the same module.

    Raises ImportError.
    """
    whole = f"transformers.{name}"
    with _lock:
        added = {f"transformers.{below}": module for below, module in (stand_ins or {}).items()}
        if "transformers" not in sys.modules:
            added |= _packages()
        added = {key: module for key, module in added.items() if key not in sys.modules}
        sys.modules.update(added)
        try:
            return importlib.import_module(whole)
        except ImportError:
            if not added:
                raise
        finally:
            for key in added:
                del sys.modules[key]
        return importlib.import_module(whole)


def _packages() -> dict[str, ModuleType]:
    """Return ``transformers`` and ``transformers.models`` as packages that hold nothing but their folder."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    folder = Path(spec.origin).parent
    packages = {}
    for name, path in (("transformers", folder), ("transformers.models", folder / "models")):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [str(path)]
    packages["transformers"].__dict__["__version__"] = importlib.metadata.version("transformers")
    return packages
