"""Reports as one HTML page that needs nothing else: pictures, tables, configuration, and the numbers themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pensieve.replay.measure.activity import RULE
from pensieve.replay.measure.report import at
from pensieve.replay.presentation.columns import NOTHING, number
from pensieve.replay.presentation.curves import CurveEntry, Report, unsteady
from pensieve.replay.presentation.latency_plot import BARS_CAPTION, CAPTION, has_bars
from pensieve.replay.presentation.page_tables import headline_tables, tables
from pensieve.replay.presentation.panels import panels, report_numbers
from pensieve.replay.presentation.plots import inline_svgs

_CAPTIONS = {
    "latency": ("Latency against throughput", CAPTION),
    "ttft": (
        "Time to first token",
        "Share of turns that had their first token by then, at each system's highest load. Cold: the first turn of a "
        "conversation; warm: the later ones.",
    ),
    "sources": (
        "Where the context came from",
        "Mean tokens of a turn by its number in the conversation, at each system's highest load, from the receipts.",
    ),
    "sessions": ("Conversations that are served in time", RULE),
}


def write_html(
    reports: Sequence[Report], path: Path, names: Sequence[str] = (), latency_s: float | None = None
) -> None:
    """Write one page of all reports. ``names``: one for each report. ``latency_s``: where ratios of throughput are
    taken; None: chosen for each pair of systems. Raises PlotsMissing, OSError.
    """
    path.write_text(page(reports, names, latency_s), encoding="utf-8")


def page(reports: Sequence[Report], names: Sequence[str] = (), latency_s: float | None = None) -> str:
    """The text of the page that ``write_html`` writes. Raises PlotsMissing."""
    import jinja2  # of the extra `plots`, like matplotlib

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pensieve.replay.presentation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    names = list(names) or report_numbers(reports)
    shown = panels(reports, names)
    found = [entry for panel in shown for entry in panel.entries]
    captions = _CAPTIONS | ({"latency": ("Latency", BARS_CAPTION)} if has_bars(shown) else {})
    pictures = {key: (key, *captions[key], svg) for key, svg in inline_svgs(shown, latency_s).items()}
    return environment.get_template("report.html.jinja").render(
        kind="Simulation" if all("simulation" in report for report in reports) else "Replay",
        title=", ".join(
            dict.fromkeys(str(at(report, "dataset.name")) for report in reports if report["targets"])
        ),
        headline=pictures.pop("latency", None),
        headline_tables=list(headline_tables(shown, latency_s)),
        wide=pictures.pop("sources", None),
        pictures=list(pictures.values()),
        tables=list(tables(shown)),
        problems=list(_problems(reports, names, found)),
        runs=[
            (name, _line(report), _facts(report), _shell(report))
            for name, report in zip(names, reports, strict=True)
        ],
        several=len(reports) > 1,
        data=list(reports),
    )


def _problems(reports: Sequence[Report], names: Sequence[str], found: Sequence[CurveEntry]) -> Iterator[str]:
    """What a reader must know before believing a number."""
    for name, report in zip(names, reports, strict=True):
        where = f"{name}: " if len(reports) > 1 else ""
        for reason in report.get("invalid_reasons") or []:
            yield f"{where}not valid, and left out of the curves: {reason}"
        for missing in report.get("unreached") or []:
            yield f"{where}{missing.get('target')} could not be reached: {missing.get('error')}"
    for entry in found:
        where = f"{entry.system}, {entry.load}"
        for code, count in (at(entry.summary, "errors") or {}).items():
            yield f"{where}: {count} turns failed with {code}"
        for text in (entry.summary.get("error_examples") or [])[:3]:
            yield f"{where}: {text}"
        for text in (at(entry.summary, "receipts.examples") or [])[:3]:
            yield f"{where}: receipt: {text}"
    yield from unsteady(found)


def _line(report: Report) -> str:
    """One line that says when, where and how much was replayed; of a simulation also what was simulated."""
    work = f"{_count(report, 'conversations')} conversations, {_count(report, 'turns')} turns"
    where = f"{at(report, 'machine.cpu')}, {at(report, 'machine.cores')} cores"
    if "simulation" in report:
        replicas = at(report, "simulation.settings.replicas")
        times = f"{replicas} × " if replicas and replicas > 1 else ""
        where = f"simulated machine: {times}{at(report, 'simulation.machine.name')}"
    return " · ".join(
        (work, where, f"pensieve {at(report, 'versions.pensieve')}", str(report.get("created", "")))
    )


def _count(report: Report, what: str) -> str:
    return number(at(report, f"workload.{what}"), ",d")


def _facts(report: Report) -> list[tuple[str, str]]:
    """Configuration, workload, machine and versions as (name, value) lines."""
    found = [("created", str(report.get("created", NOTHING)))]
    for key in ("dataset", "workload", "machine", "versions", "options"):
        found += _flat(key, report.get(key) or {})
    for summary in report["targets"]:
        found += _flat(f"target {summary['target']}", summary.get("details") or {})
    return found


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in _flat(f"{name}: {key}", inner)]
    return [(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _shell(report: Report) -> str:
    line = report.get("command_line")
    return str(line) if line else shlex.join(map(str, report.get("command") or []))
