"""The values of a replay: how it is to be played, what happened to each turn, and all that came of it.

``play`` fills them in, ``measure`` reads them; neither needs the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pensieve.core import Usage
from pensieve.replay.targets.base import TargetInfo

MAX_LAG_S = 0.25
"""How late a client may be, by default; see ``RunOptions.max_lag_s``."""


@dataclass(slots=True)
class TurnRecord:
    """What happened to one turn. Times in seconds after the start of the replay; written by the player only."""

    conversation: int
    turn: int
    input_tokens: int
    due_s: float
    """When the turn should have been sent."""
    sent_s: float = 0.0
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time) of each piece of output."""
    done_s: float = 0.0
    usage: Usage | None = None
    error: str = ""
    """Code of the failure; empty: there was none."""
    message: str = ""

    def end_at_zero(self, zero_s: float) -> None:
        """Set the end, and let all times count from it; if it was sent, it was when it was due."""
        self.arrivals = [(count, at - zero_s) for count, at in self.arrivals]
        if self.sent_s:
            self.sent_s -= zero_s
        self.due_s, self.done_s = self.sent_s, 0.0

    @property
    def output_tokens(self) -> int:
        return sum(count for count, _ in self.arrivals)

    @property
    def latency_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None: there was none."""
        return self.arrivals[0][1] - self.sent_s if self.arrivals else None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a load is played."""

    force_lengths: bool = True
    concurrency: int | None = None
    """Conversations at once; None: as many as are due."""
    seed: int = 0
    ids: int = 0
    """Other input ids for another number: no run finds the inputs of an earlier one in a server's prefix cache."""
    max_lag_s: float = MAX_LAG_S
    """The measurement is void when a hundredth of the sends, or of the client's own timers, were later than this."""
    stop_s: float | None = None
    """Seconds after the start, when the replay ends whatever is still going on; None: when all conversations have."""
    processes: int = 1
    """Client processes that share the conversations."""
    hints: float | None = None
    """Tell the target when the next turn is due, with an error of this size: ``load.hints``. None: tell nothing."""
    warm_ahead_s: float | None = None
    """Ask for a session to be warmed so long before its next turn is due; None: do not."""

    @property
    def needs_hints(self) -> bool:
        """Whether it takes a target with ``takes_hints``."""
        return self.hints is not None or self.warm_ahead_s is not None


@dataclass(frozen=True, slots=True)
class PlayResult:
    """What a player knows at its end beyond the turns that ended."""

    duration_s: float
    skipped_turns: int
    cut_short: tuple[TurnRecord, ...]
    loop_lag_s: tuple[float, ...]
    warm_calls: dict[str, int] = field(default_factory=dict)
    """How often a session was asked to be warmed, by what came of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a replay against one target gave."""

    target: str
    info: TargetInfo
    records: tuple[TurnRecord, ...]
    """The turns that ended, in order of completion."""
    skipped_turns: int
    """How many turns were never sent, because a turn before them failed."""
    duration_s: float
    loop_lag_s: tuple[tuple[float, ...], ...] = ()
    """For each client process: how late its own timer fired, each time."""
    outside: tuple[TurnRecord, ...] = ()
    """Turns that did not end in the window of measurement; ``records`` are then those that did."""
    window_s: tuple[float, float] | None = None
    """Start and end of the window; None: the whole replay."""
    leftover: str = ""
    """Why a session could not be ended after the measurement."""
    cut_short: tuple[TurnRecord, ...] = ()
    """The turns that open conversations were at when the replay was stopped: neither completed nor failed. Those in a
    pause were not sent; ``done_s`` is the time of the stop."""
    warm_calls: dict[str, int] = field(default_factory=dict)
    """As in ``PlayResult``, of all players together."""


def merge_results(
    target: str, info: TargetInfo, records: Iterable[TurnRecord], played: Sequence[PlayResult], leftover: str
) -> Outcome:
    """The outcome of what one or more players did at the same time."""
    warm_calls: Counter[str] = Counter()
    for part in played:
        warm_calls.update(part.warm_calls)
    return Outcome(
        target,
        info,
        tuple(sorted(records, key=lambda record: record.done_s)),
        sum(part.skipped_turns for part in played),
        max(part.duration_s for part in played),
        tuple(part.loop_lag_s for part in played),
        leftover=leftover,
        cut_short=tuple(record for part in played for record in part.cut_short),
        warm_calls=dict(warm_calls),
    )
