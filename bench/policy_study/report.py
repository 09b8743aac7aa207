"""The page of ``bench/policies.py``.

    python bench/policy_study/report.py bench/results/policies.json

makes it anew from the numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

BASELINE = "retention"
BOUND = "clairvoyant"
TITLES = {
    "sharegpt": "ShareGPT-like",
    "mooncake": "Mooncake, sessions drawn from the trace",
    "recorded": "Mooncake, as recorded",
    "gaps": "Production gaps",
    "geometric": "Where there is nothing to learn",
    "rates": "Rising rates (Figure 14 of the EuroSys paper)",
    "think": "Think time (Figure 15)",
}
FINDINGS = "policies_found.md"
"""File beside the JSON that says in words what was found: the page begins with it."""


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and from where to where the seeds go when there are several."""
    mean = format(sum(values) / len(values), form)
    return (
        mean if len(values) == 1 else f"{mean} ({format(min(values), form)} to {format(max(values), form)})"
    )


def column(rows: Sequence[Row], value: Callable[[Row], float], form: str) -> str:
    return spread([value(row) for row in rows], form)


def against(rows: Sequence[Row], others: Sequence[Row], form: str, least: float) -> str:
    """Ratio of recomputed costs, seed by seed; ``-`` where the other's is below ``least`` of the history's tokens."""
    by_seed = {row["seed"]: row for row in others}
    pairs = [(row, by_seed[row["seed"]]) for row in rows if row["seed"] in by_seed]
    if not pairs or any(other["recomputed_tokens"] <= least * other["history_tokens"] for _, other in pairs):
        return "-"
    return spread([row["recomputed_cost_s"] / other["recomputed_cost_s"] for row, other in pairs], form)


def table(rows: Sequence[Row]) -> list[str]:
    """The policies of one group below each other."""
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    lines = [
        "| policy | hit % | of it device | host % of what the device lacks | recomputed tokens % | recomputed s "
        "| against retention | times clairvoyant | TTFT warm ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy, own in by_policy.items():
        cells = [
            column(own, lambda row: 100 * row["hit_rate"], ".1f"),
            column(own, lambda row: 100 * row["device_hit_rate"], ".1f"),
            column(own, lambda row: 100 * (row["host_hit_rate"] or 0.0), ".1f"),
            column(own, lambda row: 100 * row["recomputed_tokens"] / row["history_tokens"], ".2f"),
            column(own, lambda row: row["recomputed_cost_s"], ",.1f"),
            against(own, by_policy.get(BASELINE, ()), ".3f", 0.0),
            against(own, by_policy.get(BOUND, ()), ".2f", 1e-3),
            column(own, lambda row: 1e3 * row["ttft_warm_mean_s"], ",.0f"),
        ]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return lines


def markdown(report: dict[str, Any], findings: str = "") -> str:
    """The page."""
    lines = ["# Eviction policies", "", *([findings.strip(), ""] if findings else [])]
    for part, title in TITLES.items():
        rows = [row for row in report["rows"] if row["part"] == part]
        if not rows:
            continue
        lines += [f"## {title}", "", f"`{report['commands'][part]}`", ""]
        for group in dict.fromkeys(row["group"] for row in rows):
            own = [row for row in rows if row["group"] == group]
            about = report["workloads"][group]
            offered = "recorded times" if about["rate"] is None else f"{about['rate']:g} turns/s"
            lines += [
                f"**{group}** — {offered}, {own[0]['turns']:,} turns, device {own[0]['device_tokens']:,} + host "
                f"{own[0]['host_tokens']:,} tokens per replica, {about['machine']}",
                "",
                *table(own),
                "",
            ]
    lines.append(f"Simulated with commit {report['commit']}, {report['machine']}.")
    return "\n".join(lines) + "\n"


def found_beside(file: Path) -> str:
    """The words that go with the numbers of a JSON file; empty without any."""
    words = file.with_name(FINDINGS)
    return words.read_text() if words.exists() and "quick" not in file.name else ""


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(markdown(json.loads(source.read_text()), found_beside(source)))
