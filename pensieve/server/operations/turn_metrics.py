"""Metrics of turns: how they ended, how long they took, and with what."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from pensieve.server.values import TurnEnd

_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
STAGES: Final = ("queue", "prefill", "decode", "other")


class TurnMetrics:
    """Turns that held their session."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "pensieve_turns_total",
            "Turns ended, by finish reason or by the reason of the error that discarded them; lower case.",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "pensieve_turn_seconds",
            "Committed turns: from the arrival of the request to the durable commit.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stage_seconds = Counter(
            "pensieve_turn_stage_seconds_total",
            "Seconds of committed turns by stage; other: beginning, tokenising and committing.",
            ["stage"],
            registry=registry,
        )
        for stage in STAGES:
            self._stage_seconds.labels(stage)

    def ended(self, end: TurnEnd) -> None:
        self._ended.labels(end.outcome).inc()
        if not end.committed:
            return
        total, usage = end.ended_at - end.arrived_at, end.usage
        self._seconds.observe(total)
        seconds = {"queue": usage.queue_s, "prefill": usage.prefill_s, "decode": usage.decode_s}
        # Rounding of the receipt can make the parts a little longer than the whole.
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        for stage, amount in seconds.items():
            self._stage_seconds.labels(stage).inc(amount)
