"""The values of a replay: its options, a record of each turn, and the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pensieve.core import Usage
from pensieve.replay.targets.base import TargetInfo

MAX_LAG_S = 0.25


@dataclass(slots=True)
class TurnRecord:
    """One turn of the replay. Times in seconds after its start; only the player writes them."""

    conversation: int
    turn: int
    input_tokens: int
    due_s: float
    sent_s: float = 0.0
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time) of each piece of output."""
    done_s: float = 0.0
    usage: Usage | None = None
    error: str = ""
    """Code of the failure; empty if none."""
    message: str = ""

    def end_at_zero(self, zero_s: float) -> None:
        """End the turn at ``zero_s``, which becomes time 0 of all its times; a sent turn counts as due when sent."""
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
        return self.arrivals[0][1] - self.sent_s if self.arrivals else None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a load is played."""

    force_lengths: bool = True
    concurrency: int | None = None
    """Maximum number of conversations at the same time; None: no limit."""
    seed: int = 0
    ids: int = 0
    """Number that selects the input ids, so that no run finds an earlier one's inputs in a server's prefix cache."""
    max_lag_s: float = MAX_LAG_S
    """The measurement is void if 1 % of the sends, or of the client's own timers, were later than this."""
    stop_s: float | None = None
    """Seconds after which the replay stops, whatever is in flight; None: when all conversations have ended."""
    processes: int = 1
    hints: float | None = None
    """Announce the next turn to the target with an error of this sigma, see ``runner.hint_of``; None: no hints."""
    warm_ahead_s: float | None = None
    """Ask the target to warm a session this long before its next turn is due; None: never."""

    @property
    def needs_hints(self) -> bool:
        return self.hints is not None or self.warm_ahead_s is not None


@dataclass(frozen=True, slots=True)
class PlayResult:
    """A player's results, apart from the turns that ended."""

    duration_s: float
    skipped_turns: int
    cut_short: tuple[TurnRecord, ...]
    loop_lag_s: tuple[float, ...]
    warm_calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay against one target."""

    target: str
    info: TargetInfo
    records: tuple[TurnRecord, ...]
    skipped_turns: int
    """Turns that were never sent, because an earlier turn failed."""
    duration_s: float
    loop_lag_s: tuple[tuple[float, ...], ...] = ()
    """For each client process, the lateness of its own timer at each tick."""
    outside: tuple[TurnRecord, ...] = ()
    """Turns that ended outside the measured window; ``records`` then has those inside."""
    window_s: tuple[float, float] | None = None
    leftover: str = ""
    """Why a session could not be deleted after the measurement; empty if all were."""
    cut_short: tuple[TurnRecord, ...] = ()
    """Turns of open conversations when the replay was stopped; ``done_s`` is the stop. In a pause they were
    not sent."""
    warm_calls: dict[str, int] = field(default_factory=dict)


def merge_results(
    target: str, info: TargetInfo, records: Iterable[TurnRecord], played: Sequence[PlayResult], leftover: str
) -> Outcome:
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
