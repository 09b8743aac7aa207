"""What the cache answers about one session."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]
"""Half-open range of positions."""


@dataclass(frozen=True, slots=True)
class Restore:
    """What it took to make a context present: ``gpu_cached + swapped_in + recomputed`` = its history tokens."""

    missing: tuple[Range, ...]
    """Ranges whose KV must be computed, ascending, not adjacent."""
    gpu_cached: int
    swapped_in: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Valid KV-tokens of one session per tier; a chunk on both counts for the device."""

    device: int
    host: int
