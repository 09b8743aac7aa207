"""The numbers that a report shows for each target, with their formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pensieve.replay.measure.report import SOURCES, value_at
from pensieve.replay.presentation.compare import Ratio

NOTHING = "–"
SOURCE_NAMES = {
    "gpu_cached": "device",
    "swapped_in": "host",
    "recomputed": "recomputed",
    "new": "new",
}


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    path: str
    digits: str = ",d"
    factor: float = 1.0

    def text(self, summary: Mapping[str, Any]) -> str:
        return format_number(value_at(summary, self.path), self.digits, self.factor)


def format_number(value: Any, digits: str, factor: float = 1.0) -> str:
    """``value × factor`` in a Python format; a dash for None."""
    return NOTHING if value is None else format(value if factor == 1.0 else value * factor, digits)


def _milliseconds(title: str, path: str, *keys: str) -> list[Column]:
    return [Column(f"{title} {key} [ms]", f"{path}.{key}", ",.1f", 1000.0) for key in keys]


SPEED = (
    Column("turns/s", "turns_per_s", ",.2f"),
    Column("output tokens/s", "output_tokens_per_s", ",.1f"),
    *(
        Column(f"normalised latency {key} [ms/token]", f"normalised_latency_s.{key}", ",.1f", 1000.0)
        for key in ("mean", "p90")
    ),
    *_milliseconds("inter-token", "inter_token_s", "p50", "p99"),
)
FIRST_TOKEN = (
    *_milliseconds("cold", "ttft_s.cold", "p50", "p90", "p99"),
    *_milliseconds("warm", "ttft_s.warm", "p50", "p90", "p99"),
)
TOKENS = (
    Column("context", "tokens.context"),
    *(Column(SOURCE_NAMES[source], f"tokens.{source}") for source in SOURCES),
    Column("output", "tokens.output"),
)
SESSIONS = (
    Column("active conversations, mean", "active_sessions.mean", ",.1f"),
    Column("most", "active_sessions.max"),
    Column("turns in flight, mean", "running_turns.mean", ",.1f"),
    Column("most in flight", "running_turns.max", ",.0f"),
    Column("TTFT p95 [ms]", "active_sessions.ttft_p95_s", ",.1f", 1000.0),
    Column("active with TTFT p95 ≤ 2 s", "active_sessions.largest_within_limit", ",.1f"),
)
FAILURES = (
    Column("window [s]", "duration_s", ",.1f"),
    Column("turns completed", "turns.completed"),
    Column("failed", "turns.failed"),
    Column("skipped", "turns.skipped"),
    Column("cut short", "window.cut_short"),
    Column("receipts checked", "receipts.checked"),
    Column("receipts wrong", "receipts.violations"),
)
LATENESS = tuple(_milliseconds("late", "client_lag_s", "p50", "p99", "max"))
BY_TURN = (
    Column("turns", "turns"),
    *_milliseconds("TTFT", "ttft_s", "p50", "p99"),
    *TOKENS,
)


def limit_text(found: Mapping[str, Any] | None) -> str:
    """The ``largest_within_limit`` of ``active_sessions``, with ≥ if no bin was above the limit."""
    if not found or found.get("largest_within_limit") is None:
        return NOTHING
    return ("" if found["limit_reached"] else "≥ ") + format_number(found["largest_within_limit"], ",.1f")


def ratio_texts(ratio: Ratio | None) -> tuple[str, str]:
    return (
        (NOTHING, NOTHING) if ratio is None else (format_number(ratio.latency_s, ",.1f", 1000.0), ratio.text)
    )
