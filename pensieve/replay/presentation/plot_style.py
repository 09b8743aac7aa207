"""How pictures look: colours, axes, legends. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pensieve.replay.presentation.panels import Panel

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, FAINT = "#010203", "#d8dcdf"
"""Of text and of thin lines; nothing else has them, so that a page can put its own in their place."""
WIDTH_IN, WIDE_IN = 6.2, 10.0
"""Of pictures that stand two in a row on a page, and of those that take a row."""
LineStyle = Literal["-", "--", "-.", ":"]
_LETTERS_PER_IN = 14
"""Of a legend."""

# Told apart by the colour-blind, and visible on white and on black.
_COLOURS = ("#3b8bd0", "#e0662a", "#25a17f", "#c967a5", "#d3961c", "#8a7fd6", "#5fb4c4", "#a0813f")
_MARKERS = "osD^vPX*"


@dataclass(frozen=True, slots=True)
class Look:
    """Of one system, in all pictures and panels."""

    colour: str
    marker: str
    style: LineStyle
    """Another where colours are used a second time."""


def look(number: int) -> Look:
    """Of the system with this number, from 0."""
    style: LineStyle = "-" if number < len(_COLOURS) else "-."
    return Look(_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)], style)


def looks(panels: Sequence[Panel]) -> dict[str, Look]:
    """System → look, in the order of first appearance."""
    names = dict.fromkeys(name for panel in panels for name in panel.curves)
    return {name: look(number) for number, name in enumerate(names)}


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
    """Above the axes; nothing for no text."""
    if text:
        axes.set_title(plain(text), fontsize=9, loc="left", color=INK, wrap=True)


def plain_numbers(axis: Axis) -> None:
    """On a logarithmic axis: 200, not 2 × 10²."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def sample(colour: str, style: LineStyle | Literal["none"] = "-", marker: str = "") -> Artist:
    """For a legend: what a line looks like."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, marker=marker, linewidth=1.8, markersize=5.5)


def legend(figure: Figure, samples: Sequence[tuple[str, Artist]]) -> None:
    """Above everything, in as many columns as fit: never over a curve."""
    labels = [plain(label) for label, _ in samples]
    longest = 4 + max(map(len, labels))
    columns = max(1, min(len(labels), int(_LETTERS_PER_IN * figure.get_figwidth() // longest)))
    figure.legend(
        [handle for _, handle in samples], labels, loc="outside upper left", ncols=columns, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip


def plain(text: str) -> str:
    """As written: a dollar sign begins no formula, and an underscore in front hides nothing from the legend."""
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
