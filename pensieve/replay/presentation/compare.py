"""Compares reports of several runs: their panels, and ratios of throughput at the same normalised latency.

A curve is the straight lines between neighbouring loads. The load that a system carries at a latency L is the
most turns/s on its curve at a latency of at most L: this envelope never falls as L grows, although a curve
folds back where more load gives less throughput. Nothing is extrapolated: a system that was faster than L
even at its highest load carries *at least* that much, and below its lowest latency nothing is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal

import click

from pensieve.replay.presentation.curves import CurvePoint, Panel, Report, panels

Line = Sequence[tuple[float, float]]
"""(turns/s, normalised latency in seconds) from the lowest load to the highest."""
Bound = Literal["equal", "at least", "at most"]
_SIGNS: Mapping[Bound, str] = {"equal": "", "at least": "≥ ", "at most": "≤ "}

RULE = (
    "The most turns/s of the first over those of the second at the same normalised latency, on straight lines between "
    "measured points. The latency is the geometric middle of the range that both curves cover; where they have none in "
    "common, that of the slower one at its highest load. A system that was faster even at its own highest load may "
    "carry more: ≥ or ≤."
)
SCHEMA = "pensieve.replay.compare/1"


@dataclass(frozen=True, slots=True)
class CarriedLoad:
    turns_per_s: float
    at_least: bool
    """The system was faster even at its highest load, so it may carry more."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput of one system over that of another at one latency."""

    latency_s: float
    ours: CarriedLoad | None
    """None: slower than this at every measured load."""
    other: CarriedLoad | None

    @property
    def bound(self) -> Bound | None:
        """Whether ``times`` is exact or a bound; None if the curves do not show either."""
        if self.ours is None or self.other is None or (self.ours.at_least and self.other.at_least):
            return None
        if self.ours.at_least:
            return "at least"
        return "at most" if self.other.at_least else "equal"

    @property
    def times(self) -> float | None:
        if self.bound is None or self.ours is None or self.other is None:
            return None
        return self.ours.turns_per_s / self.other.turns_per_s

    @property
    def text(self) -> str:
        """``2.07``, ``≥ 2.07``, or the reason why there is no number."""
        if self.bound is not None:
            return f"{_SIGNS[self.bound]}{self.times:,.2f}"
        if self.ours is None and self.other is None:
            return "neither is so fast"
        if self.ours is None:
            return "only the second is so fast"
        return "only the first is so fast" if self.other is None else "both are faster"


@dataclass(frozen=True, slots=True)
class Comparison:
    ours: str
    other: str
    mean: Ratio | None
    """Ratio at equal mean normalised latency; None if a system has no measured point."""
    p90: Ratio | None


def load_at_latency(line: Line, latency_s: float) -> CarriedLoad | None:
    """The envelope at ``latency_s``; None below the lowest latency of the line."""
    if not line or latency_s < min(y for _, y in line):
        return None
    loads = [x for x, y in line if y <= latency_s]
    # A curve may cross the level several times, up or, where it folds back, down: every crossing counts.
    for (x0, y0), (x1, y1) in pairwise(line):
        if min(y0, y1) < latency_s < max(y0, y1):
            loads.append(x0 + (x1 - x0) * (latency_s - y0) / (y1 - y0))
    return CarriedLoad(max(loads), latency_s > line[-1][1])


def common_latency(ours: Line, other: Line) -> float:
    """Geometric mean of the range of latencies that both lines cover.

    Without a common range, the latency of the slower system at its highest load. This understates the
    difference: the slower system at its best against what the faster one was seen to carry.
    """
    low = max(min(y for _, y in line) for line in (ours, other))
    high = min(line[-1][1] for line in (ours, other))
    if low > high:
        return max(ours[-1][1], other[-1][1])
    return min(max(math.sqrt(low * high), low), high)  # rounding must not leave the range


def ratio(ours: Line, other: Line, latency_s: float | None = None) -> Ratio | None:
    """The ratio at ``latency_s``, by default at the ``common_latency``. None if a line has no point."""
    if not ours or not other:
        return None
    level = common_latency(ours, other) if latency_s is None else latency_s
    return Ratio(level, load_at_latency(ours, level), load_at_latency(other, level))


def comparisons(
    points: Mapping[str, Sequence[CurvePoint]], latency_s: float | None = None
) -> list[Comparison]:
    mean = {name: [(point.throughput, point.mean_s) for point in curve] for name, curve in points.items()}
    p90 = {
        name: [(point.throughput, point.p90_s) for point in curve if point.p90_s is not None]
        for name, curve in points.items()
    }
    return [
        Comparison(a, b, ratio(mean[a], mean[b], latency_s), ratio(p90[a], p90[b], latency_s))
        for a, b in combinations(points, 2)
    ]


class NotAReport(click.ClickException):
    """The file is not a report."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report of any version; newer ones only have more fields. Raises NotAReport, OSError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAReport(f"{path}: {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if not str(schema).startswith("pensieve."):
        raise NotAReport(f"{path}: not a report of `pensieve replay --json`: its schema is {schema!r}")
    targets = report.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, dict) and "target" in t for t in targets):
        raise NotAReport(f"{path}: `targets` must be a list of named entries")
    if not targets and not report.get("unreached"):
        raise NotAReport(f"{path}: it has no target")
    return report


def names_of(files: tuple[Path, ...]) -> list[str]:
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]


def comparison(
    reports: Sequence[Report], names: Sequence[str], latency_s: float | None = None
) -> dict[str, Any]:
    """The content of the plots and of the table of ratios for JSON; bench/README.md describes it."""
    return {
        "schema": SCHEMA,
        "reports": [
            {"name": name, "created": report.get("created"), "command": report.get("command")}
            for name, report in zip(names, reports, strict=True)
        ],
        "at_latency_s": latency_s,
        "panels": [_panel_json(panel, names, latency_s) for panel in panels(reports, names)],
    }


def _panel_json(panel: Panel, names: Sequence[str], latency_s: float | None) -> dict[str, Any]:
    systems = [
        {
            "system": system,
            "reports": sorted({names[entry.report] for entry in panel.curves[system]}),
            "points": [_point_json(point) for point in points],
        }
        for system, points in panel.points.items()
    ]
    pairs = [_pair_json(pair) for pair in comparisons(panel.points, latency_s)]
    return {"workload": panel.title, "systems": systems, "ratios": pairs}


def _point_json(point: CurvePoint) -> dict[str, Any]:
    low, high = point.interval_s or (None, None)
    return {
        "load": point.load,
        "turns_per_s": point.throughput,
        "normalised_latency_s": {"mean": point.mean_s, "low": low, "high": high, "p90": point.p90_s},
    }


def _pair_json(pair: Comparison) -> dict[str, Any]:
    return {
        "system": pair.ours,
        "against": pair.other,
        "mean": _ratio_json(pair.mean),
        "p90": _ratio_json(pair.p90),
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    ours, other = (side and side.turns_per_s for side in (ratio.ours, ratio.other))
    return {
        "latency_s": ratio.latency_s, "turns_per_s": ours, "against_turns_per_s": other, "times": ratio.times,
        "bound": ratio.bound, "text": ratio.text,
    }  # fmt: skip
