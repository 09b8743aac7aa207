"""Which sessions come when: a trace as it is, or any number of sessions drawn from it. Streamed, never held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pensieve.replay.schedule import Gaps
from pensieve.replay.workload import Conversation

NEVER = 1e15
"""A time that does not come; finite, so that differences of it stay numbers."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Life:
    """One session: when it starts, its turns, and when each turn comes."""

    number: int
    start: float
    turns: tuple[tuple[int, int], ...]
    """(input, output) tokens."""
    waits: tuple[float, ...]
    """Recorded: seconds after ``start``. Else: seconds after the answer before."""
    recorded: bool

    def due(self, turn: int, now: float) -> float:
        """When ``turn`` comes if the answer before it ended ``now``; ``NEVER`` after the last."""
        if turn >= len(self.turns):
            return NEVER
        return max(now, self.start + self.waits[turn]) if self.recorded else now + self.waits[turn]


@dataclass(frozen=True, slots=True)
class Load:
    """How sessions come. Iterating gives them in order of their start; the same ``seed`` gives the same ones."""

    conversations: Sequence[Conversation]
    sessions: int | None = None
    """Draw so many with replacement; None: each conversation once."""
    rate: float | None = None
    """Turns per second offered on average, as a Poisson process of session starts; None: as recorded."""
    think_time_s: float | None = None
    """Mean of exponential pauses; None: the recorded gaps."""
    seed: int = 0
    think_gaps: Gaps | None = None
    """Pauses are drawn from these, from the end of an answer on."""

    def __post_init__(self) -> None:
        recorded = all(turn.timestamp_s is not None for talk in self.conversations for turn in talk.turns)
        if not self.conversations:
            raise ValueError("no session to simulate")
        pauses = self.think_time_s is not None or self.think_gaps is not None
        if not recorded and (self.rate is None or not pauses):
            raise ValueError("the trace has no timestamps: a rate and a think time are needed")
        if self.think_time_s is not None and self.think_gaps is not None:
            raise ValueError("a think time and gaps to draw it from are one too many")

    @property
    def total(self) -> int:
        return len(self.conversations) if self.sessions is None else self.sessions

    @property
    def starts_per_s(self) -> float:
        """Mean rate of session starts."""
        if self.rate is not None:
            return self.rate * len(self.conversations) / sum(len(talk.turns) for talk in self.conversations)
        firsts = [talk.turns[0].timestamp_s or 0.0 for talk in self.conversations]
        return len(firsts) / max(max(firsts) - min(firsts), 1e-9)

    def __iter__(self) -> Iterator[Life]:
        if self.sessions is None and self.rate is None:
            yield from self._as_recorded()
            return
        now = 0.0
        for first in range(0, self.total, _BLOCK):
            rng = np.random.default_rng([self.seed, first])
            count = min(_BLOCK, self.total - first)
            gaps = rng.exponential(1.0 / self.starts_per_s, count).tolist()
            numbers = range(first, first + count)
            drawn = numbers if self.sessions is None else rng.integers(0, len(self.conversations), count).tolist()
            for number, which, gap in zip(numbers, drawn, gaps, strict=True):
                now += gap
                yield self._life(number, now, self.conversations[which], rng)

    def _as_recorded(self) -> Iterator[Life]:
        origin = min(talk.turns[0].timestamp_s or 0.0 for talk in self.conversations)
        ordered = sorted(self.conversations, key=lambda talk: talk.turns[0].timestamp_s or 0.0)
        rng = np.random.default_rng([self.seed, 0])
        for number, talk in enumerate(ordered):
            yield self._life(number, (talk.turns[0].timestamp_s or 0.0) - origin, talk, rng)

    def _life(self, number: int, start: float, talk: Conversation, rng: np.random.Generator) -> Life:
        turns = tuple((turn.input_tokens, turn.output_tokens) for turn in talk.turns)
        if self.think_gaps is not None:
            drawn = rng.choice(np.array(self.think_gaps.seconds), len(turns))
            return Life(number, start, turns, tuple(drawn.tolist()), False)
        if self.think_time_s is not None:
            waits = tuple(rng.exponential(self.think_time_s, len(turns)).tolist())
            return Life(number, start, turns, waits, False)
        first = talk.turns[0].timestamp_s or 0.0
        return Life(number, start, turns, tuple((turn.timestamp_s or 0.0) - first for turn in talk.turns), True)
