"""Sums over some of the turns: those of one replica, or of one stretch of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pensieve.core import Usage
from pensieve.simulate.scenario.times import Times


@dataclass(slots=True)
class Slice:
    """What ``told`` tells, over all turns that were added."""

    turns: int = 0
    history: int = 0
    """Tokens of history, all turns together."""
    device: int = 0
    host: int = 0
    recomputed: int = 0
    cold: Times = field(default_factory=Times)
    warm: Times = field(default_factory=Times)
    normalised: Times = field(default_factory=Times)

    def add(self, usage: Usage, ttft: float, answering: float, *, warm: bool) -> None:
        """One completed turn; seconds to its first token, and from there to its last."""
        self.turns += 1
        self.history += usage.context_tokens - usage.new_tokens
        self.device += usage.gpu_cached_tokens
        self.host += usage.swapped_in_tokens
        self.recomputed += usage.recomputed_tokens
        (self.warm if warm else self.cold).add(ttft)
        self.normalised.add((ttft + answering) / usage.output_tokens)

    def told(self) -> dict[str, Any]:
        """For JSON. Shares are of the history tokens."""
        return {
            "turns": self.turns,
            "tokens": {"history": self.history, "gpu_cached": self.device, "swapped_in": self.host,
                       "recomputed": self.recomputed},
            "hit_rate": (self.device + self.host) / self.history if self.history else None,
            "ttft_s": {"cold": self.cold.statistic(), "warm": self.warm.statistic()},
            "normalised_latency_s": self.normalised.statistic(),
        }  # fmt: skip
