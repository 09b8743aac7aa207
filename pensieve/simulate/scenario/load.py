"""Which sessions come when: a trace as it is, or any number of sessions drawn from it. Streamed, never held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pensieve.core import Hints, TokenArray
from pensieve.replay.load.schedule import Arrivals, Gaps, Script, apply_run_in, prefix_ids, scripts
from pensieve.replay.load.workload import Conversation, Piece
from pensieve.simulate.scenario.settings import Settings

NEVER = 1e15
"""A time that does not come; finite, so that differences of it stay numbers."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class SessionScript:
    """One session: when it starts, its turns, and when each turn comes."""

    number: int
    start: float
    turns: tuple[tuple[int, int], ...]
    """(input, output) tokens."""
    waits: tuple[float, ...]
    """Seconds from the answer before, for each turn."""
    earliest: tuple[float, ...] = ()
    """Seconds after ``start`` that a turn does not come before; empty: there are none."""
    prefix: tuple[Piece, ...] = ()
    """What its first input begins with: see ``Conversation``."""

    def due(self, turn: int, now: float) -> float:
        """When ``turn`` comes if the answer before it ended ``now``; ``NEVER`` after the last."""
        if turn >= len(self.turns):
            return NEVER
        at = now + self.waits[turn]
        return max(at, self.start + self.earliest[turn]) if self.earliest else at

    def input_ids(self, turn: int, vocab_size: int, seed: int) -> TokenArray:
        """Token ids of a turn's input, int32 [input]. The first begins with what it has in common with others."""
        rng = np.random.default_rng([seed, self.number, turn])
        ids = rng.integers(0, vocab_size, self.turns[turn][0], dtype=np.int32)
        if turn == 0 and self.prefix:
            common = prefix_ids(self.prefix, vocab_size, [seed])
            ids[: len(common)] = common
        return ids


@dataclass(frozen=True, slots=True)
class InProgressLoad:
    """A load that begins in the middle: the very turns that ``pensieve replay --run-in`` plays, at the same times."""

    sessions: tuple[SessionScript, ...]
    """The sessions. All that one said before the start is one turn, its first."""
    zero_s: float
    """The replay's time 0. Before it histories are computed, one after the other."""
    run_in_s: float

    @classmethod
    def from_conversations(
        cls, conversations: Sequence[Conversation], arrivals: Arrivals, token_s: float
    ) -> InProgressLoad:
        """``token_s``: seconds that a token of history takes. Raises ValueError when all conversations are over."""
        found = apply_run_in(scripts(conversations, arrivals), arrivals.run_in_s)
        if all(script.is_over for script in found):
            raise ValueError("all sessions have ended before the start: ask for more of them")
        before = sorted(
            (script for script in found if script.has_history), key=lambda script: script.due[0].at_s
        )
        starts = np.cumsum([0.0, *(token_s * script.conversation.turns[0].input_tokens for script in before)])
        zero = float(starts[-1])
        lives = [_scripted(script, float(start), zero) for script, start in zip(before, starts, strict=False)]
        lives += [
            _scripted(script, zero + script.start_s, zero) for script in found if not script.has_history
        ]
        return cls(tuple(sorted(lives, key=lambda life: life.start)), zero, arrivals.run_in_s)


def _scripted(script: Script, start: float, zero: float) -> SessionScript:
    """A script's session. ``start``: of its first turn here; ``zero``: time 0 of the script."""
    turns = tuple((turn.input_tokens, turn.output_tokens) for turn in script.conversation.turns)
    earliest = tuple(zero + due.at_s - start for due in script.due)
    waits = tuple(due.after_answer_s for due in script.due)
    return SessionScript(script.number, start, turns, waits, earliest, script.conversation.prefix)


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
    in_progress: InProgressLoad | None = None
    """The sessions of a load that has begun before; the other fields then say what they were drawn from."""

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
    def session_count(self) -> int:
        if self.in_progress is not None:
            return len(self.in_progress.sessions)
        return len(self.conversations) if self.sessions is None else self.sessions

    @property
    def has_shared_prefixes(self) -> bool:
        """Whether sessions have beginnings in common."""
        return any(talk.prefix for talk in self.conversations)

    @property
    def zero_s(self) -> float:
        """When the time begins that windows count from."""
        return 0.0 if self.in_progress is None else self.in_progress.zero_s

    @property
    def starts_per_s(self) -> float:
        """Mean rate of session starts."""
        if self.rate is not None:
            return self.rate * len(self.conversations) / sum(len(talk.turns) for talk in self.conversations)
        firsts = [talk.turns[0].timestamp_s or 0.0 for talk in self.conversations]
        return len(firsts) / max(max(firsts) - min(firsts), 1e-9)

    def __iter__(self) -> Iterator[SessionScript]:
        if self.in_progress is not None:
            yield from self.in_progress.sessions
            return
        if self.sessions is None and self.rate is None:
            yield from self._as_recorded()
            return
        now = 0.0
        for first in range(0, self.session_count, _BLOCK):
            rng = np.random.default_rng([self.seed, first])
            count = min(_BLOCK, self.session_count - first)
            gaps = rng.exponential(1.0 / self.starts_per_s, count).tolist()
            numbers = range(first, first + count)
            drawn = (
                numbers if self.sessions is None else rng.integers(0, len(self.conversations), count).tolist()
            )
            for number, which, gap in zip(numbers, drawn, gaps, strict=True):
                now += gap
                yield self._life(number, now, self.conversations[which], rng)

    def _as_recorded(self) -> Iterator[SessionScript]:
        origin = min(talk.turns[0].timestamp_s or 0.0 for talk in self.conversations)
        ordered = sorted(self.conversations, key=lambda talk: talk.turns[0].timestamp_s or 0.0)
        rng = np.random.default_rng([self.seed, 0])
        for number, talk in enumerate(ordered):
            yield self._life(number, (talk.turns[0].timestamp_s or 0.0) - origin, talk, rng)

    def _life(self, number: int, start: float, talk: Conversation, rng: np.random.Generator) -> SessionScript:
        turns = tuple((turn.input_tokens, turn.output_tokens) for turn in talk.turns)
        if self.think_gaps is not None:
            drawn = rng.choice(np.array(self.think_gaps.seconds), len(turns))
            return SessionScript(number, start, turns, tuple(drawn.tolist()), prefix=talk.prefix)
        if self.think_time_s is not None:
            waits = tuple(rng.exponential(self.think_time_s, len(turns)).tolist())
            return SessionScript(number, start, turns, waits, prefix=talk.prefix)
        first = talk.turns[0].timestamp_s or 0.0
        earliest = tuple((turn.timestamp_s or 0.0) - first for turn in talk.turns)
        return SessionScript(number, start, turns, (0.0,) * len(turns), earliest, talk.prefix)


def with_run_in(load: Load, run_in_s: float, token_s: float) -> Load:
    """The same load, as if it had been going on for ``run_in_s``; see ``InProgressLoad``. Raises ValueError."""
    if load.rate is None:
        raise ValueError("only a load with a rate can have begun before")
    arrivals = Arrivals(
        load.rate, load.think_time_s or 0.0, seed=load.seed, think_gaps=load.think_gaps, run_in_s=run_in_s
    )
    return replace(load, in_progress=InProgressLoad.from_conversations(load.conversations, arrivals, token_s))


_STREAM: Final = 1
"""Numbers the generator's stream: no other draws of a simulation are these."""


def hints_of(settings: Settings, life: SessionScript, turn: int, now: float) -> Hints | None:
    """What the client says of the session when ``turn`` ends ``now``; None: nothing.

    As ``pensieve.replay.play.runner``, but that the pause is counted from the end of the answer: a simulated client
    knows that as well.

    The true pause times a lognormal factor with median 1 and ``noise`` as its sigma. The last turn says that it is the
    last.
    """
    told = settings.hints
    if told is None:
        return None
    due = life.due(turn + 1, now)
    if due == NEVER:
        return Hints(finished=True) if told.ends else None
    if not told.pauses:
        return None
    factor = 1.0
    if told.noise:
        generator = np.random.default_rng([settings.seed, life.number, turn, 0, _STREAM])
        factor = math.exp(told.noise * generator.standard_normal())
    return Hints(next_turn_s=max(due - now, 0.0) * factor)
