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
    sources: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    recomputed_cost_s: float = 0.0
    violations: int = 0
    """Receipts that do not add up."""
    repeated_turns: int = 0
    """Begun again elsewhere because their replica was lost."""
    cold: Times = field(default_factory=Times)
    warm: Times = field(default_factory=Times)
    by_turn: list[dict[str, int]] = field(default_factory=list)
    ended: float = 0.0

    def add(self, turn: int, usage: Usage, expected_context: int, cost: float, ttft: float, now: float) -> None:
        """One completed turn."""
        values = (usage.gpu_cached_tokens, usage.swapped_in_tokens, usage.recomputed_tokens, usage.new_tokens)
        self.turns += 1
        self.sessions += turn == 0
        self.context += usage.context_tokens
        self.output += usage.output_tokens
        self.recomputed_cost_s += cost
        self.violations += not usage.reconciles or usage.context_tokens != expected_context or min(values) < 0
        (self.warm if turn else self.cold).add(ttft)
        self.ended = max(self.ended, now)
        row = min(turn, _TURNS_SHOWN - 1)
        while len(self.by_turn) <= row:
            self.by_turn.append({"turn": len(self.by_turn), "turns": 0, **dict.fromkeys(SOURCES, 0)})
        self.by_turn[row]["turns"] += 1
        for name, tokens in zip(SOURCES, values, strict=True):
            self.sources[name] += tokens
            self.by_turn[row][name] += tokens

    def summary(self) -> dict[str, Any]:
        """For the JSON."""
        history = self.context - self.sources["new"]
        found = self.sources["gpu_cached"] + self.sources["swapped_in"]
        return {
            "turns": self.turns,
            "sessions": self.sessions,
            "virtual_s": self.ended,
            "tokens": {"context": self.context, **self.sources, "output": self.output},
            "hit_rate": found / history if history else None,
            "device_hit_rate": self.sources["gpu_cached"] / history if history else None,
            "recomputed_cost_s": self.recomputed_cost_s,
            "ttft_s": {"cold": self.cold.statistic(), "warm": self.warm.statistic()},
            "receipts": {"checked": self.turns, "violations": self.violations},
            "repeated_turns": self.repeated_turns,
            "by_turn": self.by_turn,
        }
