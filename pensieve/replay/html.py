"""Reports as one HTML page that needs nothing else: pictures, tables, configuration, and the numbers themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from pensieve.replay.activity import RULE, largest_within_limit
from pensieve.replay.columns import (
    BY_TURN,
    FAILURES,
    NOTHING,
    SESSIONS,
    SPEED,
    TOKENS,
    Column,
    limit_text,
    number,
)
from pensieve.replay.curves import (
    Entry,
    Report,
    at,
    by_system,
    curve_points,
    entries,
    equal_latency_ratio,
)
from pensieve.replay.plots import inline_svgs

_CAPTIONS = {
    "latency": (
        "Latency against throughput",
        "One line per system; numbers beside points are the offered turns per second, bars the 95 % interval over "
        "seeds. Normalised latency: time from sending a turn to its last token, per output token.",
    ),
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


@dataclass(frozen=True, slots=True)
class Cell:
    """``path`` leads to ``value`` in the embedded reports; derived numbers have none."""

    text: str
    path: str = ""
    value: float | int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    key: str
    title: str
    note: str
    heads: tuple[str, ...]
    labels: int
    """So many columns on the left are names."""
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False
    """Shown when asked for."""


def write_html(reports: Sequence[Report], path: Path, names: Sequence[str] = ()) -> None:
    """One page of all reports; ``names`` are of the reports. Raises PlotsMissing, OSError."""
    path.write_text(page(reports, names), encoding="utf-8")


def page(reports: Sequence[Report], names: Sequence[str] = ()) -> str:
    """The page. Raises PlotsMissing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pensieve.replay"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    names = list(names) or [str(number + 1) for number in range(len(reports))]
    found = [entry for curve in by_system(entries(reports, names)).values() for entry in curve]
    svgs = inline_svgs(reports, names)
    return environment.get_template("report.html.jinja").render(
        title=", ".join(dict.fromkeys(str(at(report, "dataset.name") or "?") for report in reports)),
        pictures=[(key, *_CAPTIONS[key], svg) for key, svg in svgs.items()],
        tables=list(_tables(reports, found)),
        problems=list(_problems(reports, names, found)),
        runs=[
            (name, _facts(report), _shell(report)) for name, report in zip(names, reports, strict=True)
        ],
        several=len(reports) > 1,
        lines=[_line(report) for report in reports],
        data=list(reports),
    )


def _tables(reports: Sequence[Report], found: Sequence[Entry]) -> Iterator[Table]:
    curves = by_system(found)
    yield _systems(reports, curves)
    ratios = _ratios(reports, curves)
    if ratios.rows:
        yield ratios
    yield _grid("speed", "Throughput and latency", "", found, SPEED)
    swap = _swap_columns(found)
    note = "" if swap else "No target told its swap traffic in bytes; host tokens are those that were swapped in."
    yield _grid("tokens", "Tokens by source, and swap traffic", note, found, (*TOKENS, *swap))
    yield _grid("sessions", "Active conversations", RULE, found, SESSIONS)
    yield _grid("failures", "Failures, receipts and the client's own lateness", "", found, FAILURES)
    for entry in found:
        if at(entry.summary, "by_turn"):
            yield _by_turn(entry)


def _systems(reports: Sequence[Report], curves: Mapping[str, Sequence[Entry]]) -> Table:
    rows = []
    for name, curve in curves.items():
        points = curve_points(reports, curve)
        best = max(points, key=lambda point: point.throughput, default=None)
        bins = [row for e in curve for row in at(e.summary, "active_sessions.bins") or []]
        failed = sum((at(e.summary, "turns.failed") or 0) + (at(e.summary, "turns.skipped") or 0) for e in curve)
        rows.append(
            (
                Cell(name),
                Cell(NOTHING if best is None else number(best.throughput, ",.2f")),
                Cell(NOTHING if best is None else best.load),
                Cell(NOTHING if best is None else number(best.latency_s, ",.1f", 1000.0)),
                Cell(number(_least(points), ",.1f", 1000.0)),
                Cell(limit_text(largest_within_limit(bins) if bins else None)),
                Cell(f"{failed:,d}"),
            )
        )
    heads = (
        "system", "most turns/s", "offered then", "normalised latency then [ms]", "lowest normalised latency [ms]",
        "active conversations with TTFT p95 ≤ 2 s", "turns lost",
    )  # fmt: skip
    note = "Means over seeds; how active conversations are counted is said below."
    return Table("systems", "At a glance", note, heads, 1, tuple(rows))


def _least(points: Sequence[Any]) -> float | None:
    return min((point.latency_s for point in points), default=None)


def _ratios(reports: Sequence[Report], curves: Mapping[str, Sequence[Entry]]) -> Table:
    points = {name: curve_points(reports, curve) for name, curve in curves.items()}
    rows = []
    names = list(points)
    for index, ours in enumerate(names):
        for other in names[index + 1 :]:
            ratio = equal_latency_ratio(points[ours], points[other])
            if ratio is not None:
                cells = Cell(number(ratio[0], ",.1f", 1000.0)), Cell(number(ratio[1], ",.2f"))
                rows.append((Cell(ours), Cell(other), *cells))
    return Table(
        "ratios", "Throughput at equal latency",
        "The most turns/s of the first over those of the second, at a mean normalised latency of at most the one "
        "given: the geometric middle of the latencies that both reached, on straight lines between measured points. "
        "Pairs without a common latency are left out.",
        ("system", "against", "normalised latency [ms]", "times the throughput"), 2, tuple(rows),
    )  # fmt: skip


def _grid(key: str, title: str, note: str, found: Sequence[Entry], columns: Sequence[Column]) -> Table:
    rows = tuple((*_labels(entry), *_cells(entry, columns)) for entry in found)
    seeds = any(entry.seed is not None for entry in found)
    heads = ("system", "offered", *(("seed",) if seeds else ()), *(column.title for column in columns))
    if not seeds:
        rows = tuple((row[0], row[1], *row[3:]) for row in rows)
    return Table(key, title, note, heads, 3 if seeds else 2, rows)


def _labels(entry: Entry) -> tuple[Cell, Cell, Cell]:
    return Cell(entry.system), Cell(entry.load), Cell(NOTHING if entry.seed is None else str(entry.seed))


def _cells(entry: Entry, columns: Sequence[Column]) -> Iterator[Cell]:
    for column in columns:
        path = f"{entry.report}.{entry.path}.{column.path}"
        text = column.text(entry.summary)
        if column is SESSIONS[-1]:
            text = limit_text(at(entry.summary, "active_sessions"))
        yield Cell(text, path, at(entry.summary, column.path))


def _swap_columns(found: Sequence[Entry]) -> list[Column]:
    """Whatever numbers the targets gave under ``swap``."""
    names = dict.fromkeys(
        name
        for entry in found
        for name, value in (at(entry.summary, "swap") or {}).items()
        if isinstance(value, int | float)
    )
    return [Column(f"swap {name.replace('_', ' ')}", f"swap.{name}", ",.10g") for name in names]


def _by_turn(entry: Entry) -> Table:
    rows = []
    for index, row in enumerate(entry.summary["by_turn"]):
        base = f"{entry.report}.{entry.path}.by_turn.{index}"
        cells = (Cell(c.text(row), f"{base}.{c.path}", at(row, c.path)) for c in BY_TURN)
        rows.append((Cell(str(row["turn"] + 1)), *cells))
    seed = "" if entry.seed is None else f", seed {entry.seed}"
    key = f"turns-{entry.report}-{entry.path.replace('.', '-')}"
    title = f"By turn: {entry.system}, {entry.load}{seed}"
    return Table(key, title, "", ("turn", *(c.title for c in BY_TURN)), 1, tuple(rows), folded=True)


def _problems(reports: Sequence[Report], names: Sequence[str], found: Sequence[Entry]) -> Iterator[str]:
    """What a reader must know before believing a number."""
    for name, report in zip(names, reports, strict=True):
        where = f"{name}: " if len(reports) > 1 else ""
        for reason in report.get("invalid_reasons") or []:
            yield f"{where}not valid: {reason}"
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
        if at(entry.summary, "window.steady") is False:
            yield f"{where}: the load was not steady in the measured window"


def _line(report: Report) -> str:
    """When, where and how much."""
    machine = f"{at(report, 'machine.cpu')}, {at(report, 'machine.cores')} cores"
    work = f"{at(report, 'workload.conversations')} conversations, {at(report, 'workload.turns')} turns"
    return " · ".join(
        (work, machine, f"pensieve {at(report, 'versions.pensieve')}", str(report.get("created", "")))
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """Configuration, workload, machine and versions as lines."""
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
