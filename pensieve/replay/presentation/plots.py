"""Plots of reports. matplotlib, which only the extra ``plots`` installs, is imported when drawing.

The main plot is normalised latency against throughput, as in figures 10 and 11 of the paper.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pensieve.replay.measure import SOURCES, TTFT_LIMIT_S, value_at
from pensieve.replay.presentation.curves import (
    CurveEntry,
    CurvePoint,
    Panel,
    Report,
    busiest,
    comparisons,
    panels,
)
from pensieve.replay.presentation.table import SOURCE_NAMES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, FAINT = "#010203", "#d8dcdf"
"""Colours of text and thin lines. Nothing else has them, so that a page can replace them by its own."""
WIDTH_IN, WIDE_IN = 6.2, 10.0
"""Widths of plots that are two in a row on a page, and of those that take a whole row."""
LineStyle = Literal["-", "--", "-.", ":"]
_LETTERS_PER_IN = 14

# Distinguishable by the colour-blind, and visible on white and on black.
_COLOURS = ("#3b8bd0", "#e0662a", "#25a17f", "#c967a5", "#d3961c", "#8a7fd6", "#5fb4c4", "#a0813f")
_MARKERS = "osD^vPX*"
_AXIS_FACTOR = 5.0
"""Maximum of the latency axis, in multiples of the slowest system's lowest latency: above it queues only grow."""
_LOG_AXIS_FACTOR = 10.0
"""If the lowest latencies of systems differ by this factor, the axis is logarithmic and nothing is cut."""
BARS_CAPTION = (
    "Every system was measured at one load, so there is no curve: bars are the mean over turns and the 90th "
    "percentile, with the throughput above. Normalised latency: time from sending a turn to its last token, per output "
    "token."
)
CAPTION = (
    "One line per system: the mean over turns, dashed the 90th percentile; bars are 95 % intervals over seeds. "
    "Normalised latency: time from sending a turn to its last token, per output token. A hollow arrow at the top is a "
    "point above the plot; a dotted line is the latency at which ratios were requested."
)
_SOURCE_COLOURS = {
    "gpu_cached": "#25a17f",
    "swapped_in": "#3b8bd0",
    "recomputed": "#e0662a",
    "new": "#9a9a9a",
}
_TTFT_STYLES: Mapping[str, LineStyle] = {"cold": ":", "warm": "-"}
_OLD_QUANTILES = (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100))


@dataclass(frozen=True, slots=True)
class PlotStyle:
    colour: str
    marker: str
    style: LineStyle


def style_for(number: int) -> PlotStyle:
    style: LineStyle = "-" if number < len(_COLOURS) else "-."
    return PlotStyle(_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)], style)


def plot_styles(panels: Sequence[Panel]) -> dict[str, PlotStyle]:
    """System → style, in order of the first appearance of systems."""
    names = dict.fromkeys(name for panel in panels for name in panel.curves)
    return {name: style_for(number) for number, name in enumerate(names)}


def grid(count: int, columns: int, width_in: float, height_in: float) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, row by row, each row ``height_in`` high."""
    # Not pyplot: it keeps every figure in a global list and chooses a window system.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(width_in, height_in * rows), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    )
    found = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for axes in found:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(which="both", colors=INK, labelsize=9)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, found


def title(axes: Axes, text: str) -> None:
    if text:
        axes.set_title(plain(text), fontsize=9, loc="left", color=INK, wrap=True)


def plain_numbers(axis: Axis) -> None:
    """Write 200 on a logarithmic axis, not 2 × 10²."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def sample(colour: str, style: LineStyle | Literal["none"] = "-", marker: str = "") -> Artist:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, marker=marker, linewidth=1.8, markersize=5.5)


def legend(figure: Figure, samples: Sequence[tuple[str, Artist]]) -> None:
    labels = [plain(label) for label, _ in samples]
    longest = 4 + max(map(len, labels))
    columns = max(1, min(len(labels), int(_LETTERS_PER_IN * figure.get_figwidth() // longest)))
    figure.legend(
        [handle for _, handle in samples], labels, loc="outside upper left", ncols=columns, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip


def plain(text: str) -> str:
    """Escape ``text`` so that matplotlib shows it as written.

    A dollar sign would begin a formula, and a leading underscore would hide a label from the legend.
    """
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")


def latency_figure(panels: Sequence[Panel], latency_s: float | None = None) -> Figure | None:
    """One axes per panel; bars if no system has two points. None for a single point, which a table shows."""
    shown = [panel for panel in panels if any(panel.points.values())]
    if sum(len(points) for panel in shown for points in panel.points.values()) < 2:
        return None
    if has_bars(panels):
        return _bar_figure(panels, shown)
    figure, grid_axes = grid(len(shown), 2, WIDE_IN, 4.2 if len(shown) == 1 else 3.4)
    styles = plot_styles(panels)
    for number, (axes, panel) in enumerate(zip(grid_axes, shown, strict=True)):
        title(axes, panel.title)
        top = _top(panel.points, latency_s)
        for index, (name, points) in enumerate(panel.points.items()):
            if points:
                _draw(axes, points, styles[name], f"{number}-{index}", top)
        if latency_s is not None:
            axes.axhline(1000 * latency_s, color=INK, linewidth=0.8, linestyle=":")
        _scale(axes, panel.points, top)
        axes.set_xlabel("throughput [turns/s]")
        axes.set_ylabel("normalised latency [ms/token]")
    drawn = {name for panel in shown for name, points in panel.points.items() if points}
    samples = [
        (name, sample(style.colour, style.style, style.marker))
        for name, style in styles.items()
        if name in drawn
    ]
    legend(figure, [*samples, ("mean", sample(INK)), ("90th percentile", sample(INK, "--"))])
    return figure


def has_bars(panels: Sequence[Panel]) -> bool:
    return all(len(points) < 2 for panel in panels for points in panel.points.values())


def _bar_figure(panels: Sequence[Panel], shown: Sequence[Panel]) -> Figure:
    figure, grid_axes = grid(len(shown), 2, WIDE_IN, 3.4)
    styles = plot_styles(panels)
    for number, (axes, panel) in enumerate(zip(grid_axes, shown, strict=True)):
        title(axes, panel.title)
        found = [(name, points[0]) for name, points in panel.points.items() if points]
        for place, (name, point) in enumerate(found):
            bars = [(-0.2, point.mean_s, 1.0, "mean"), (0.2, point.p90_s, 0.5, "p90")]
            for offset, seconds, alpha, metric in bars:
                if seconds is not None:
                    bar = axes.bar(
                        place + offset, 1000 * seconds, 0.38, color=styles[name].colour, alpha=alpha
                    )
                    bar[0].set_gid(f"{metric}-{number}-{place}")
            high = 1000 * max(point.mean_s, point.p90_s or 0.0)
            axes.annotate(f"{point.throughput:,.2f} turns/s", (place, high), (0, 3), textcoords="offset points",
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


def _draw(axes: Axes, points: Sequence[CurvePoint], style: PlotStyle, key: str, top: float | None) -> None:
    """Draw a curve; ``key`` names its lines in an SVG."""
    xs, ys = [point.throughput for point in points], [1000 * point.mean_s for point in points]
    axes.plot(
        xs, ys, color=style.colour, linestyle=style.style, marker=style.marker, markersize=5.5,
        linewidth=1.8, gid=f"mean-{key}",
    )  # fmt: skip
    high = [(point.throughput, 1000 * point.p90_s) for point in points if point.p90_s is not None]
    axes.plot(
        [x for x, _ in high], [y for _, y in high], color=style.colour, linestyle="--", linewidth=1.2,
        alpha=0.75, gid=f"p90-{key}",
    )  # fmt: skip
    for x, point in zip(xs, points, strict=True):
        if point.interval_s is not None:
            low, up = point.interval_s
            axes.vlines(x, 1000 * low, 1000 * up, color=style.colour, linewidth=1)
    above = [x for x, y in zip(xs, ys, strict=True) if top is not None and y > top]
    if top is not None and above:
        axes.plot(
            above, [0.97 * top] * len(above), color=style.colour, linestyle="none", marker="^", markersize=9,
            markerfacecolor="none", markeredgewidth=1.5, gid=f"above-{key}",
        )  # fmt: skip


def _top(points: Mapping[str, Sequence[CurvePoint]], latency_s: float | None) -> float | None:
    """Upper end of the latency axis in ms; None: it shows everything. The latencies of ratios are always inside."""
    lowest, highest = _extremes(points)
    if _logarithmic(lowest):
        return None
    levels = [pair.mean.latency_s for pair in comparisons(points) if pair.mean and pair.mean.bound == "equal"]
    top = max(_AXIS_FACTOR * max(lowest), *(1.2 * level for level in [*levels, latency_s or 0.0]))
    return 1000 * top if highest > top else None


def _extremes(points: Mapping[str, Sequence[CurvePoint]]) -> tuple[list[float], float]:
    """Lowest mean latency of each system, and the highest latency of all that is drawn."""
    lowest = [min(point.mean_s for point in found) for found in points.values() if found]
    return lowest, max(max(point.mean_s, point.p90_s or 0.0) for found in points.values() for point in found)


def _logarithmic(lowest: Sequence[float]) -> bool:
    return max(lowest) > _LOG_AXIS_FACTOR * min(lowest) > 0


def _scale(axes: Axes, points: Mapping[str, Sequence[CurvePoint]], top: float | None) -> None:
    axes.set_xlim(left=0)
    if _logarithmic(_extremes(points)[0]):
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, top)


class PlotsMissing(click.ClickException):
    exit_code = 2

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'pensieve[plots]'")


def require() -> None:
    """Raise PlotsMissing if matplotlib is missing; cheap, to be called before an hour of measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsMissing


def write_plots(
    reports: Sequence[Report], folder: Path, names: Sequence[str] = (), latency_s: float | None = None
) -> list[Path]:
    """Write every plot as PNG and SVG to ``folder``, which is created. Raises PlotsMissing, OSError."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, figure in figures(panels(reports, names), latency_s).items():
        png = _rendered(figure, format="png", dpi=150, facecolor="white", metadata={"Software": None})
        for suffix, data in (("png", png), ("svg", _svg_text(figure, key).encode())):
            written.append(folder / f"{key}.{suffix}")
            written[-1].write_bytes(data)
    return written


def inline_svgs(shown: Sequence[Panel], latency_s: float | None = None) -> dict[str, str]:
    """Every plot as an SVG element for a page: text in the page's colour, unique ids. Raises PlotsMissing."""
    require()
    found = {}
    for key, figure in figures(shown, latency_s).items():
        text = _svg_text(figure, key).replace(INK, "currentColor").replace(FAINT, "var(--line)")
        text = re.sub(r'\bid="', f'id="{key}-', text[text.index("<svg") :])
        text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", text)
        found[key] = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return found


def figures(shown: Sequence[Panel], latency_s: float | None = None) -> dict[str, Figure]:
    drawn = {
        "latency": latency_figure(shown, latency_s),
        "ttft": _ttft(shown),
        "sources": _sources(shown),
        "sessions": _sessions(shown),
    }
    return {key: figure for key, figure in drawn.items() if figure is not None}


def _ttft(shown: Sequence[Panel]) -> Figure | None:
    with_data = [panel for panel in shown if any(_distributions(curve) for curve in panel.curves.values())]
    if not with_data:
        return None
    figure, grid_axes = grid(len(with_data), 1, WIDTH_IN, 3.8)
    styles = plot_styles(shown)
    drawn = set()
    for axes, panel in zip(grid_axes, with_data, strict=True):
        title(axes, panel.title)
        for name, curve in panel.curves.items():
            for style, values, shares in _distributions(curve):
                drawn.add(name)
                axes.plot([1000 * value for value in values], shares, color=styles[name].colour, linestyle=style,
                          linewidth=1.8, marker="" if len(values) > 10 else ".")  # fmt: skip
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.set_ylim(0, 100)
        axes.set_xlabel("time to first token [ms]")
        axes.set_ylabel("turns [%]")
    systems = [(name, sample(style.colour)) for name, style in styles.items() if name in drawn]
    legend(figure, [*systems, *((kind, sample(INK, style)) for kind, style in _TTFT_STYLES.items())])
    return figure


def _distributions(curve: Sequence[CurveEntry]) -> list[tuple[LineStyle, list[float], list[float]]]:
    found = ((style, *_distribution(busiest(curve).summary, kind)) for kind, style in _TTFT_STYLES.items())
    return [drawn for drawn in found if drawn[1]]


def _sources(shown: Sequence[Panel]) -> Figure | None:
    with_data = [
        (f"{name}, {busiest(curve).load}\n{panel.title}".rstrip(), _rows(curve))
        for panel in shown
        for name, curve in panel.curves.items()
        if any(row["tokens"]["context"] for row in _rows(curve))
    ]
    if not with_data:
        return None
    figure, grid_axes = grid(len(with_data), 2, WIDE_IN, 1.9)
    for axes, (text, rows) in zip(grid_axes, with_data, strict=True):
        numbers, base = [row["turn"] + 1 for row in rows], [0.0] * len(rows)
        for source in SOURCES:
            means = [row["tokens"][source] / row["turns"] for row in rows]
            axes.bar(numbers, means, bottom=base, width=0.8, color=_SOURCE_COLOURS[source],
                     label=SOURCE_NAMES[source])  # fmt: skip
            base = [low + mean for low, mean in zip(base, means, strict=True)]
        title(axes, text)
        axes.set_ylabel("tokens per turn")
        axes.set_xlim(0.5, max(numbers) + 0.5)
        axes.locator_params(axis="x", integer=True)
    for axes in grid_axes[-2:]:
        axes.set_xlabel("turn of the conversation")
    handles, labels = grid_axes[0].get_legend_handles_labels()
    legend(figure, list(zip(labels, handles, strict=True)))
    return figure


def _sessions(shown: Sequence[Panel]) -> Figure | None:
    with_data = [panel for panel in shown if any(map(_bins, panel.curves.values()))]
    if sum(len(_bins(curve)) for panel in with_data for curve in panel.curves.values()) < 2:
        return None  # a table shows a single dot
    figure, grid_axes = grid(len(with_data), 1, WIDTH_IN, 3.2)
    styles = plot_styles(shown)
    drawn = set()
    for axes, panel in zip(grid_axes, with_data, strict=True):
        title(axes, panel.title)
        for name, curve in panel.curves.items():
            if dots := _bins(curve):
                drawn.add(name)
                axes.plot(
                    [x for x, _ in dots], [1000 * y for _, y in dots], color=styles[name].colour,
                    marker=styles[name].marker, linestyle="none", markersize=5.5,
                )  # fmt: skip
        axes.axhline(1000 * TTFT_LIMIT_S, color=INK, linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_xlim(left=0)
        axes.set_xlabel("active conversations, mean of a bin")
        axes.set_ylabel("TTFT p95 of the bin [ms]")
    legend(
        figure,
        [
            (name, sample(style.colour, "none", style.marker))
            for name, style in styles.items()
            if name in drawn
        ],
    )
    return figure


def _bins(curve: Sequence[CurveEntry]) -> list[tuple[float, float]]:
    """(active conversations, p95 of the time to first token in seconds) of all loads."""
    return [
        (bin_["active"], bin_["ttft_p95_s"])
        for entry in curve
        for bin_ in value_at(entry.summary, "active_sessions.bins") or []
        if bin_["ttft_p95_s"] is not None
    ]


def _rows(curve: Sequence[CurveEntry]) -> list[Mapping[str, Any]]:
    return list(busiest(curve).summary.get("by_turn") or [])


def _distribution(summary: Mapping[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Values and the percentage of turns up to each; older reports only have a few percentiles."""
    values = value_at(summary, f"ttft_quantiles_s.{kind}")
    if values:
        return [float(value) for value in values], [float(share) for share in range(len(values))]
    pairs = [(value_at(summary, f"ttft_s.{kind}.{key}"), share) for key, share in _OLD_QUANTILES]
    known = [(float(value), float(share)) for value, share in pairs if value is not None]
    return [value for value, _ in known], [share for _, share in known]


def _svg_text(figure: Figure, key: str) -> str:
    """Render an SVG with text as text; the same figure gives the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        return _rendered(figure, format="svg", transparent=True, metadata={"Date": None}).decode()


def _rendered(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return buffer.getvalue()
