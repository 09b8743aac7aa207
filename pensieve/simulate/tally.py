"""Sums over turns, in memory that does not grow with their number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pensieve.core import Usage
from pensieve.engine.cost import CostModel

_STEP = math.log(1.01)
_LEAST = 1e-5
_TURNS_SHOWN = 20
SOURCES = ("gpu_cached", "swapped_in", "recomputed", "new")


@dataclass(slots=True)
class Times:
    """Mean and percentiles of durations; a percentile is right to 1 %."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.most = max(self.most, seconds)
        bin_ = int(math.log(max(seconds, _LEAST) / _LEAST) / _STEP)
        self.bins[bin_] = self.bins.get(bin_, 0) + 1

    def percentile(self, share: float) -> float | None:
        left = share * self.count
        for bin_ in sorted(self.bins):
            left -= self.bins[bin_]
            if left <= 0:
                return min(_LEAST * math.exp((bin_ + 0.5) * _STEP), self.most)
        return None

    def statistic(self) -> dict[str, float | int | None]:
        mean = self.total / self.count if self.count else None
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        percentiles = {name: self.percentile(share) for name, share in shares.items()}
        return {"count": self.count, "mean": mean, **percentiles, "max": self.most if self.count else None}


class ChunkPrices:
    """What it costs to recompute ranges of a context."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._size = cost.chunk_tokens
        self._upto = [0.0]

    def upto(self, tokens: int) -> float:
        """Seconds to compute the first so many tokens of a context; a part of a chunk costs its share."""
        whole, rest = divmod(tokens, self._size)
        while len(self._upto) < whole + 2:
            costs = self._cost.chunk_costs(2 * len(self._upto) + 64).tolist()
            for cost in costs[len(self._upto) - 1 :]:
                self._upto.append(self._upto[-1] + cost)
        low = self._upto[whole]
        return low + (self._upto[whole + 1] - low) * rest / self._size if rest else low

    def of(self, missing: tuple[tuple[int, int], ...], history: int) -> float:
        """Seconds to recompute what is missing of a history."""
        return sum(self.upto(min(end, history)) - self.upto(start) for start, end in missing if start < history)


@dataclass(slots=True)
class Tally:
    """What one policy's simulation came to."""

    turns: int = 0
    sessions: int = 0
    context: int = 0
    output: int = 0
    recomputed_cost_s: float = 0.0
    violations: int = 0
    """Receipts that do not add up."""
    repeated_turns: int = 0
    """Begun again elsewhere because their replica was lost."""
    cold: Times = field(default_factory=Times)
    warm: Times = field(default_factory=Times)
    rows: list[list[int]] = field(default_factory=list)
    """By turn number, the last row for all later ones: turns, and tokens of each of ``SOURCES``."""
    answering_s: float = 0.0
    """From first tokens to the ends of answers."""
    ended: float = 0.0

    def add(
        self, turn: int, usage: Usage, expected_context: int, cost: float, ttft: float, answering: float, now: float
    ) -> None:
        """One completed turn, ended ``now``; ``answering``: seconds since its first token."""
        values = (usage.gpu_cached_tokens, usage.swapped_in_tokens, usage.recomputed_tokens, usage.new_tokens)
        self.turns += 1
        self.sessions += turn == 0
        self.context += usage.context_tokens
        self.output += usage.output_tokens
        self.recomputed_cost_s += cost
        self.violations += not usage.reconciles or usage.context_tokens != expected_context or min(values) < 0
        (self.warm if turn else self.cold).add(ttft)
        self.answering_s += answering
        self.ended = max(self.ended, now)
        number = min(turn, _TURNS_SHOWN - 1)
        while len(self.rows) <= number:
            self.rows.append([0] * (1 + len(SOURCES)))
        row = self.rows[number]
        row[0] += 1
        for column, tokens in enumerate(values, 1):
            row[column] += tokens

    @property
    def sources(self) -> dict[str, int]:
        """Context tokens by where they came from."""
        return {name: sum(row[column] for row in self.rows) for column, name in enumerate(SOURCES, 1)}

    def summary(self) -> dict[str, Any]:
        """For the JSON."""
        sources = self.sources
        history = self.context - sources["new"]
        found = sources["gpu_cached"] + sources["swapped_in"]
        return {
            "turns": self.turns,
            "sessions": self.sessions,
            "virtual_s": self.ended,
            "tokens": {"context": self.context, **sources, "output": self.output},
            "hit_rate": found / history if history else None,
            "device_hit_rate": sources["gpu_cached"] / history if history else None,
            "recomputed_cost_s": self.recomputed_cost_s,
            "ttft_s": {"cold": self.cold.statistic(), "warm": self.warm.statistic()},
            "answering_s": self.answering_s,
            "receipts": {"checked": self.turns, "violations": self.violations},
            "repeated_turns": self.repeated_turns,
            "by_turn": [
                {"turn": number, "turns": turns, **dict(zip(SOURCES, tokens, strict=True))}
                for number, (turns, *tokens) in enumerate(self.rows)
            ],
        }
