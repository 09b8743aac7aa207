"""What a Pensieve server did during a run, from the counters of its metrics."""

from __future__ import annotations

from typing import Any

from pensieve.spawn import read_metrics

Counters = dict[str, float]
"""``NAME``, or ``NAME.LABEL`` where labels tell samples of a name apart, to the value."""
_PART = "pensieve_step_part_seconds_total."


def read(admin: str) -> Counters:
    """The counters of the server whose admin port is at HOST:PORT. Raises OSError."""
    return {".".join((sample.name, *sample.labels.values())): sample.value for sample in read_metrics(admin)}


def growth(before: Counters, after: Counters) -> dict[str, Any]:
    """What grew from ``before`` to ``after``, as ``swap`` and ``step_s`` of a report's ``targets`` entry."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps, busy = grown.get("pensieve_steps_total", 0.0), grown.get("pensieve_step_seconds_total", 0.0)
    parts = {name.removeprefix(_PART): value for name, value in grown.items() if name.startswith(_PART)}
    return {
        "swap": {f"{way}_bytes": grown.get(f"pensieve_swap_bytes_total.{way}", 0.0) for way in ("in", "out")},
        "step_s": {
            "count": int(steps),
            "mean": busy / steps if steps else None,
            "share": {part: spent / busy for part, spent in parts.items()} if busy else {},
        },
    }
