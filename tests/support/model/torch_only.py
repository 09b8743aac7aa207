"""transformers' recurrent models in plain torch, whatever packages are installed.

Where fla, mamba-ssm or causal-conv1d can be imported, transformers calls their kernels instead, also on a CPU, where
they fail. So these packages are hidden while the models are imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _imported(*names: str) -> dict[str, ModuleType]:
    hidden = ("fla", "mamba_ssm", "causal_conv1d")
    before = {name: sys.modules[name] for name in hidden if name in sys.modules}
    try:
        for name in hidden:
            sys.modules[name] = None  # type: ignore[assignment]  # an import fails
        return {
            name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in names
        }
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(before)


MODELS = _imported("mamba2", "bamba", "falcon_h1", "qwen3_next", "qwen3_5")
"""The module of each model, with its classes and its config class."""
