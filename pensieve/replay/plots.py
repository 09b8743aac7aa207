"""Pictures of reports, drawn with matplotlib, which only the extra ``plots`` installs; it is imported when drawing."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pensieve.replay.activity import TTFT_LIMIT_S
from pensieve.replay.columns import SOURCE_NAMES
from pensieve.replay.curves import Entry, Point, Report, at, busiest, by_system, curve_points, entries
from pensieve.replay.report import SOURCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by the colour-blind, and visible on white and on black.
_COLOURS = ("#3b8bd0", "#e0662a", "#25a17f", "#c967a5", "#d3961c", "#8a7fd6", "#5fb4c4", "#a0813f")
_MARKERS = "osD^vPX*"
_SOURCE_COLOURS = {"gpu_cached": "#25a17f", "swapped_in": "#3b8bd0", "recomputed": "#e0662a", "new": "#9a9a9a"}
_INK, _FAINT = "#010203", "#040506"
"""Stand for the page's own colours of text and of thin lines in an SVG."""
_OLD_QUANTILES = (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100))

Curves = Mapping[str, Sequence[Entry]]


class PlotsMissing(click.ClickException):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'pensieve[plots]'")


def require() -> None:
    """Raises PlotsMissing; cheap, so that it can be asked before an hour of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsMissing


def write_plots(reports: Sequence[Report], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Every picture as PNG and as SVG in ``folder``, which is made. Raises PlotsMissing, OSError."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, figure in figures(reports, names).items():
        for suffix, data in (("png", _png(figure)), ("svg", _svg_text(figure, key).encode())):
            written.append(folder / f"{key}.{suffix}")
            written[-1].write_bytes(data)
    return written


def inline_svgs(reports: Sequence[Report], names: Sequence[str] = ()) -> dict[str, str]:
    """Every picture as an SVG element for a page: text in the page's colour, ids of its own. Raises PlotsMissing."""
    require()
    found = {}
    for key, figure in figures(reports, names).items():
        text = _svg_text(figure, key).replace(_INK, "currentColor").replace(_FAINT, "var(--line)")
        text = re.sub(r'\bid="', f'id="{key}-', text[text.index("<svg") :])
        text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", text)
        found[key] = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return found


def figures(reports: Sequence[Report], names: Sequence[str] = ()) -> dict[str, Figure]:
    """Name → picture; those are left out for which no entry has the numbers."""
    curves = by_system(entries(reports, names))
    points = {name: curve_points(reports, curve) for name, curve in curves.items()}
    drawn = {
        "latency": _latency(points),
        "ttft": _ttft(curves),
        "sources": _sources(curves),
        "sessions": _sessions(curves),
    }
    return {key: figure for key, figure in drawn.items() if figure is not None}


def _latency(lines: Mapping[str, Sequence[Point]]) -> Figure | None:
    heights = [point.latency_s for points in lines.values() for point in points]
    if not heights:
        return None
    figure, (axes,) = _axes(1, 7.2, 4.2)
    for index, (name, points) in enumerate(lines.items()):
        xs, ys = [point.throughput for point in points], [1000 * point.latency_s for point in points]
        if not points:
            continue
        axes.plot(xs, ys, label=_plain(name), **_look(index))
        for x, y, point in zip(xs, ys, points, strict=True):
            if point.low_s is not None and point.high_s is not None:
                axes.vlines(x, 1000 * point.low_s, 1000 * point.high_s, color=_colour(index), linewidth=1)
            if point.rate is not None and len(points) > 1:
                axes.annotate(f"{point.rate:g}", (x, y), (4, 4), textcoords="offset points",
                              fontsize=7, color=_colour(index))  # fmt: skip
    if max(heights) > 30 * min(heights) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("throughput [turns/s]")
    axes.set_ylabel("mean normalised latency [ms per output token]")
    _legend(axes)
    return figure


def _ttft(curves: Curves) -> Figure | None:
    lines = []
    for index, (name, curve) in enumerate(curves.items()):
        for kind, style in (("cold", ":"), ("warm", "-")):
            values, shares = _distribution(busiest(curve).summary, kind)
            if values:
                lines.append((index, f"{name}, {kind}", style, values, shares))
    if not lines:
        return None
    figure, (axes,) = _axes(1, 7.2, 4.2)
    for index, label, style, values, shares in lines:
        axes.plot([1000 * value for value in values], shares, color=_colour(index), linestyle=style,
                  linewidth=1.6, label=_plain(label), marker="" if len(values) > 10 else ".")  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel("time to first token [ms]")
    axes.set_ylabel("turns [%]")
    _legend(axes)
    return figure


def _sources(curves: Curves) -> Figure | None:
    shown = {n: busiest(c) for n, c in curves.items() if any(r["tokens"]["context"] for r in _rows(c))}
    if not shown:
        return None
    figure, panels = _axes(len(shown), 7.2, 2.0)
    for axes, (name, entry) in zip(panels, shown.items(), strict=True):
        rows = _rows([entry])
        numbers, base = [row["turn"] + 1 for row in rows], [0.0] * len(rows)
        for source in SOURCES:
            means = [row["tokens"][source] / row["turns"] for row in rows]
            axes.bar(numbers, means, bottom=base, width=0.8, color=_SOURCE_COLOURS[source],
                     label=SOURCE_NAMES[source])  # fmt: skip
            base = [low + mean for low, mean in zip(base, means, strict=True)]
        axes.set_title(_plain(f"{name}, {entry.load}"), fontsize=9, loc="left", color=_INK)
        axes.set_ylabel("tokens per turn")
        axes.set_xlim(0.5, max(numbers) + 0.5)
        axes.locator_params(axis="x", integer=True)
    panels[-1].set_xlabel("turn of the conversation")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=8, labelcolor=_INK)
    return figure


def _sessions(curves: Curves) -> Figure | None:
    dots = {
        name: [
            (bin_["active"], bin_["ttft_p95_s"])
            for entry in curve
            for bin_ in at(entry.summary, "active_sessions.bins") or []
            if bin_["ttft_p95_s"] is not None
        ]
        for name, curve in curves.items()
    }
    if not any(dots.values()):
        return None
    figure, (axes,) = _axes(1, 7.2, 3.6)
    for index, (name, points) in enumerate(dots.items()):
        if points:
            axes.plot([x for x, _ in points], [1000 * y for _, y in points], label=_plain(name),
                      **(_look(index) | {"linestyle": "none"}))  # fmt: skip
    axes.axhline(1000 * TTFT_LIMIT_S, color=_INK, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("active conversations, mean of a bin")
    axes.set_ylabel("TTFT p95 of the bin [ms]")
    _legend(axes)
    return figure


def _axes(panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it keeps every figure in a global list and chooses a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * panels), layout="constrained")
    found = [figure.add_subplot(panels, 1, number + 1) for number in range(panels)]
    for axes in found:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        axes.tick_params(which="both", colors=_INK, labelsize=8)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
        axes.grid(color=_FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, found


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _look(index: int) -> dict[str, Any]:
    return {
        "color": _colour(index),
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": "-" if index < len(_COLOURS) else "--",
        "markersize": 5,
        "linewidth": 1.6,
    }


def _plain(text: str) -> str:
    """As written: a dollar sign begins no formula, and an underscore in front hides nothing from the legend."""
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")


def _rows(curve: Sequence[Entry]) -> list[Mapping[str, Any]]:
    return list(busiest(curve).summary.get("by_turn") or [])


def _distribution(summary: Mapping[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Values and the percentage of turns up to each; of older reports the few percentiles that they have."""
    values = at(summary, f"ttft_quantiles_s.{kind}")
    if values:
        return [float(value) for value in values], [float(share) for share in range(len(values))]
    pairs = [(at(summary, f"ttft_s.{kind}.{key}"), share) for key, share in _OLD_QUANTILES]
    known = [(float(value), float(share)) for value, share in pairs if value is not None]
    return [value for value, _ in known], [share for _, share in known]


def _png(figure: Figure) -> bytes:
    return _rendered(figure, format="png", dpi=150, facecolor="white", metadata={"Software": None})


def _svg_text(figure: Figure, key: str) -> str:
    """Text stays text; the same figure gives the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        return _rendered(figure, format="svg", transparent=True, metadata={"Date": None}).decode()


def _rendered(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return buffer.getvalue()
