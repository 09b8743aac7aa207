"""Optional dependencies: the extra of ``pip install`` that brings each module. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "server": (
        "torch",
        "fla",
        "grpc_health",
        "grpc_reflection",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "redis",
        "safetensors",
        "tokenizers",
        "transformers",
        "triton",
    ),
    "gguf": ("gguf",),
    "http": ("httptools", "starlette", "uvicorn"),
    "otel": ("opentelemetry",),
    "plots": ("matplotlib",),
    "replay": ("aiohttp",),
}
"""Extra → modules it installs. The first is the one tested for."""


def installed(extra: str) -> bool:
    """Return whether the extra is installed, judged by its first module."""
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def require(extra: str) -> None:
    """Raise ModuleNotFoundError if the extra is not installed, before starting anything that needs it."""
    if not installed(extra):
        module = EXTRAS[extra][0]
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def missing_extra(error: ImportError) -> str | None:
    """Return a line with the install command for the module that ``error`` lacks, or None if no extra has it."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        # A module that is present but lacks a name has the wrong version; installing it again would not help.
        if module in modules and importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'pensieve[{extra}]'"
    return None
