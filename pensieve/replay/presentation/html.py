"""Reports as one self-contained HTML page: plots, tables, configuration, and the numbers themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pensieve.replay.measure import RULE, largest_within_limit, value_at
from pensieve.replay.presentation.curves import RULE as RATIO_RULE
from pensieve.replay.presentation.curves import (
    CurveEntry,
    Panel,
    Report,
    comparisons,
    curve_points,
    panels,
    report_numbers,
    unsteady,
)
from pensieve.replay.presentation.plots import BARS_CAPTION, CAPTION, has_bars, inline_svgs
from pensieve.replay.presentation.table import (
    BY_TURN,
    FAILURES,
    FIRST_TOKEN,
    LATENESS,
    NOTHING,
    SESSIONS,
    SPEED,
    TOKENS,
    Column,
    format_number,
    limit_text,
    ratio_texts,
)

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. ``path`` leads to ``value`` in the embedded reports; a derived number has neither."""

    text: str
    path: str = ""
    value: float | int | None = None


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    key: str
    title: str
    note: str
    heads: tuple[str, ...]
    labels: int
    rows: tuple[Row, ...]
    folded: bool = False


def headline_tables(panels: Sequence[Panel], latency_s: float | None) -> Iterator[Table]:
    yield _systems(panels)
    ratios = _ratios(panels, latency_s)
    if ratios.rows:
        yield ratios


def tables(panels: Sequence[Panel]) -> Iterator[Table]:
    all_entries = [entry for panel in panels for entry in panel.entries]
    yield _grid("speed", "Throughput and latency", "", panels, SPEED)
    note = "Cold: the first turn of a conversation; warm: the later ones."
    yield _grid("ttft", "Time to first token", note, panels, FIRST_TOKEN)
    swap = _swap_columns(all_entries)
    note = "" if swap else "No target reported its swap traffic in bytes; host tokens were swapped in."
    yield _grid("tokens", "Tokens by source, and swap traffic", note, panels, (*TOKENS, *swap))
    yield _grid("sessions", "Active conversations", RULE, panels, SESSIONS)
    yield _grid("failures", "Failures and receipts", "", panels, FAILURES)
    if any(value_at(entry.summary, "client_lag_s") for entry in all_entries):
        note = "How much later than due the client sent its turns."
        yield _grid("lateness", "The client's own lateness", note, panels, LATENESS)
    for panel in panels:
        for entry in panel.entries:
            if value_at(entry.summary, "by_turn"):
                yield _by_turn(panel, entry)


def _systems(panels: Sequence[Panel]) -> Table:
    heads = (
        "system", "most turns/s", "offered then", "normalised latency then [ms/token]",
        "lowest normalised latency [ms/token]",
        "active conversations with TTFT p95 ≤ 2 s", "turns lost",
    )  # fmt: skip
    rows = [(panel, _system(name, curve)) for panel in panels for name, curve in panel.curves.items()]
    note = "Means over turns and seeds. Active conversations: see the rule below."
    return _with_panels(Table("systems", "At a glance", note, heads, 1, ()), panels, rows)


def _system(name: str, curve: Sequence[CurveEntry]) -> Row:
    points = curve_points(curve)
    best = max(points, key=lambda point: point.throughput, default=None)
    bins = [row for entry in curve for row in value_at(entry.summary, "active_sessions.bins") or []]
    failed = sum(
        value_at(entry.summary, f"turns.{key}") or 0 for entry in curve for key in ("failed", "skipped")
    )
    texts = (
        name,
        NOTHING if best is None else format_number(best.throughput, ",.2f"),
        NOTHING if best is None else best.load,
        NOTHING if best is None else format_number(best.mean_s, ",.1f", 1000.0),
        format_number(min((point.mean_s for point in points), default=None), ",.1f", 1000.0),
        limit_text(largest_within_limit(bins) if bins else None),
        f"{failed:,d}",
    )
    return tuple(Cell(text) for text in texts)


def _ratios(panels: Sequence[Panel], latency_s: float | None) -> Table:
    rows = [
        (
            panel,
            tuple(
                Cell(text)
                for text in (pair.ours, pair.other, *ratio_texts(pair.mean), *ratio_texts(pair.p90))
            ),
        )
        for panel in panels
        for pair in comparisons(panel.points, latency_s)
    ]
    heads = (
        "system", "against", "at mean normalised latency [ms/token]", "times the throughput",
        "at p90 normalised latency [ms/token]", "times the throughput",
    )  # fmt: skip
    table = Table("ratios", "Throughput at equal normalised latency", RATIO_RULE, heads, 2, ())
    return _with_panels(table, panels, rows)


def _grid(key: str, title: str, note: str, panels: Sequence[Panel], columns: Sequence[Column]) -> Table:
    found = [(panel, entry) for panel in panels for entry in panel.entries]
    seeds = any(entry.seed is not None for _, entry in found)
    rows = [(panel, (*_labels(entry, seeds), *_cells(entry, columns))) for panel, entry in found]
    heads = ("system", "offered", *(("seed",) if seeds else ()), *(column.title for column in columns))
    return _with_panels(Table(key, title, note, heads, 3 if seeds else 2, ()), panels, rows)


def _with_panels(table: Table, panels: Sequence[Panel], rows: Sequence[tuple[Panel, Row]]) -> Table:
    several = len(panels) > 1
    return replace(
        table,
        heads=(("workload",) if several else ()) + table.heads,
        labels=table.labels + several,
        rows=tuple((Cell(panel.title), *row) if several else row for panel, row in rows),
    )


def _labels(entry: CurveEntry, seeds: bool) -> Row:
    texts = [entry.system, entry.load]
    if seeds:
        texts.append(NOTHING if entry.seed is None else str(entry.seed))
    return tuple(Cell(text) for text in texts)


def _cells(entry: CurveEntry, columns: Sequence[Column]) -> Iterator[Cell]:
    for column in columns:
        path = f"{entry.report}.{entry.path}.{column.path}"
        text = column.text(entry.summary)
        if column is SESSIONS[-1]:
            text = limit_text(value_at(entry.summary, "active_sessions"))
        yield Cell(text, path, value_at(entry.summary, column.path))


def _swap_columns(found: Sequence[CurveEntry]) -> list[Column]:
    names = dict.fromkeys(
        name
        for entry in found
        for name, value in _mapping(value_at(entry.summary, "swap")).items()
        if isinstance(value, int | float)
    )
    return [Column(f"swap {name.replace('_', ' ')}", f"swap.{name}", ",.10g") for name in names]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _by_turn(panel: Panel, entry: CurveEntry) -> Table:
    rows = []
    for index, row in enumerate(entry.summary["by_turn"]):
        base = f"{entry.report}.{entry.path}.by_turn.{index}"
        cells = (Cell(c.text(row), f"{base}.{c.path}", value_at(row, c.path)) for c in BY_TURN)
        rows.append((Cell(str(row["turn"] + 1)), *cells))
    seed = "" if entry.seed is None else f"seed {entry.seed}"
    key = f"turns-{entry.report}-{entry.path.replace('.', '-')}"
    title = "By turn: " + ", ".join(part for part in (entry.system, panel.title, entry.load, seed) if part)
    return Table(key, title, "", ("turn", *(c.title for c in BY_TURN)), 1, tuple(rows), folded=True)


def write_html(
    reports: Sequence[Report], path: Path, names: Sequence[str] = (), latency_s: float | None = None
) -> None:
    """Write one page of all reports. Raises PlotsMissing, OSError.

    ``latency_s``: where ratios of throughput are taken; None: chosen for each pair of systems.
    """
    path.write_text(page(reports, names, latency_s), encoding="utf-8")


def page(reports: Sequence[Report], names: Sequence[str] = (), latency_s: float | None = None) -> str:
    import jinja2  # from the extra `plots`, like matplotlib

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
            dict.fromkeys(str(value_at(report, "dataset.name")) for report in reports if report["targets"])
        ),
        headline=pictures.pop("latency", None),
        headline_tables=list(headline_tables(shown, latency_s)),
        wide=pictures.pop("sources", None),
        pictures=list(pictures.values()),
        tables=list(tables(shown)),
        problems=list(_problems(reports, names, found)),
        runs=[
            (name, _summary_line(report), _fact_rows(report), _command_line(report))
            for name, report in zip(names, reports, strict=True)
        ],
        several=len(reports) > 1,
        data=list(reports),
    )


def _problems(reports: Sequence[Report], names: Sequence[str], found: Sequence[CurveEntry]) -> Iterator[str]:
    for name, report in zip(names, reports, strict=True):
        where = f"{name}: " if len(reports) > 1 else ""
        for reason in report.get("invalid_reasons") or []:
            yield f"{where}not valid, and left out of the curves: {reason}"
        for missing in report.get("unreached") or []:
            yield f"{where}{missing.get('target')} could not be reached: {missing.get('error')}"
    for entry in found:
        where = f"{entry.system}, {entry.load}"
        for code, count in (value_at(entry.summary, "errors") or {}).items():
            yield f"{where}: {count} turns failed with {code}"
        for text in (entry.summary.get("error_examples") or [])[:3]:
            yield f"{where}: {text}"
        for text in (value_at(entry.summary, "receipts.examples") or [])[:3]:
            yield f"{where}: receipt: {text}"
    yield from unsteady(found)


def _summary_line(report: Report) -> str:
    """One line on the work, the machine, the version and the time."""
    work = f"{_count(report, 'conversations')} conversations, {_count(report, 'turns')} turns"
    where = f"{value_at(report, 'machine.cpu')}, {value_at(report, 'machine.cores')} cores"
    if "simulation" in report:
        replicas = value_at(report, "simulation.settings.replicas")
        times = f"{replicas} × " if replicas and replicas > 1 else ""
        where = f"simulated machine: {times}{value_at(report, 'simulation.machine.name')}"
    return " · ".join(
        (work, where, f"pensieve {value_at(report, 'versions.pensieve')}", str(report.get("created", "")))
    )


def _count(report: Report, field: str) -> str:
    return format_number(value_at(report, f"workload.{field}"), ",d")


def _fact_rows(report: Report) -> list[tuple[str, str]]:
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


def _command_line(report: Report) -> str:
    line = report.get("command_line")
    return str(line) if line else shlex.join(map(str, report.get("command") or []))
