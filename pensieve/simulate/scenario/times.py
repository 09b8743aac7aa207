"""Durations, counted in memory that does not grow with their number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from math import log

_STEP = math.log(1.01)
_LEAST = 1e-5


@dataclass(slots=True)
class Times:
    """Mean and percentiles of durations; a percentile is right to 1 %."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.total += count * seconds
        if seconds > self.most:
            self.most = seconds
        bin_ = int(log(seconds / _LEAST) / _STEP) if seconds > _LEAST else 0
        bins = self.bins
        bins[bin_] = bins.get(bin_, 0) + count

    def percentile(self, share: float) -> float | None:
        left = share * self.count
        for bin_ in sorted(self.bins):
            left -= self.bins[bin_]
            if left <= 0:
                return min(_LEAST * math.exp((bin_ + 0.5) * _STEP), self.most)
        return None

    def quantiles(self) -> list[float] | None:
        """The percentiles 0, 1, … 100; None where nothing was added."""
        found = [self.percentile(share / 100) for share in range(101)]
        return None if found[-1] is None else [value for value in found if value is not None]

    def merge(self, other: Times) -> None:
        """Add what another one has."""
        self.count, self.total = self.count + other.count, self.total + other.total
        self.most = max(self.most, other.most)
        for bin_, count in other.bins.items():
            self.bins[bin_] = self.bins.get(bin_, 0) + count

    def statistic(self) -> dict[str, float | int | None]:
        mean = self.total / self.count if self.count else None
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        percentiles = {name: self.percentile(share) for name, share in shares.items()}
        return {"count": self.count, "mean": mean, **percentiles, "max": self.most if self.count else None}
