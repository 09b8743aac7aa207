"""A turn that a ``Driver`` has begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.core import Sampling, Usage


@dataclass
class Turn:
    """A running turn, as a client sees it."""

    session: str
    context: list[int]
    num_new: int
    want: int
    stops: tuple[int, ...] = ()
    seed: int | None = None
    """Of the first candidate; None when all are greedy."""
    beams: Sampling | None = None
    outputs: list[list[int]] = field(default_factory=lambda: [[]])
    """Of each candidate."""
    ended: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    """Candidates that were cancelled alone."""
    usage: Usage | None = None
    failed: str | None = None
