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
"""Colours of text and of thin lines. Nothing else has them, so that a page can put its own in their place."""
WIDTH_IN, WIDE_IN = 6.2, 10.0
"""Widths of pictures that stand two in a row on a page, and of those that take a whole row."""
LineStyle = Literal["-", "--", "-.", ":"]
_LETTERS_PER_IN = 14
"""How many letters of a legend fit into an inch."""

# Told apart by the colour-blind, and visible on white and on black.
_COLOURS = ("#3b8bd0", "#e0662a", "#25a17f", "#c967a5", "#d3961c", "#8a7fd6", "#5fb4c4", "#a0813f")
_MARKERS = "osD^vPX*"


@dataclass(frozen=True, slots=True)
class Look:
    """How one system is drawn, in all pictures and panels."""

    colour: str
    marker: str
    style: LineStyle
    """Systems that share a colour have different styles."""


def look(number: int) -> Look:
    """The look of the system with this number, from 0."""
    style: LineStyle = "-" if number < len(_COLOURS) else "-."
    return Look(_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)], style)


def looks(panels: Sequence[Panel]) -> dict[str, Look]:
    """System → look, in the order in which systems first appear."""
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
    """Set ``text`` above the axes; an empty one leaves no gap."""
    if text:
        axes.set_title(plain(text), fontsize=9, loc="left", color=INK, wrap=True)


def plain_numbers(axis: Axis) -> None:
    """Write 200 on a logarithmic axis, not 2 × 10²."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def sample(colour: str, style: LineStyle | Literal["none"] = "-", marker: str = "") -> Artist:
    """A piece of line as a legend shows it."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, marker=marker, linewidth=1.8, markersize=5.5)


def legend(figure: Figure, samples: Sequence[tuple[str, Artist]]) -> None:
    """Put a legend above everything, never over a curve, in as many columns as fit."""
    labels = [plain(label) for label, _ in samples]
    longest = 4 + max(map(len, labels))
    columns = max(1, min(len(labels), int(_LETTERS_PER_IN * figure.get_figwidth() // longest)))
    figure.legend(
        [handle for _, handle in samples], labels, loc="outside upper left", ncols=columns, frameon=False,
        fontsize=9, labelcolor=INK,
    )  # fmt: skip


def plain(text: str) -> str:
    """``text`` so that matplotlib shows it as written.

    Else a dollar sign would begin a formula, and an underscore in front would hide a label from the legend.
    """
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
