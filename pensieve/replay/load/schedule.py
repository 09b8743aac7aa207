"""Draws the time of each turn before anything is sent, so that every target gets the same load.

``apply_run_in`` lets a replay begin in the middle, because a Poisson process of conversation starts takes as
long to become steady as conversations last. The history of a conversation in progress is one turn with an
answer of one token, played before time 0. Conversations that ended shortly before are played too: a server
does not know that they are over, and without them its cache would have more room than in the long run. Of
their idle times only the order is right: all of them begin with the replay.
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
"""Assumed seconds per output token before time 0. Only the progress of conversations depends on it."""
ENDED_SHARE = 0.5
"""Conversations that ended in this last part of the time before the replay are played too.

In simulation of a load near the limit (28 turns/s, 120 s), those of the last 20 s raised the latency from
13.8 to 14.3 ms a token, and all of them to 14.5.
"""


def apply_run_in(
    scripts: Sequence[Script], elapsed_s: float, token_s: float = NOMINAL_TOKEN_S
) -> list[Script]:
    """Return the rest of ``scripts`` after ``elapsed_s``, in order of their next turns; that time becomes 0.

    Conversations that are over are reduced to their history, those that ended early are dropped. Before time
    0 an answer takes ``token_s`` per token. A history is due when its last answer ended, at or before 0.
    """
    rest = (_rest(script, elapsed_s, token_s) for script in scripts)
    return sorted((script for script in rest if script is not None), key=lambda script: script.start_s)


def _rest(script: Script, elapsed_s: float, token_s: float) -> Script | None:
    """The conversation from the first turn due at ``elapsed_s`` or later; None if it ended long before."""
    turns = script.conversation.turns
    history, answered = 0, 0.0
    for index, (turn, due) in enumerate(zip(turns, script.due, strict=True)):
        at = max(due.at_s, answered + due.after_answer_s)
        if at >= elapsed_s:
            start = at - elapsed_s
            dues = (Due(start, 0.0), *(Due(start, pause.after_answer_s) for pause in script.due[index + 1 :]))
            if not index:
                return Script(script.number, script.conversation, dues)
            return _with_history(history, answered - elapsed_s, script, index, dues)
        history += turn.input_tokens + turn.output_tokens
        answered = at + turn.output_tokens * token_s
    if answered < (1 - ENDED_SHARE) * elapsed_s:
        return None
    return _with_history(history, answered - elapsed_s, script, len(turns), ())


def _with_history(
    tokens: int, answered_s: float, script: Script, index: int, dues: tuple[Due, ...]
) -> Script:
    """``script`` from turn ``index`` on, after ``tokens`` of history whose last answer ended at ``answered_s``."""
    history = TurnLengths(tokens - 1, 1)
    talk = replace(script.conversation, turns=(history, *script.conversation.turns[index:]))
    before = Due(min(0.0, answered_s), 0.0)
    return Script(script.number, talk, (before, *dues), first_turn=index - 1, has_history=True)


@dataclass(frozen=True, slots=True)
class Arrivals:
    rate: float | None = None
    """Mean offered turns per second, as a Poisson process of conversation starts; None: no pacing."""
    think_time_s: float = 0.0
    """Mean of the exponential time between an answer and the next turn."""
    recorded: bool = False
    """Turns are due at their timestamps; pacing and think time are not used."""
    time_scale: float = 1.0
    """Factor of recorded times: 0.5 replays twice as fast."""
    seed: int = 0
    clients: int | None = None
    """Closed loop: number of clients, each of which starts the next conversation when its last one ends."""
    think_per_token_s: float = 0.0
    """Pause per token of the answer, as in the first draft of the paper (0.1 there)."""
    think_minimum_s: float = 0.0
    """Minimum of such a pause (5 in the draft)."""
    think_gaps: Gaps | None = None
    run_in_s: float = 0.0
    """Begin as if the load had been running this long; see the module's docstring."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Recorded times from one turn's arrival to the next, to be resampled. They include the service time."""

    name: str
    sha256: str
    seconds: tuple[float, ...]

    @classmethod
    def from_dataset(cls, data: Dataset) -> Gaps:
        """Raise DatasetError when the trace has no later turns with timestamps."""
        stamps = [[turn.timestamp_s for turn in talk.turns] for talk in data.conversations]
        pairs = (pair for times in stamps for pair in itertools.pairwise(times))
        gaps = tuple(max(0.0, b - a) for a, b in pairs if a is not None and b is not None)
        if not gaps:
            raise DatasetError(
                f"{data.name}: no session has two turns with timestamps, so there are no gaps to draw from"
            )
        return cls(data.name, data.sha256, gaps)


@dataclass(frozen=True, slots=True)
class Due:
    """A turn is due when both times are reached."""

    at_s: float
    after_answer_s: float


@dataclass(frozen=True, slots=True)
class Script:
    number: int
    conversation: Conversation
    due: tuple[Due, ...]
    first_turn: int = 0
    has_history: bool = False
    """The first turn here is the history before the replay. It is played before time 0, without timing."""

    @property
    def is_over(self) -> bool:
        """Whether only history is left."""
        return self.has_history and len(self.due) == 1

    @property
    def start_s(self) -> float:
        """Time of the first turn after the history; 0 if there is none."""
        return 0.0 if self.is_over else self.due[self.has_history].at_s

    def input_ids(self, turn: int, vocab_size: int, seed: int, run: int = 0) -> TokenArray:
        """Pseudo-random input of a turn here, int32 [input_tokens], the same for every target with this vocabulary."""
        run_seed = [run] if run else []
        generator = np.random.default_rng([seed, self.number, turn, *run_seed])
        wanted = self.conversation.turns[turn].input_tokens
        ids = generator.integers(0, vocab_size, wanted, dtype=np.int32)
        if turn == 0 and self.conversation.prefix:
            common = prefix_ids(self.conversation.prefix, vocab_size, [seed, *run_seed])
            ids[: len(common)] = common
        return ids


def prefix_ids(pieces: Sequence[Piece], vocab_size: int, seeds: Sequence[int]) -> TokenArray:
    """Tokens of a shared prefix, int32 [all pieces]; pieces with the same name have the same tokens."""
    parts = []
    for name, tokens in pieces:
        generator = np.random.default_rng([*seeds, *blake2b(name.encode(), digest_size=16).digest()])
        parts.append(generator.integers(0, vocab_size, tokens, dtype=np.int32))
    return np.concatenate(parts)


def scripts(conversations: Sequence[Conversation], arrivals: Arrivals) -> list[Script]:
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
    """Seconds between an answer and the next turn, one per turn; 0 before the first."""
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
