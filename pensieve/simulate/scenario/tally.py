"""Sums over turns, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import numpy as np

from pensieve.core import Usage
from pensieve.engine.cost import CostModel
from pensieve.replay.measure import BINS, SOURCES, TTFT_LIMIT_S, has_trend, largest_within_limit

_STEP = math.log(1.01)
_MIN_S = 1e-5


@dataclass(slots=True)
class DurationHistogram:
    """Histogram of durations with their mean; percentiles are exact to 1 %."""

    count: int = 0
    total: float = 0.0
    maximum: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.total += count * seconds
        if seconds > self.maximum:
            self.maximum = seconds
        bin_ = int(log(seconds / _MIN_S) / _STEP) if seconds > _MIN_S else 0
        bins = self.bins
        bins[bin_] = bins.get(bin_, 0) + count

    def percentile(self, share: float) -> float | None:
        remaining = share * self.count
        for bin_ in sorted(self.bins):
            remaining -= self.bins[bin_]
            if remaining <= 0:
                return min(_MIN_S * math.exp((bin_ + 0.5) * _STEP), self.maximum)
        return None

    def quantiles(self) -> list[float] | None:
        found = [self.percentile(share / 100) for share in range(101)]
        return None if found[-1] is None else [value for value in found if value is not None]

    def merge(self, other: DurationHistogram) -> None:
        self.count, self.total = self.count + other.count, self.total + other.total
        self.maximum = max(self.maximum, other.maximum)
        for bin_, count in other.bins.items():
            self.bins[bin_] = self.bins.get(bin_, 0) + count

    def statistics(self) -> dict[str, float | int | None]:
        mean = self.total / self.count if self.count else None
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        percentiles = {name: self.percentile(share) for name, share in shares.items()}
        return {"count": self.count, "mean": mean, **percentiles, "max": self.maximum if self.count else None}


@dataclass(slots=True)
class TurnTotals:
    """Totals over the turns that were added."""

    turns: int = 0
    history: int = 0
    device: int = 0
    host: int = 0
    recomputed: int = 0
    cold: DurationHistogram = field(default_factory=DurationHistogram)
    warm: DurationHistogram = field(default_factory=DurationHistogram)
    normalised: DurationHistogram = field(default_factory=DurationHistogram)

    def add(self, usage: Usage, ttft: float, answering: float, *, warm: bool) -> None:
        """Add a turn; ``ttft`` and ``answering`` (first to last token) in seconds."""
        self.turns += 1
        self.history += usage.context_tokens - usage.new_tokens
        self.device += usage.gpu_cached_tokens
        self.host += usage.swapped_in_tokens
        self.recomputed += usage.recomputed_tokens
        (self.warm if warm else self.cold).add(ttft)
        self.normalised.add((ttft + answering) / usage.output_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON. ``hit_rate`` is a share of the history tokens."""
        return {
            "turns": self.turns,
            "tokens": {"history": self.history, "gpu_cached": self.device, "swapped_in": self.host,
                       "recomputed": self.recomputed},
            "hit_rate": (self.device + self.host) / self.history if self.history else None,
            "ttft_s": {"cold": self.cold.statistics(), "warm": self.warm.statistics()},
            "normalised_latency_s": self.normalised.statistics(),
        }  # fmt: skip


_MAX_ROWS = 20
TimeWindow = tuple[float, float]


class RecomputeCosts:
    """Costs of recomputing ranges of a context."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._size = cost.chunk_tokens
        self._upto = [0.0]

    def cost_up_to(self, tokens: int) -> float:
        """Seconds to compute the first ``tokens`` tokens of a context; part of a chunk costs its share."""
        whole, rest = divmod(tokens, self._size)
        while len(self._upto) < whole + 2:
            costs = self._cost.chunk_costs(2 * len(self._upto) + 64).tolist()
            for cost in costs[len(self._upto) - 1 :]:
                self._upto.append(self._upto[-1] + cost)
        low = self._upto[whole]
        return low + (self._upto[whole + 1] - low) * rest / self._size if rest else low

    def cost_of(self, missing: tuple[tuple[int, int], ...], history: int) -> float:
        """Seconds to recompute the ``missing`` ranges of the first ``history`` tokens."""
        return sum(
            self.cost_up_to(min(end, history)) - self.cost_up_to(start)
            for start, end in missing
            if start < history
        )


@dataclass(slots=True)  # not frozen, which is slow: one is made for each turn
class CompletedTurn:
    """A completed turn as counted by an engine. Times in virtual seconds."""

    number: int
    """Number in the session, from 0."""
    usage: Usage
    expected_context: int
    cost: float
    """Seconds of recomputation."""
    ttft: float
    answering: float
    """Seconds from the first token to the end."""
    end_s: float
    shared: int = 0
    """Input tokens that were cached by other sessions."""
    replica: int = 0


@dataclass(slots=True)
class _Row:
    turns: int = 0
    sources: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    output: int = 0
    ttft: DurationHistogram = field(default_factory=DurationHistogram)


@dataclass(slots=True)
class Tally:
    """Sums over one policy's simulation: over the turns that ended in the window, or over all turns."""

    window: TimeWindow | None = None
    """(start, end) in virtual seconds after ``zero_s``; the end is excluded."""
    zero_s: float = 0.0
    """Origin of all times here."""
    row_s: float | None = None
    """Length of a row of ``timeline``; None: no timeline."""
    sessions: int = 0
    """Begun, inside the window or not."""
    turns_outside: int = 0
    recomputed_cost_s: float = 0.0
    violations: int = 0
    """Receipts that do not add up, inside the window or not."""
    shared: int = 0
    repeated_turns: int = 0
    rows: list[_Row] = field(default_factory=list)
    """Sums by the turn's number in its session; the last row holds all later turns."""
    latency: DurationHistogram = field(default_factory=DurationHistogram)
    normalised: DurationHistogram = field(default_factory=DurationHistogram)
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    """Between consecutive tokens of an answer."""
    answering_s: float = 0.0
    open_s: float = 0.0
    """Sum of the times that sessions were open, pauses included."""
    in_flight_s: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of the times that turns were in flight, for each part of the window."""
    last_end_s: float = 0.0
    replicas: dict[int, TurnTotals] = field(default_factory=dict)
    timeline: dict[int, TurnTotals] = field(default_factory=dict)
    """Turns by end time: by the row of ``row_s`` seconds after the start of the window."""

    def add_turn(self, turn: CompletedTurn) -> None:
        usage = turn.usage
        values = (
            usage.gpu_cached_tokens,
            usage.swapped_in_tokens,
            usage.recomputed_tokens,
            usage.new_tokens,
        )
        now = turn.end_s - self.zero_s
        self.sessions += turn.number == 0
        self.violations += (
            not usage.reconciles or usage.context_tokens != turn.expected_context or min(values) < 0
        )
        self.last_end_s = max(self.last_end_s, now)
        if self.window is not None:
            self._add_in_flight(now - turn.ttft - turn.answering, now)
            if not self.window[0] <= now < self.window[1]:
                self.turns_outside += 1
                return
        slices = [self.replicas.setdefault(turn.replica, TurnTotals())]
        if self.row_s is not None:
            start = self.window[0] if self.window else 0.0
            slices.append(self.timeline.setdefault(int((now - start) / self.row_s), TurnTotals()))
        for slice_ in slices:
            slice_.add(usage, turn.ttft, turn.answering, warm=turn.number > 0)
        self.shared += turn.shared
        self.recomputed_cost_s += turn.cost
        self.answering_s += turn.answering
        self.latency.add(turn.ttft + turn.answering)
        self.normalised.add((turn.ttft + turn.answering) / usage.output_tokens)
        number = min(turn.number, _MAX_ROWS - 1)
        while len(self.rows) <= number:
            self.rows.append(_Row())
        row = self.rows[number]
        row.turns += 1
        row.output += usage.output_tokens
        row.ttft.add(turn.ttft)
        for place, tokens in enumerate(values):
            row.sources[place] += tokens

    def add_gaps(self, seconds: float, count: int, now: float) -> None:
        """Add ``count`` tokens that arrived until ``now``, each ``seconds`` after the token before it."""
        if count and (self.window is None or self.window[0] <= now - self.zero_s < self.window[1]):
            self.gaps.add(seconds, count)

    def add_open_time(self, start: float, end: float) -> None:
        """Add a session that was open from its first turn's arrival to its last answer's end."""
        start, end = start - self.zero_s, end - self.zero_s
        low, high = self.window or (0.0, end)
        self.open_s += max(0.0, min(end, high) - max(start, low))

    def _add_in_flight(self, start: float, end: float) -> None:
        assert self.window is not None
        low, high = self.window
        width = (high - low) / BINS
        first, last = (int((min(max(at, low), high) - low) / width) for at in (start, end))
        for part in range(first, min(last, BINS - 1) + 1):
            begins = low + part * width
            self.in_flight_s[part] += max(0.0, min(end, begins + width) - max(start, begins))

    @property
    def cold(self) -> DurationHistogram:
        return _merged(self.rows[:1])

    @property
    def warm(self) -> DurationHistogram:
        return _merged(self.rows[1:])

    @property
    def turns(self) -> int:
        return sum(row.turns for row in self.rows)

    @property
    def output(self) -> int:
        return sum(row.output for row in self.rows)

    @property
    def sources(self) -> dict[str, int]:
        return {name: sum(row.sources[place] for row in self.rows) for place, name in enumerate(SOURCES)}

    @property
    def context(self) -> int:
        return sum(self.sources.values())

    def summary(self) -> dict[str, Any]:
        """The summary, with the field names of ``pensieve replay`` where both have the number."""
        start, end = self.window or (0.0, self.last_end_s)
        seconds, sources = end - start, self.sources
        history = self.context - sources["new"]
        found = sources["gpu_cached"] + sources["swapped_in"]
        kinds = {"cold": self.cold, "warm": self.warm}
        ttft = _merged(self.rows).percentile(0.95)
        active = self.open_s / seconds if seconds else 0.0
        bins = [{"start_s": start, "end_s": end, "turns": self.turns, "active": active, "ttft_p95_s": ttft}]
        return {
            "duration_s": seconds,
            "turns": {"completed": self.turns, "failed": 0, "skipped": 0},
            "sessions": self.sessions,
            "virtual_s": self.last_end_s,
            "turns_per_s": self.turns / seconds if seconds else None,
            "output_tokens_per_s": self.output / seconds if seconds else None,
            "normalised_latency_s": self.normalised.statistics(),
            "latency_s": self.latency.statistics(),
            "ttft_s": {kind: times.statistics() for kind, times in kinds.items()},
            "ttft_quantiles_s": {kind: times.quantiles() for kind, times in kinds.items()},
            "inter_token_s": self.gaps.statistics(),
            "answering_s": self.answering_s,
            "tokens": {"context": self.context, **sources, "output": self.output},
            "hit_rate": found / history if history else None,
            "device_hit_rate": sources["gpu_cached"] / history if history else None,
            "recomputed_cost_s": self.recomputed_cost_s,
            "repeated_turns": self.repeated_turns,
            "receipts": {"checked": self.turns + self.turns_outside, "violations": self.violations, "examples": []},
            "by_replica": [{"replica": at, **self.replicas[at].to_dict()} for at in sorted(self.replicas)],
            "timeline": self._timeline_json(),
            "by_turn": [_by_turn_json(number, row) for number, row in enumerate(self.rows)],
            "active_sessions": {
                "mean": active, "limit_s": TTFT_LIMIT_S, "ttft_p95_s": ttft, **largest_within_limit(bins), "bins": bins,
            },
            "window": self._window_json(),
            **({"running_turns": {"mean": sum(self.in_flight_s) / seconds}} if self.window else {}),
        }  # fmt: skip

    def _timeline_json(self) -> list[dict[str, Any]]:
        start = self.window[0] if self.window else 0.0
        return [
            {"start_s": start + row * self.row_s, **self.timeline.get(row, TurnTotals()).to_dict()}
            for row in range(1 + max(self.timeline, default=-1))
            if self.row_s is not None
        ]

    def _window_json(self) -> dict[str, Any]:
        start, end = self.window or (0.0, self.last_end_s)
        steady = None
        if self.window is not None:
            steady = not has_trend(np.array(self.in_flight_s) * BINS / (end - start))
        return {
            "rule": "given" if self.window else "whole", "start_s": start, "end_s": end, "run_s": self.last_end_s,
            "steady": steady, "turns_outside": self.turns_outside, "failed_outside": 0, "cut_short": 0,
        }  # fmt: skip


def _merged(rows: Sequence[_Row]) -> DurationHistogram:
    merged = DurationHistogram()
    for row in rows:
        merged.merge(row.ttft)
    return merged


def _by_turn_json(number: int, row: _Row) -> dict[str, Any]:
    tokens = dict(zip(SOURCES, row.sources, strict=True))
    return {
        "turn": number, "turns": row.turns, "ttft_s": row.ttft.statistics(),
        "tokens": {"context": sum(row.sources), **tokens, "output": row.output},
    }  # fmt: skip
