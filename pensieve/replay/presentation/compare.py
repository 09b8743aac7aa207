"""Reports of several runs together: what is read of each, and what their pictures and ratios hold as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pensieve.replay.presentation.curves import CurvePoint, Report
from pensieve.replay.presentation.equal_latency import Comparison, Ratio, comparisons
from pensieve.replay.presentation.panels import Panel, panels

SCHEMA = "pensieve.replay.compare/1"


class NotAReport(click.ClickException):
    """The file holds something else."""


def read_report(path: Path) -> dict[str, Any]:
    """A report of any version of this program; newer ones only have more fields. Raises NotAReport, OSError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAReport(f"{path}: {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if not str(schema).startswith("pensieve."):
        raise NotAReport(f"{path}: no report of `pensieve replay --json`: its schema is {schema!r}")
    targets = report.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, dict) and "target" in t for t in targets):
        raise NotAReport(f"{path}: `targets` must be a list of named entries")
    if not targets and not report.get("unreached"):
        raise NotAReport(f"{path}: it holds no target")
    return report


def names_of(files: tuple[Path, ...]) -> list[str]:
    """What tells the reports apart: file names, as much of the paths as that takes."""
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]


def comparison(
    reports: Sequence[Report], names: Sequence[str], latency_s: float | None = None
) -> dict[str, Any]:
    """What the pictures and the table of ratios hold, ready for JSON; bench/README.md describes it."""
    return {
        "schema": SCHEMA,
        "reports": [
            {"name": name, "created": report.get("created"), "command": report.get("command")}
            for name, report in zip(names, reports, strict=True)
        ],
        "at_latency_s": latency_s,
        "panels": [_panel(panel, names, latency_s) for panel in panels(reports, names)],
    }


def _panel(panel: Panel, names: Sequence[str], latency_s: float | None) -> dict[str, Any]:
    systems = [
        {
            "system": system,
            "reports": sorted({names[entry.report] for entry in panel.curves[system]}),
            "points": [_point(point) for point in points],
        }
        for system, points in panel.points.items()
    ]
    pairs = [_pair(pair) for pair in comparisons(panel.points, latency_s)]
    return {"workload": panel.title, "systems": systems, "ratios": pairs}


def _point(point: CurvePoint) -> dict[str, Any]:
    low, high = point.interval_s or (None, None)
    return {
        "load": point.load,
        "turns_per_s": point.throughput,
        "normalised_latency_s": {"mean": point.mean_s, "low": low, "high": high, "p90": point.p90_s},
    }


def _pair(pair: Comparison) -> dict[str, Any]:
    return {"system": pair.ours, "against": pair.other, "mean": _ratio(pair.mean), "p90": _ratio(pair.p90)}


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    ours, other = (side and side.turns_per_s for side in (ratio.ours, ratio.other))
    return {
        "latency_s": ratio.latency_s, "turns_per_s": ours, "against_turns_per_s": other, "times": ratio.times,
        "bound": ratio.bound, "text": ratio.text,
    }  # fmt: skip
