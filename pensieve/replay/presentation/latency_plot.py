"""The headline picture: normalised latency against throughput, as the figures 10 and 11 of the paper draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pensieve.replay.presentation.curves import CurvePoint
from pensieve.replay.presentation.equal_latency import comparisons
from pensieve.replay.presentation.panels import Panel
from pensieve.replay.presentation.plot_style import (
    INK,
    WIDE_IN,
    Look,
    grid,
    legend,
    looks,
    plain,
    plain_numbers,
    sample,
    title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM = 5.0
"""The picture ends at so many times the lowest latency of the slowest system: above it queues only grow."""
_LOG_FROM = 10.0
"""With systems whose lowest latencies are so many times apart, the axis is logarithmic, and nothing is cut."""

BARS_CAPTION = (
    "Every system was measured at one load, so there is no curve: bars are the mean over turns and the 90th "
    "percentile, with the throughput above. Normalised latency: time from sending a turn to its last token, per output "
    "token."
)
CAPTION = (
    "One line per system: the mean over turns, dashed the 90th percentile; bars are 95 % intervals over seeds. "
    "Normalised latency: time from sending a turn to its last token, per output token. A hollow arrow at the top is a "
    "point above the picture; a dotted line is the latency that ratios were asked for."
)


def latency_figure(panels: Sequence[Panel], latency_s: float | None = None) -> Figure | None:
    """One axes per panel; bars where no system has two points, None where there is but one, which a table tells.

    ``latency_s`` is marked by a line.
    """
    shown = [panel for panel in panels if any(panel.points.values())]
    if sum(len(points) for panel in shown for points in panel.points.values()) < 2:
        return None
    if has_bars(panels):
        return _bar_figure(panels, shown)
    figure, grid_axes = grid(len(shown), 2, WIDE_IN, 4.2 if len(shown) == 1 else 3.4)
    look = looks(panels)
    for number, (axes, panel) in enumerate(zip(grid_axes, shown, strict=True)):
        title(axes, panel.title)
        top = _top(panel.points, latency_s)
        for index, (name, points) in enumerate(panel.points.items()):
            if points:
                _draw(axes, points, look[name], f"{number}-{index}", top)
        if latency_s is not None:
            axes.axhline(1000 * latency_s, color=INK, linewidth=0.8, linestyle=":")
        _scale(axes, panel.points, top)
        axes.set_xlabel("throughput [turns/s]")
        axes.set_ylabel("normalised latency [ms/token]")
    drawn = {name for panel in shown for name, points in panel.points.items() if points}
    samples = [
        (name, sample(its.colour, its.style, its.marker)) for name, its in look.items() if name in drawn
    ]
    legend(figure, [*samples, ("mean", sample(INK)), ("90th percentile", sample(INK, "--"))])
    return figure


def has_bars(panels: Sequence[Panel]) -> bool:
    """Whether no system was measured at two loads: points without a line between them."""
    return all(len(points) < 2 for panel in panels for points in panel.points.values())


def _bar_figure(panels: Sequence[Panel], shown: Sequence[Panel]) -> Figure:
    figure, grid_axes = grid(len(shown), 2, WIDE_IN, 3.4)
    look = looks(panels)
    for number, (axes, panel) in enumerate(zip(grid_axes, shown, strict=True)):
        title(axes, panel.title)
        found = [(name, points[0]) for name, points in panel.points.items() if points]
        for at, (name, point) in enumerate(found):
            bars = [(-0.2, point.mean_s, 1.0, "mean"), (0.2, point.p90_s, 0.5, "p90")]
            for aside, seconds, alpha, what in bars:
                if seconds is not None:
                    bar = axes.bar(at + aside, 1000 * seconds, 0.38, color=look[name].colour, alpha=alpha)
                    bar[0].set_gid(f"{what}-{number}-{at}")
            high = 1000 * max(point.mean_s, point.p90_s or 0.0)
            axes.annotate(f"{point.throughput:,.2f} turns/s", (at, high), (0, 3), textcoords="offset points",
                          ha="center", fontsize=9, color=INK)  # fmt: skip
        axes.set_xticks(
            range(len(found)), [plain(f"{name}\n{point.load}") for name, point in found], wrap=True
        )
        axes.set_xlim(-0.6, len(found) - 0.4)
        axes.margins(y=0.12)
        axes.set_ylabel("normalised latency [ms/token]")
    dark, pale = sample(INK), sample(INK)
    pale.set_alpha(0.5)
    legend(figure, [("mean", dark), ("90th percentile", pale)])
    return figure


def _draw(axes: Axes, points: Sequence[CurvePoint], look: Look, key: str, top: float | None) -> None:
    """``key`` names the lines in an SVG."""
    xs, ys = [point.throughput for point in points], [1000 * point.mean_s for point in points]
    axes.plot(
        xs, ys, color=look.colour, linestyle=look.style, marker=look.marker, markersize=5.5,
        linewidth=1.8, gid=f"mean-{key}",
    )  # fmt: skip
    high = [(point.throughput, 1000 * point.p90_s) for point in points if point.p90_s is not None]
    axes.plot(
        [x for x, _ in high], [y for _, y in high], color=look.colour, linestyle="--", linewidth=1.2,
        alpha=0.75, gid=f"p90-{key}",
    )  # fmt: skip
    for x, point in zip(xs, points, strict=True):
        if point.interval_s is not None:
            low, up = point.interval_s
            axes.vlines(x, 1000 * low, 1000 * up, color=look.colour, linewidth=1)
    above = [x for x, y in zip(xs, ys, strict=True) if top is not None and y > top]
    if top is not None and above:
        axes.plot(
            above, [0.97 * top] * len(above), color=look.colour, linestyle="none", marker="^", markersize=9,
            markerfacecolor="none", markeredgewidth=1.5, gid=f"above-{key}",
        )  # fmt: skip


def _top(points: Mapping[str, Sequence[CurvePoint]], latency_s: float | None) -> float | None:
    """Latency at which the picture ends, in ms; None: it holds everything.

    Whatever latency a ratio is told at is inside.
    """
    lowest, highest = _extremes(points)
    if _logarithmic(lowest):
        return None
    levels = [pair.mean.latency_s for pair in comparisons(points) if pair.mean and pair.mean.bound == "equal"]
    top = max(_ROOM * max(lowest), *(1.2 * level for level in [*levels, latency_s or 0.0]))
    return 1000 * top if highest > top else None


def _extremes(points: Mapping[str, Sequence[CurvePoint]]) -> tuple[list[float], float]:
    """Lowest mean latency of each system, and the highest of all that is drawn."""
    lowest = [min(point.mean_s for point in found) for found in points.values() if found]
    return lowest, max(max(point.mean_s, point.p90_s or 0.0) for found in points.values() for point in found)


def _logarithmic(lowest: Sequence[float]) -> bool:
    return max(lowest) > _LOG_FROM * min(lowest) > 0


def _scale(axes: Axes, points: Mapping[str, Sequence[CurvePoint]], top: float | None) -> None:
    axes.set_xlim(left=0)
    if _logarithmic(_extremes(points)[0]):
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, top)
