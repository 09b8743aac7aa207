"""A turn from when it is due to the end of its answer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pensieve.engine.cache.chunk import Range, Restore
from pensieve.simulate.scenario.load import Life


@dataclass(slots=True, eq=False)
class LiveTurn:
    """A session with a turn that is due, waits or runs. ``Batch`` writes what is below ``replica``."""

    life: Life
    index: int = 0
    history: int = 0
    arrived: float = 0.0
    prompt: int = field(init=False)
    """Context without the answer."""
    output: int = field(init=False)
    """Tokens of the answer."""
    replica: int = 0
    ticket: int = 0
    visible: int = 0
    """First step whose plan can know of it."""
    restore: Restore | None = None
    """How its first admission found its context: what a suspension costs later is not part of its receipt."""
    missing: deque[Range] = field(default_factory=deque)
    """What is still to be computed of its context."""
    computed: int = 0
    """Tokens in the cache when its generation last began, or went on after a suspension."""
    begun: int = 0
    """The step in which that was."""
    ends: int = 0
    """Steps that are over when it leaves; 0: it does not generate."""
    made: int = 0
    """Tokens of its answer when it was last suspended."""
    last_token: float = 0.0
    """When the last of those came."""
    first_token: float = 0.0

    def __post_init__(self) -> None:
        new, self.output = self.life.turns[self.index]
        self.prompt = self.history + new
