"""The report of a replay as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pensieve.replay.report import SOURCES

_EXAMPLES = 5


def show(report: dict[str, Any], console: Console) -> None:
    """All targets side by side, then tokens by source per turn number, then what went wrong."""
    console.print(_overview(report["targets"], _workload_line(report)))
    for summary in report["targets"]:
        if summary["receipts"]["checked"]:
            console.print(_by_turn(summary))
        _problems(summary, console)


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
        table.add_column(summary["target"], justify="right", overflow="fold")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def each(path: str, digits: str) -> list[str]:
        return [_number(_at(summary, path), digits) for summary in summaries]

    def milliseconds(name: str, path: str, *keys: str) -> None:
        cells = (
            " / ".join(_number(_at(s, f"{path}.{key}"), ",.1f", 1000) for key in keys) for s in summaries
        )
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
    milliseconds("client lag", "client_lag_s", "p50", "p99", "max")
    row("failed + skipped turns", *(f"{s['turns']['failed']} + {s['turns']['skipped']}" for s in summaries))
    row(
        "receipts wrong / checked",
        *(f"{s['receipts']['violations']} / {s['receipts']['checked']}" for s in summaries),
    )
    return table


def _by_turn(summary: dict[str, Any]) -> Table:
    table = Table(title=f"By turn: {summary['target']}", title_justify="left")
    heads = ("turn", "turns", "TTFT p50 ms", "TTFT p99 ms", "context")
    for name in (*heads, *(source.replace("_", " ") for source in SOURCES), "output"):
        table.add_column(name, justify="right", overflow="fold")
    for row in summary["by_turn"]:
        tokens = row["tokens"]
        table.add_row(
            str(row["turn"] + 1),
            f"{row['turns']:,d}",
            _number(row["ttft_s"]["p50"], ",.1f", 1000),
            _number(row["ttft_s"]["p99"], ",.1f", 1000),
            *(f"{tokens[name]:,d}" for name in ("context", *SOURCES, "output")),
        )
    return table


def _problems(summary: dict[str, Any], console: Console) -> None:
    for code, count in summary["errors"].items():
        console.print(f"{summary['target']}: {count} turns failed with {code}", style="red", markup=False)
    for text in [*summary["error_examples"][:_EXAMPLES], *summary["receipts"]["examples"][:_EXAMPLES]]:
        console.print(f"  {text}", style="red", markup=False)


def _at(summary: dict[str, Any], path: str) -> Any:
    value: Any = summary
    for key in path.split("."):
        value = value[key]
    return value


def _number(value: float | int | None, digits: str, factor: float = 1) -> str:
    return "–" if value is None else format(value * factor, digits)
