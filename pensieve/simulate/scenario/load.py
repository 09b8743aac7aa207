"""The sessions of a load and their times: a trace as recorded, or sessions drawn from it. Streamed, never held."""

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
"""The time of a turn that never comes; finite, so that differences stay numbers."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class SessionScript:
    number: int
    start: float
    turns: tuple[tuple[int, int], ...]
    """(input, output) tokens."""
    waits: tuple[float, ...]
    """Seconds between the previous answer and each turn."""
    earliest: tuple[float, ...] = ()
    """Earliest arrival of each turn, in seconds after ``start``; empty: no limits."""
    prefix: tuple[Piece, ...] = ()
    """Shared beginning of the first input; see ``Conversation``."""

    def due(self, turn: int, now: float) -> float:
        """Arrival of ``turn`` if the previous answer ended at ``now``; ``NEVER`` after the last turn."""
        if turn >= len(self.turns):
            return NEVER
        at = now + self.waits[turn]
        return max(at, self.start + self.earliest[turn]) if self.earliest else at

    def input_ids(self, turn: int, vocab_size: int, seed: int) -> TokenArray:
        """Token ids of a turn's input, int32 [input]. The first input begins with the shared prefix."""
        rng = np.random.default_rng([seed, self.number, turn])
        ids = rng.integers(0, vocab_size, self.turns[turn][0], dtype=np.int32)
        if turn == 0 and self.prefix:
            common = prefix_ids(self.prefix, vocab_size, [seed])
            ids[: len(common)] = common
        return ids


@dataclass(frozen=True, slots=True)
class InProgressLoad:
    """A load that begins in the middle: the same turns at the same times as ``pensieve replay --run-in``."""

    sessions: tuple[SessionScript, ...]
    """The history of a session before time 0 is a single turn, its first."""
    zero_s: float
    """Time 0 of the replay. Before it, histories are computed one after the other."""
    run_in_s: float

    @classmethod
    def from_conversations(
        cls, conversations: Sequence[Conversation], arrivals: Arrivals, token_s: float
    ) -> InProgressLoad:
        """``token_s``: seconds per token of history. Raises ValueError when all conversations have ended."""
        replayed = apply_run_in(scripts(conversations, arrivals), arrivals.run_in_s)
        if all(script.is_over for script in replayed):
            raise ValueError("no session outlasts the run-in: ask for more sessions")
        with_history = sorted(
            (script for script in replayed if script.has_history), key=lambda script: script.due[0].at_s
        )
        starts = np.cumsum(
            [0.0, *(token_s * script.conversation.turns[0].input_tokens for script in with_history)]
        )
        zero = float(starts[-1])
        sessions = [
            _session_of(script, float(start), zero)
            for script, start in zip(with_history, starts, strict=False)
        ]
        sessions += [
            _session_of(script, zero + script.start_s, zero) for script in replayed if not script.has_history
        ]
        return cls(tuple(sorted(sessions, key=lambda session: session.start)), zero, arrivals.run_in_s)


def _session_of(script: Script, start: float, zero: float) -> SessionScript:
    """Session of a replay's script. ``start``: time of its first turn; ``zero``: time 0 of the script."""
    turns = tuple((turn.input_tokens, turn.output_tokens) for turn in script.conversation.turns)
    earliest = tuple(zero + due.at_s - start for due in script.due)
    waits = tuple(due.after_answer_s for due in script.due)
    return SessionScript(script.number, start, turns, waits, earliest, script.conversation.prefix)


@dataclass(frozen=True, slots=True)
class Load:
    """The arrival of sessions. Iterating yields them in order of start; the same ``seed`` yields the same sessions."""

    conversations: Sequence[Conversation]
    sessions: int | None = None
    """Number of sessions drawn with replacement; None: each conversation once."""
    rate: float | None = None
    """Mean offered turns per second, as a Poisson process of session starts; None: as recorded."""
    think_time_s: float | None = None
    """Mean of exponential pauses; None: the recorded gaps."""
    seed: int = 0
    think_gaps: Gaps | None = None
    in_progress: InProgressLoad | None = None
    """Sessions of a load that has begun before time 0; the other fields then say what they were drawn from."""

    def __post_init__(self) -> None:
        recorded = all(turn.timestamp_s is not None for talk in self.conversations for turn in talk.turns)
        if not self.conversations:
            raise ValueError("no session to simulate")
        pauses = self.think_time_s is not None or self.think_gaps is not None
        if not recorded and (self.rate is None or not pauses):
            raise ValueError("the trace has no timestamps: give a rate and a think time")
        if self.think_time_s is not None and self.think_gaps is not None:
            raise ValueError("give a think time or recorded gaps to draw it from, not both")

    @property
    def session_count(self) -> int:
        if self.in_progress is not None:
            return len(self.in_progress.sessions)
        return len(self.conversations) if self.sessions is None else self.sessions

    @property
    def has_shared_prefixes(self) -> bool:
        return any(talk.prefix for talk in self.conversations)

    @property
    def zero_s(self) -> float:
        """Time from which windows count."""
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
                yield self._session(number, now, self.conversations[which], rng)

    def _as_recorded(self) -> Iterator[SessionScript]:
        origin = min(talk.turns[0].timestamp_s or 0.0 for talk in self.conversations)
        ordered = sorted(self.conversations, key=lambda talk: talk.turns[0].timestamp_s or 0.0)
        rng = np.random.default_rng([self.seed, 0])
        for number, talk in enumerate(ordered):
            yield self._session(number, (talk.turns[0].timestamp_s or 0.0) - origin, talk, rng)

    def _session(
        self, number: int, start: float, talk: Conversation, rng: np.random.Generator
    ) -> SessionScript:
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
    """Return the load as if it had been running for ``run_in_s``; see ``InProgressLoad``. Raises ValueError."""
    if load.rate is None:
        raise ValueError("a run-in needs a load with a rate")
    arrivals = Arrivals(
        load.rate, load.think_time_s or 0.0, seed=load.seed, think_gaps=load.think_gaps, run_in_s=run_in_s
    )
    return replace(load, in_progress=InProgressLoad.from_conversations(load.conversations, arrivals, token_s))


_STREAM: Final = 1
"""Number of the random stream: no other draws of a simulation use it."""


def hints_of(settings: Settings, script: SessionScript, turn: int, now: float) -> Hints | None:
    """Hints of the client when ``turn`` ends at ``now``: the true pause times a lognormal factor.

    Unlike in ``pensieve.replay.play.runner`` the pause counts from the end of the answer, which this client
    knows.
    """
    client = settings.hints
    if client is None:
        return None
    due = script.due(turn + 1, now)
    if due == NEVER:
        return Hints(finished=True) if client.ends else None
    if not client.pauses:
        return None
    factor = 1.0
    if client.noise:
        generator = np.random.default_rng([settings.seed, script.number, turn, 0, _STREAM])
        factor = math.exp(client.noise * generator.standard_normal())
    return Hints(next_turn_s=max(due - now, 0.0) * factor)
