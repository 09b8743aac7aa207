"""The numbers that a report shows for each target, with their formats, and a replay's report printed as tables.

A table that is too wide is split into several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pensieve.replay.measure import SOURCES, value_at
from pensieve.replay.presentation.curves import (
    CurveEntry,
    Panel,
    Ratio,
    Report,
    busiest,
    comparisons,
    entries,
    panels,
    unsteady,
)

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


_LABEL = 26
_BETWEEN = 3
"""Width of a column besides its text: two blanks and a line."""
_EXAMPLES = 5
_SIDE_BY_SIDE = 4
_LINE = {
    "turns_per_s": "turns/s",
    "output_tokens_per_s": "tok/s",
    "normalised_latency_s.mean": "norm. mean ms/token",
    "normalised_latency_s.p90": "norm. p90 ms/token",
    "ttft_s.cold.p99": "cold TTFT p99 ms",
    "ttft_s.warm.p99": "warm TTFT p99 ms",
    "inter_token_s.p99": "inter-token p99 ms",
    "active_sessions.mean": "active",
}
_COLUMNS = {column.path: column for column in (*SPEED, *FIRST_TOKEN, *SESSIONS)}


def print_grid(
    console: Console, title: str, labels: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print ``rows``: their first cells are names under ``labels``, the others numbers under ``heads``.

    If the console is too narrow, the remaining columns follow in another table that repeats the names.
    """
    count = len(labels)
    cells = [[head.split() or [""], [row[at] for row in rows]] for at, head in enumerate([*labels, *heads])]
    widths = [max(map(len, [*words, *column]), default=0) for words, column in cells]
    widths[:count] = [min(width, _LABEL) for width in widths[:count]]
    room = console.width - 1 - sum(width + _BETWEEN for width in widths[:count])
    for index, columns in enumerate(_split_columns(widths[count:], room)):
        table = Table(title=None if index else Text(title), title_justify="left")
        for label, width in zip(labels, widths, strict=False):
            table.add_column(Text(label), overflow="fold", width=width)
        for column in columns:
            width = widths[count + column]
            table.add_column(Text(heads[column]), justify="right", overflow="fold", width=width)
        for row in rows:
            table.add_row(
                *(Text(cell) for cell in (*row[:count], *(row[count + column] for column in columns)))
            )
        console.print(table)


def _split_columns(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Split columns into tables: yield the indices of the columns of each, at least one."""
    part: list[int] = []
    remaining = room
    for index, width in enumerate(widths):
        if part and width + _BETWEEN > remaining:
            yield part
            part, remaining = [], room
        part.append(index)
        remaining -= width + _BETWEEN
    yield part


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print what was measured, tokens by source per turn number, and problems.

    A few targets are columns. Runs of a sweep are rows, and only each system's highest load shows its turns.
    """
    (panel,) = panels([report])
    shown = panel.entries
    if len(shown) <= _SIDE_BY_SIDE and len({entry.load for entry in shown}) == 1:
        _print_overview(report["targets"], _workload_line(report), console)
        detailed = shown
    else:
        _print_curves(shown, _workload_line(report), console)
        _print_ratios(panel, None, console)
        detailed = [busiest(curve) for curve in panel.curves.values()]
    for entry in detailed:
        if entry.summary["receipts"]["checked"]:
            _print_by_turn(entry, console)
    for summary in report["targets"]:
        _print_problems(summary, console)
    _print_warnings(report, console)


def print_curves(
    reports: Sequence[Report], names: Sequence[str], console: Console, latency_s: float | None = None
) -> None:
    """Print all runs of several reports, one per row, the ratios between systems, and problems.

    ``latency_s``: where ratios of throughput are taken; None: chosen for each pair of systems.
    """
    for panel in panels(reports, names):
        default_title = names[0] if len(reports) == 1 else f"{len(reports)} reports"
        _print_curves(panel.entries, panel.title or default_title, console)
        _print_ratios(panel, latency_s, console)
    for report in reports:
        for summary in report["targets"]:
            _print_problems(summary, console)
        _print_warnings(report, console)


def _workload_line(report: dict[str, Any]) -> str:
    work = report["workload"]
    line = f"{work['conversations']} conversations, {work['turns']} turns of {report['dataset']['name']}"
    if work["cut_conversations"] or work["dropped_conversations"]:
        line += (
            f"; {work['cut_conversations']} cut and {work['dropped_conversations']} left out "
            f"to fit {work['context_limit']} tokens"
        )
    return line


def _print_overview(summaries: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    rows: list[tuple[str, ...]] = []

    def row(name: str, *values: str) -> None:
        rows.append((name, *values))

    def each(path: str, digits: str) -> list[str]:
        return [format_number(value_at(summary, path), digits) for summary in summaries]

    def milliseconds(name: str, path: str, *keys: str, unit: str = "ms") -> None:
        cells = (
            " / ".join(format_number(value_at(s, f"{path}.{key}"), ",.1f", 1000) for key in keys)
            for s in summaries
        )
        row(f"{name} {unit}, {' / '.join(keys)}", *cells)

    row("turns completed", *each("turns.completed", ",d"))
    row("turns/s", *each("turns_per_s", ",.2f"))
    row("output tokens/s", *each("output_tokens_per_s", ",.1f"))
    milliseconds("normalised latency", "normalised_latency_s", "mean", "p90", unit="ms/token")
    milliseconds("TTFT cold", "ttft_s.cold", "mean", "p50", "p90", "p99")
    milliseconds("TTFT warm", "ttft_s.warm", "mean", "p50", "p90", "p99")
    milliseconds("inter-token", "inter_token_s", "p50", "p99")
    for source in ("context", *SOURCES, "output"):
        row(f"tokens {source.replace('_', ' ')}", *each(f"tokens.{source}", ",d"))
    for name in dict.fromkeys(name for s in summaries for name in value_at(s, "swap") or {}):
        row(f"swap {name.replace('_', ' ')}", *each(f"swap.{name}", ",.10g"))
    if any(value_at(s, "step_s") for s in summaries):
        milliseconds("engine step", "step_s", "mean")
    for part in dict.fromkeys(part for s in summaries for part in value_at(s, "step_s.share") or {}):
        row(f"share of step time: {part}", *each(f"step_s.share.{part}", ".1%"))
    row("active conversations, mean", *each("active_sessions.mean", ",.1f"))
    row("active with TTFT p95 ≤ 2 s", *(limit_text(value_at(s, "active_sessions")) for s in summaries))
    milliseconds("client lag", "client_lag_s", "p50", "p99", "max")
    row("failed + skipped turns", *(f"{s['turns']['failed']} + {s['turns']['skipped']}" for s in summaries))
    row(
        "receipts wrong / checked",
        *(f"{s['receipts']['violations']} / {s['receipts']['checked']}" for s in summaries),
    )
    print_grid(console, title, [""], [str(summary["target"]) for summary in summaries], rows)


def _print_curves(shown: Sequence[CurveEntry], title: str, console: Console) -> None:
    rows = [
        (
            entry.system,
            entry.load,
            NOTHING if entry.seed is None else str(entry.seed),
            *(_COLUMNS[path].text(entry.summary) for path in _LINE),
            limit_text(value_at(entry.summary, "active_sessions")),
        )
        for entry in shown
    ]
    print_grid(console, title, ["system", "offered"], ["seed", *_LINE.values(), "TTFT p95 ≤ 2 s"], rows)


def _print_ratios(panel: Panel, latency_s: float | None, console: Console) -> None:
    rows = [
        (pair.ours, pair.other, *ratio_texts(pair.mean), *ratio_texts(pair.p90))
        for pair in comparisons(panel.points, latency_s)
    ]
    if rows:
        heads = ["mean ms/token", "times", "p90 ms/token", "times"]
        title = "Throughput at equal normalised latency"
        print_grid(console, title, ["system", "against"], heads, rows)


def _print_by_turn(entry: CurveEntry, console: Console) -> None:
    tokens = ("context", *SOURCES, "output")
    rows = [
        (
            str(row["turn"] + 1),
            f"{row['turns']:,d}",
            format_number(row["ttft_s"]["p50"], ",.1f", 1000),
            format_number(row["ttft_s"]["p99"], ",.1f", 1000),
            *(f"{row['tokens'][name]:,d}" for name in tokens),
        )
        for row in entry.summary["by_turn"]
    ]
    heads = ["turns", "TTFT p50 ms", "TTFT p99 ms", *(name.replace("_", " ") for name in tokens)]
    print_grid(console, f"By turn: {entry.system}, {entry.load}", ["turn"], heads, rows)


def _print_problems(summary: Mapping[str, Any], console: Console) -> None:
    for code, count in (summary.get("errors") or {}).items():
        console.print(f"{summary['target']}: {count} turns failed with {code}", style="red", markup=False)
    failed, wrong = summary.get("error_examples") or [], value_at(summary, "receipts.examples") or []
    for text in [*failed[:_EXAMPLES], *wrong[:_EXAMPLES]]:
        console.print(f"  {text}", style="red", markup=False)


def _print_warnings(report: Report, console: Console) -> None:
    for line in unsteady(entries([report])):
        console.print(line, style="red", markup=False, highlight=False)
    for reason in report.get("invalid_reasons") or []:
        console.print(f"not valid: {reason}", style="bold red", markup=False)
    for missing in report.get("unreached") or []:
        console.print(
            f"{missing.get('target')} could not be reached: {missing.get('error')}", style="red", markup=False
        )
