"""The headings of ``pensieve replay --help``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Targets": ("target", "start", "name", "api-key", "start-timeout", "vocab-size", "context-limit"),
    "What is replayed": (
        "conversations",
        "limit",
        "max-turns",
        "max-input-tokens",
        "max-output-tokens",
        "scale-lengths",
        "force-lengths",
        "system-tokens",
        "hints",
        "warm-ahead",
        "tokenizer",
        "seed",
        "seeds",
    ),
    "When turns are sent": (
        "rate",
        "rates",
        "clients",
        "concurrency",
        "think-time",
        "think-per-token",
        "think-minimum",
        "think-from",
        "time-scale",
    ),
    "What is measured": (
        "run-in",
        "warm-up",
        "window",
        "steady",
        "stop-after-window",
        "processes",
        "max-lag",
    ),
    "Reports": ("json", "html", "plots", "help"),
}
"""Heading → names of options, in the order of the help."""
