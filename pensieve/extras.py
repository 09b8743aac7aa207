"""Extras: what a client does not need, and which ``pip install`` brings it. No import of what it speaks of."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "server": (
        "torch",
        "grpc_health",
        "grpc_reflection",
        "huggingface_hub",
        "jinja2",
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
"""Extra → what is imported of it; its first stands for the whole."""


def installed(extra: str) -> bool:
    """Whether the extra is there, as far as the module that stands for it tells."""
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def require(extra: str) -> None:
    """Raises ModuleNotFoundError when the extra is not installed, before anything is started that would need it."""
    if not installed(extra):
        module = EXTRAS[extra][0]
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def missing_extra(error: ImportError) -> str | None:
    """One line with the command that installs what ``error`` did not find; None when no extra has it."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        # A module that is there and lacks a name is of a wrong version, which another install would not help.
        if module in modules and importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'pensieve[{extra}]'"
    return None
