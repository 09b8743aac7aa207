"""The picture of ``bench/policies.py``: what each policy recomputes at rising rates and think times.

    python bench/policy_study/plot.py bench/results/policies.json

Figures 14 and 15 of the EuroSys paper plot latency against throughput; a simulated cache has its own measure, the share
of the history that was recomputed, which is what their differences come from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from pensieve.replay.presentation.plot_style import WIDE_IN, grid, legend, look, plain_numbers, sample, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]
PARTS: Final = {
    "rates": ("Figure 14: rising rates", "turns/s offered", "rate"),
    "think": ("Figure 15: think time", "mean think time [s]", "think_s"),
}
"""Part → title, name of its x axis, and field of the workload that it shows."""


def lines(report: Mapping[str, Any], part: str, field: str) -> dict[str, Points]:
    """Policy → (x, per cent of history recomputed), mean over the seeds that all policies have, in ascending x."""
    rows = [row for row in report["rows"] if row["part"] == part]
    policies = {row["policy"] for row in rows}
    seeds = set.intersection(*({row["seed"] for row in rows if row["policy"] == name} for name in policies))
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["seed"] in seeds:
            x = float(report["workloads"][row["group"]][field])
            share = 100 * row["recomputed_tokens"] / row["history_tokens"]
            found.setdefault(row["policy"], {}).setdefault(x, []).append(share)
    return {policy: sorted((x, mean(shares)) for x, shares in own.items()) for policy, own in found.items()}


def draw(report: Mapping[str, Any]) -> Figure:
    """Both parts side by side."""
    figure, axes_ = grid(len(PARTS), 2, WIDE_IN, 3.6)
    policies = list(dict.fromkeys(row["policy"] for row in report["rows"]))
    own = {policy: look(number) for number, policy in enumerate(policies)}
    for axes, (part, (name, x_name, field)) in zip(axes_, PARTS.items(), strict=True):
        for policy, points in lines(report, part, field).items():
            style = own[policy]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=style.colour, marker=style.marker, markersize=4, linewidth=1.4)
        title(axes, name)
        axes.set_xlabel(x_name, fontsize=9)
        axes.set_ylabel("history recomputed [%]", fontsize=9)
        axes.set_ylim(bottom=0)
        if part == "think":
            axes.set_xscale("log")
            plain_numbers(axes.xaxis)
    legend(figure, [(policy, sample(style.colour, "-", style.marker)) for policy, style in own.items()])
    return figure


def main(arguments: Sequence[str]) -> None:
    source = Path(arguments[0])
    draw(json.loads(source.read_text(encoding="utf-8"))).savefig(source.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
