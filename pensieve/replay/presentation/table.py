"""The report of a replay as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pensieve.replay.measure.report import SOURCES, at
from pensieve.replay.presentation.columns import NOTHING, SESSIONS, SPEED, limit_text, number, ratio_texts
from pensieve.replay.presentation.curves import CurveEntry, Report, busiest
from pensieve.replay.presentation.equal_latency import comparisons
from pensieve.replay.presentation.panels import Panel, panels

_EXAMPLES = 5
_SIDE_BY_SIDE = 4
_LINE = {
    "turns_per_s": "turns/s",
    "output_tokens_per_s": "tok/s",
    "normalised_latency_s.mean": "norm mean ms",
    "normalised_latency_s.p90": "norm p90 ms",
    "ttft_s.cold.p99": "cold TTFT p99 ms",
    "ttft_s.warm.p99": "warm TTFT p99 ms",
    "inter_token_s.p99": "inter-token p99 ms",
    "active_sessions.mean": "active",
}
"""What is told of a run in a sweep, and its short name."""
_COLUMNS = {column.path: column for column in (*SPEED, *SESSIONS)}


def show(report: dict[str, Any], console: Console) -> None:
    """What was measured, tokens by source per turn number, then what went wrong.

    A few targets stand side by side; the runs of a sweep are a line each, and only the fullest run of each system tells
    of its turns.
    """
    (panel,) = panels([report])
    found = panel.entries
    if len(found) <= _SIDE_BY_SIDE and len({entry.load for entry in found}) == 1:
        console.print(_overview(report["targets"], _workload_line(report)))
        detailed = found
    else:
        console.print(_curves(found, _workload_line(report)))
        _ratios(panel, None, console)
        detailed = [busiest(curve) for curve in panel.curves.values()]
    for entry in detailed:
        if entry.summary["receipts"]["checked"]:
            console.print(_by_turn(entry))
    for summary in report["targets"]:
        _problems(summary, console)
    _warnings(report, console)


def show_curves(
    reports: Sequence[Report], names: Sequence[str], console: Console, latency_s: float | None = None
) -> None:
    """All runs of several reports, a line each; how the systems compare; what went wrong.

    ``latency_s``: of the ratios of throughputs; None: chosen for each pair of systems.
    """
    for panel in panels(reports, names):
        told = names[0] if len(reports) == 1 else f"{len(reports)} reports"
        console.print(_curves(panel.entries, panel.title or told))
        _ratios(panel, latency_s, console)
    for report in reports:
        for summary in report["targets"]:
            _problems(summary, console)
        _warnings(report, console)


def _workload_line(report: dict[str, Any]) -> str:
    work = report["workload"]
    line = f"{work['conversations']} conversations, {work['turns']} turns of {report['dataset']['name']}"
    if work["cut_conversations"] or work["dropped_conversations"]:
        line += (
            f"; {work['cut_conversations']} cut and {work['dropped_conversations']} left out "
            f"to fit {work['context_limit']} tokens"
        )
    return line


def _overview(summaries: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(Text(summary["target"]), justify="right", overflow="fold")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def each(path: str, digits: str) -> list[str]:
        return [number(at(summary, path), digits) for summary in summaries]

    def milliseconds(name: str, path: str, *keys: str) -> None:
        cells = (" / ".join(number(at(s, f"{path}.{key}"), ",.1f", 1000) for key in keys) for s in summaries)
        row(f"{name} ms, {' / '.join(keys)}", *cells)

    row("turns completed", *each("turns.completed", ",d"))
    row("turns/s", *each("turns_per_s", ",.2f"))
    row("output tokens/s", *each("output_tokens_per_s", ",.1f"))
    milliseconds("normalised latency", "normalised_latency_s", "mean", "p90")
    milliseconds("TTFT cold", "ttft_s.cold", "mean", "p50", "p90", "p99")
    milliseconds("TTFT warm", "ttft_s.warm", "mean", "p50", "p90", "p99")
    milliseconds("inter-token", "inter_token_s", "p50", "p99")
    for source in ("context", *SOURCES, "output"):
        row(f"tokens {source.replace('_', ' ')}", *each(f"tokens.{source}", ",d"))
    for name in dict.fromkeys(name for s in summaries for name in at(s, "swap") or {}):
        row(f"swap {name.replace('_', ' ')}", *each(f"swap.{name}", ",.10g"))
    if any(at(s, "step_s") for s in summaries):
        milliseconds("engine step", "step_s", "mean")
    for part in dict.fromkeys(part for s in summaries for part in at(s, "step_s.share") or {}):
        row(f"share of step time: {part}", *each(f"step_s.share.{part}", ".1%"))
    row("active conversations, mean", *each("active_sessions.mean", ",.1f"))
    row("active with TTFT p95 ≤ 2 s", *(limit_text(at(s, "active_sessions")) for s in summaries))
    milliseconds("client lag", "client_lag_s", "p50", "p99", "max")
    row("failed + skipped turns", *(f"{s['turns']['failed']} + {s['turns']['skipped']}" for s in summaries))
    row(
        "receipts wrong / checked",
        *(f"{s['receipts']['violations']} / {s['receipts']['checked']}" for s in summaries),
    )
    return table


def _curves(found: Sequence[CurveEntry], title: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("system", overflow="fold", min_width=24)
    for name in ("offered", "seed", *_LINE.values(), "TTFT p95 ≤ 2 s"):
        table.add_column(name, justify="right", overflow="fold")
    for entry in found:
        seed = NOTHING if entry.seed is None else str(entry.seed)
        cells = (_COLUMNS[path].text(entry.summary) for path in _LINE)
        within = limit_text(at(entry.summary, "active_sessions"))
        table.add_row(Text(entry.system), entry.load, seed, *cells, within)
    return table


def _ratios(panel: Panel, latency_s: float | None, console: Console) -> None:
    pairs = comparisons(panel.points, latency_s)
    if not pairs:
        return
    table = Table(title="Throughput at equal normalised latency", title_justify="left")
    for name in ("system", "against"):
        table.add_column(name, overflow="fold", min_width=20)
    for name in ("mean ms", "times", "p90 ms", "times"):
        table.add_column(name, justify="right")
    for pair in pairs:
        table.add_row(Text(pair.ours), Text(pair.other), *ratio_texts(pair.mean), *ratio_texts(pair.p90))
    console.print(table)


def _by_turn(entry: CurveEntry) -> Table:
    table = Table(title=Text(f"By turn: {entry.system}, {entry.load}"), title_justify="left")
    heads = ("turn", "turns", "TTFT p50 ms", "TTFT p99 ms", "context")
    for name in (*heads, *(source.replace("_", " ") for source in SOURCES), "output"):
        table.add_column(name, justify="right", overflow="fold")
    for row in entry.summary["by_turn"]:
        tokens = row["tokens"]
        table.add_row(
            str(row["turn"] + 1),
            f"{row['turns']:,d}",
            number(row["ttft_s"]["p50"], ",.1f", 1000),
            number(row["ttft_s"]["p99"], ",.1f", 1000),
            *(f"{tokens[name]:,d}" for name in ("context", *SOURCES, "output")),
        )
    return table


def _problems(summary: Mapping[str, Any], console: Console) -> None:
    for code, count in (summary.get("errors") or {}).items():
        console.print(f"{summary['target']}: {count} turns failed with {code}", style="red", markup=False)
    failed, wrong = summary.get("error_examples") or [], at(summary, "receipts.examples") or []
    for text in [*failed[:_EXAMPLES], *wrong[:_EXAMPLES]]:
        console.print(f"  {text}", style="red", markup=False)


def _warnings(report: Report, console: Console) -> None:
    for reason in report.get("invalid_reasons") or []:
        console.print(f"not valid: {reason}", style="bold red", markup=False)
    for missing in report.get("unreached") or []:
        console.print(
            f"{missing.get('target')} could not be reached: {missing.get('error')}", style="red", markup=False
        )
