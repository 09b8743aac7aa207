"""Draws when each turn is due: before anything is sent, so that every target meets the same load.

``apply_run_in`` lets a replay begin in the middle. A Poisson process of conversation starts takes as long to become steady
as conversations last, most of it pauses, and until then histories are too short. So the conversations that would be in
progress begin in the middle: what they would have said and heard before is one turn, with an answer of one token, that
is played before time 0. So are whole
conversations that ended not long before: a server does not know that nobody comes back to them, and without them its
cache would have more room than in the long run. A server that keeps conversations then has them; what it would hold of
them by now is for it to decide, in the order in which they were last active. Of idle times only the order is right:
they all begin with the replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pensieve.core import TokenArray
from pensieve.replay.load.workload import Conversation, Dataset, DatasetError, Piece, TurnLengths

NOMINAL_TOKEN_S = 0.015
"""Seconds per output token in the time before the replay: all that depends on it is how far conversations have got."""
ENDED_SHARE = 0.5
"""Conversations that ended in this last part of the time before the replay are played, too. In
simulation of a load near the limit (28 turns/s, 120 s), those of the last 20 s raised the latency from 13.8
to 14.3 ms a token, and all of them to 14.5."""


def apply_run_in(
    scripts: Sequence[Script], elapsed_s: float, token_s: float = NOMINAL_TOKEN_S
) -> list[Script]:
    """What is left of ``scripts`` after ``elapsed_s`` seconds, in order of their next turn; times count from there.

    Of conversations that are over by then only the history is left, and of those that ended early nothing. An answer
    takes ``token_s`` per token in the time before. A history is due when its last answer ended, at or before 0.
    """
    left = (_rest(script, elapsed_s, token_s) for script in scripts)
    return sorted((script for script in left if script is not None), key=lambda script: script.start_s)


def _rest(script: Script, elapsed_s: float, token_s: float) -> Script | None:
    """The conversation from its first turn on that is due at ``elapsed_s`` or later; None if it is long over."""
    turns = script.conversation.turns
    history, answered = 0, 0.0
    for index, (turn, due) in enumerate(zip(turns, script.due, strict=True)):
        at = max(due.at_s, answered + due.after_answer_s)
        if at >= elapsed_s:
            start = at - elapsed_s
            dues = (Due(start, 0.0), *(Due(start, pause.after_answer_s) for pause in script.due[index + 1 :]))
            if not index:
                return Script(script.number, script.conversation, dues)
            return _after(history, answered - elapsed_s, script, index, dues)
        history += turn.input_tokens + turn.output_tokens
        answered = at + turn.output_tokens * token_s
    if answered < (1 - ENDED_SHARE) * elapsed_s:
        return None
    return _after(history, answered - elapsed_s, script, len(turns), ())


def _after(tokens: int, answered_s: float, script: Script, index: int, dues: tuple[Due, ...]) -> Script:
    """``script`` from turn ``index`` on, after ``tokens`` of history whose last answer ended at ``answered_s``."""
    said = TurnLengths(tokens - 1, 1)
    talk = replace(script.conversation, turns=(said, *script.conversation.turns[index:]))
    before = Due(min(0.0, answered_s), 0.0)
    return Script(script.number, talk, (before, *dues), first_turn=index - 1, has_history=True)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How conversations start, and when their next turns follow."""

    rate: float | None = None
    """Turns per second that are offered on average, as a Poisson process of conversation starts; None: no pacing."""
    think_time_s: float = 0.0
    """Mean of the exponential time between an answer and the next turn."""
    recorded: bool = False
    """Turns are due at their timestamps; pacing and think time are not used."""
    time_scale: float = 1.0
    """Recorded times are multiplied by this: 0.5 replays twice as fast."""
    seed: int = 0
    clients: int | None = None
    """Closed loop: so many clients, each of which starts the next conversation when its last one has ended."""
    think_per_token_s: float = 0.0
    """Pause per token of the answer, as in the first draft of the paper (0.1 there)."""
    think_minimum_s: float = 0.0
    """No pause per token is shorter (5 in the draft)."""
    think_gaps: Gaps | None = None
    """Recorded gaps that pauses are drawn from; None: they are not."""
    run_in_s: float = 0.0
    """Begin as if the load had been running for so long; see ``pensieve.replay.load.schedule``."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Recorded times from one turn of a session to the next, to be resampled.

    They are from arrival to arrival, as a trace has them: the recorded service time is inside.
    """

    name: str
    sha256: str
    seconds: tuple[float, ...]

    @classmethod
    def from_dataset(cls, data: Dataset) -> Gaps:
        """Raises DatasetError when the trace has no later turns with timestamps."""
        stamps = [[turn.timestamp_s for turn in talk.turns] for talk in data.conversations]
        pairs = (pair for times in stamps for pair in itertools.pairwise(times))
        gaps = tuple(max(0.0, b - a) for a, b in pairs if a is not None and b is not None)
        if not gaps:
            raise DatasetError(
                f"{data.name}: no two turns of a session with timestamps, so there are no gaps"
            )
        return cls(data.name, data.sha256, gaps)


@dataclass(frozen=True, slots=True)
class Due:
    """A turn is due when both are over."""

    at_s: float
    """Seconds after the start of the replay."""
    after_answer_s: float
    """Seconds after the answer to the turn before."""


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation to be replayed."""

    number: int
    conversation: Conversation
    due: tuple[Due, ...]
    """When each of the turns is due."""
    first_turn: int = 0
    """Number of the first turn here, in the whole conversation."""
    has_history: bool = False
    """The first turn here stands for all that was said before the replay: it is played before time 0, at leisure."""

    @property
    def is_over(self) -> bool:
        """Whether all of it was said before the replay."""
        return self.has_history and len(self.due) == 1

    @property
    def start_s(self) -> float:
        """When the first turn is due that is not played beforehand; 0 if there is none."""
        return 0.0 if self.is_over else self.due[self.has_history].at_s

    def input_ids(self, turn: int, vocab_size: int, seed: int, run: int = 0) -> TokenArray:
        """The input of the turn at this place in the script: pseudo-random, int32 [input_tokens], the same for every
        target with this vocabulary. The first begins with what the conversation has in common with others."""
        apart = [run] if run else []
        generator = np.random.default_rng([seed, self.number, turn, *apart])
        wanted = self.conversation.turns[turn].input_tokens
        ids = generator.integers(0, vocab_size, wanted, dtype=np.int32)
        if turn == 0 and self.conversation.prefix:
            common = prefix_ids(self.conversation.prefix, vocab_size, [seed, *apart])
            ids[: len(common)] = common
        return ids


def prefix_ids(pieces: Sequence[Piece], vocab_size: int, seeds: Sequence[int]) -> TokenArray:
    """The tokens that a conversation begins with, int32 [all pieces]; of pieces with the same name always the same."""
    found = []
    for name, tokens in pieces:
        text = np.random.default_rng([*seeds, *blake2b(name.encode(), digest_size=16).digest()])
        found.append(text.integers(0, vocab_size, tokens, dtype=np.int32))
    return np.concatenate(found)


def scripts(conversations: Sequence[Conversation], arrivals: Arrivals) -> list[Script]:
    """A script for each conversation, in order of their first turns."""
    if arrivals.recorded:
        return _recorded(conversations, arrivals.time_scale)
    starts = np.zeros(len(conversations))
    generator = np.random.default_rng(arrivals.seed)
    if arrivals.rate is not None and conversations:
        turns_each = sum(len(talk.turns) for talk in conversations) / len(conversations)
        starts = np.cumsum(generator.exponential(turns_each / arrivals.rate, len(conversations)))
        starts -= starts[0]
    result = []
    for number, (talk, start) in enumerate(zip(conversations, starts, strict=True)):
        pauses = _pauses(talk, arrivals, generator)
        due = tuple(Due(float(start), float(pause)) for pause in pauses)
        result.append(Script(number, talk, due))
    return result


def _pauses(talk: Conversation, arrivals: Arrivals, generator: np.random.Generator) -> NDArray[np.float64]:
    """Seconds between an answer and the turn after it, one per turn; 0 before the first."""
    turns = len(talk.turns)
    if arrivals.think_gaps is not None:
        pauses = generator.choice(np.array(arrivals.think_gaps.seconds), turns)
    elif arrivals.think_per_token_s:
        before = np.array([0, *(turn.output_tokens for turn in talk.turns[:-1])], np.float64)
        pauses = np.maximum(arrivals.think_minimum_s, arrivals.think_per_token_s * before)
    else:
        pauses = generator.exponential(arrivals.think_time_s, turns)
    pauses[0] = 0.0
    return pauses


def _recorded(conversations: Sequence[Conversation], scale: float) -> list[Script]:
    stamps = [[turn.timestamp_s or 0.0 for turn in talk.turns] for talk in conversations]
    first = min((times[0] for times in stamps), default=0.0)
    found = [
        Script(number, talk, tuple(Due((at - first) * scale, 0.0) for at in times))
        for number, (talk, times) in enumerate(zip(conversations, stamps, strict=True))
    ]
    return sorted(found, key=lambda script: script.due[0].at_s)
