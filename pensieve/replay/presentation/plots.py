"""Pictures of reports, drawn with matplotlib, which only the extra ``plots`` installs; it is imported when drawing."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pensieve.replay.measure.activity import TTFT_LIMIT_S
from pensieve.replay.measure.report import SOURCES, at
from pensieve.replay.presentation.columns import SOURCE_NAMES
from pensieve.replay.presentation.curves import CurveEntry, Report, busiest
from pensieve.replay.presentation.latency_plot import latency_figure
from pensieve.replay.presentation.panels import Panel, panels
from pensieve.replay.presentation.plot_style import (
    FAINT,
    INK,
    WIDE_IN,
    WIDTH_IN,
    LineStyle,
    grid,
    legend,
    looks,
    plain_numbers,
    sample,
    title,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOURCE_COLOURS = {
    "gpu_cached": "#25a17f",
    "swapped_in": "#3b8bd0",
    "recomputed": "#e0662a",
    "new": "#9a9a9a",
}
_TTFT_STYLES: Mapping[str, LineStyle] = {"cold": ":", "warm": "-"}
_OLD_QUANTILES = (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100))


class PlotsMissing(click.ClickException):
    """matplotlib is not installed."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'pensieve[plots]'")


def require() -> None:
    """Raises PlotsMissing; cheap, so that it can be asked before an hour of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsMissing


def write_plots(
    reports: Sequence[Report], folder: Path, names: Sequence[str] = (), latency_s: float | None = None
) -> list[Path]:
    """Every picture as PNG and as SVG in ``folder``, which is made. Raises PlotsMissing, OSError."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, figure in figures(panels(reports, names), latency_s).items():
        for suffix, data in (("png", _png(figure)), ("svg", _svg_text(figure, key).encode())):
            written.append(folder / f"{key}.{suffix}")
            written[-1].write_bytes(data)
    return written


def inline_svgs(shown: Sequence[Panel], latency_s: float | None = None) -> dict[str, str]:
    """Every picture as an SVG element for a page: text in the page's colour, ids of its own. Raises PlotsMissing."""
    require()
    found = {}
    for key, figure in figures(shown, latency_s).items():
        text = _svg_text(figure, key).replace(INK, "currentColor").replace(FAINT, "var(--line)")
        text = re.sub(r'\bid="', f'id="{key}-', text[text.index("<svg") :])
        text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", text)
        found[key] = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return found


def figures(shown: Sequence[Panel], latency_s: float | None = None) -> dict[str, Figure]:
    """Name → picture; those are left out for which no entry has the numbers."""
    drawn = {
        "latency": latency_figure(shown, latency_s),
        "ttft": _ttft(shown),
        "sources": _sources(shown),
        "sessions": _sessions(shown),
    }
    return {key: figure for key, figure in drawn.items() if figure is not None}


def _ttft(shown: Sequence[Panel]) -> Figure | None:
    told = [panel for panel in shown if any(_distributions(curve) for curve in panel.curves.values())]
    if not told:
        return None
    figure, axes_ = grid(len(told), 1, WIDTH_IN, 3.8)
    look = looks(shown)
    drawn = set()
    for axes, panel in zip(axes_, told, strict=True):
        title(axes, panel.title)
        for name, curve in panel.curves.items():
            for style, values, shares in _distributions(curve):
                drawn.add(name)
                axes.plot([1000 * value for value in values], shares, color=look[name].colour, linestyle=style,
                          linewidth=1.8, marker="" if len(values) > 10 else ".")  # fmt: skip
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.set_ylim(0, 100)
        axes.set_xlabel("time to first token [ms]")
        axes.set_ylabel("turns [%]")
    systems = [(name, sample(its.colour)) for name, its in look.items() if name in drawn]
    legend(figure, [*systems, *((kind, sample(INK, style)) for kind, style in _TTFT_STYLES.items())])
    return figure


def _distributions(curve: Sequence[CurveEntry]) -> list[tuple[LineStyle, list[float], list[float]]]:
    """Line style, values and shares of cold and of warm turns at the highest load."""
    found = ((style, *_distribution(busiest(curve).summary, kind)) for kind, style in _TTFT_STYLES.items())
    return [drawn for drawn in found if drawn[1]]


def _sources(shown: Sequence[Panel]) -> Figure | None:
    told = [
        (f"{name}, {busiest(curve).load}\n{panel.title}".rstrip(), _rows(curve))
        for panel in shown
        for name, curve in panel.curves.items()
        if any(row["tokens"]["context"] for row in _rows(curve))
    ]
    if not told:
        return None
    figure, axes_ = grid(len(told), 2, WIDE_IN, 1.9)
    for axes, (text, rows) in zip(axes_, told, strict=True):
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
    for axes in axes_[-2:]:
        axes.set_xlabel("turn of the conversation")
    handles, labels = axes_[0].get_legend_handles_labels()
    legend(figure, list(zip(labels, handles, strict=True)))
    return figure


def _sessions(shown: Sequence[Panel]) -> Figure | None:
    told = [panel for panel in shown if any(map(_bins, panel.curves.values()))]
    if sum(len(_bins(curve)) for panel in told for curve in panel.curves.values()) < 2:
        return None  # a table tells of one dot
    figure, axes_ = grid(len(told), 1, WIDTH_IN, 3.2)
    look = looks(shown)
    drawn = set()
    for axes, panel in zip(axes_, told, strict=True):
        title(axes, panel.title)
        for name, curve in panel.curves.items():
            if dots := _bins(curve):
                drawn.add(name)
                axes.plot(
                    [x for x, _ in dots], [1000 * y for _, y in dots], color=look[name].colour,
                    marker=look[name].marker, linestyle="none", markersize=5.5,
                )  # fmt: skip
        axes.axhline(1000 * TTFT_LIMIT_S, color=INK, linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_xlim(left=0)
        axes.set_xlabel("active conversations, mean of a bin")
        axes.set_ylabel("TTFT p95 of the bin [ms]")
    legend(
        figure,
        [(name, sample(its.colour, "none", its.marker)) for name, its in look.items() if name in drawn],
    )
    return figure


def _bins(curve: Sequence[CurveEntry]) -> list[tuple[float, float]]:
    """(active conversations, p95 of the time to first token in seconds) of all loads."""
    return [
        (bin_["active"], bin_["ttft_p95_s"])
        for entry in curve
        for bin_ in at(entry.summary, "active_sessions.bins") or []
        if bin_["ttft_p95_s"] is not None
    ]


def _rows(curve: Sequence[CurveEntry]) -> list[Mapping[str, Any]]:
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
