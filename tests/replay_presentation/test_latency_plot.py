"""The headline picture: what it draws, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from pensieve.replay.presentation.curves import Panel, panels
from pensieve.replay.presentation.plots import latency_figure
from support.replay.replay_reports import sweep

Line = Sequence[tuple[float, float]]


def panel(lines: Mapping[str, Line], name: str = "chat.json") -> Panel:
    """A panel of curves (turns/s, mean normalised latency in seconds); the 90th percentile is 1.5 times the mean."""
    report = sweep({name: 9.0 for name in lines}, (1.0,))
    report["dataset"]["name"] = name
    targets: list[dict[str, Any]] = []
    for entry in report["targets"]:
        for index, (turns_per_s, mean) in enumerate(lines[entry["target"]]):
            latency = entry["normalised_latency_s"] | {"mean": mean, "p90": 1.5 * mean}
            targets.append(
                entry | {"rate": index + 1.0, "turns_per_s": turns_per_s, "normalised_latency_s": latency}
            )
    (found,) = panels([report | {"targets": targets}])
    return found


def drawn(lines: Mapping[str, Line], latency_s: float | None = None) -> tuple[Axes, dict[str, Line2D]]:
    """The axes, and its lines by name."""
    figure = latency_figure([panel(lines)], latency_s)
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    return axes, {str(line.get_gid()): line for line in axes.get_lines()}


def xs(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_ydata())]


def test_mean_and_p90_of_each_system_in_one_colour() -> None:
    axes, lines = drawn({"A": [(1, 0.010), (2, 0.020)], "B": [(1, 0.015), (1.5, 0.030)]})
    assert set(lines) == {"mean-0-0", "p90-0-0", "mean-0-1", "p90-0-1"}
    assert xs(lines["mean-0-0"]) == [1, 2]
    assert ys(lines["mean-0-0"]) == [10, 20] and ys(lines["p90-0-0"]) == [15, 30]
    for index in range(2):
        mean, p90 = lines[f"mean-0-{index}"], lines[f"p90-0-{index}"]
        assert mean.get_color() == p90.get_color() and (mean.get_linestyle(), p90.get_linestyle()) == (
            "-",
            "--",
        )
    assert lines["mean-0-0"].get_color() != lines["mean-0-1"].get_color()
    assert (
        axes.get_xlabel() == "throughput [turns/s]" and axes.get_ylabel() == "normalised latency [ms/token]"
    )
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 45, "all is inside"


def test_queues_that_only_grow_are_cut_and_marked() -> None:
    axes, lines = drawn(
        {"A": [(1, 0.010), (3, 0.040), (3.1, 5.0)], "B": [(1, 0.012), (2, 0.030), (2.1, 0.050)]}
    )
    top = axes.get_ylim()[1]
    assert top == pytest.approx(60), "five times the lowest latency of the slower one"
    assert set(lines) - {"mean-0-0", "p90-0-0", "mean-0-1", "p90-0-1"} == {"above-0-0"}
    (x,), (y,) = xs(lines["above-0-0"]), ys(lines["above-0-0"])
    assert x == 3.1 and 0.9 * top < y < top
    assert ys(lines["mean-0-0"])[-1] == 5000, "the line leaves where it does"


def test_whatever_a_ratio_is_told_at_is_in_the_picture() -> None:
    lines = {"A": [(1, 0.010), (3, 4.0)], "B": [(1, 0.012), (2, 4.0)]}
    axes, _ = drawn(lines)
    assert axes.get_ylim()[1] > 1000 * (0.012 * 4.0) ** 0.5
    for curves in (lines, {"A": [(1, 0.010), (2, 0.020)]}):
        axes, _ = drawn(curves, 1.0)
        assert axes.get_ylim()[1] > 1000
        assert any(ys(line) == [1000, 1000] for line in axes.get_lines())


def test_systems_far_apart_share_a_logarithmic_axis() -> None:
    axes, lines = drawn({"A": [(1, 0.010), (3, 0.5)], "B": [(1, 1.3), (2, 9.0)]})
    assert axes.get_yscale() == "log" and not any("above" in name for name in lines)
    assert axes.get_ylim()[0] < 10 and axes.get_ylim()[1] > 9000


def test_a_system_has_one_look_in_all_panels() -> None:
    line = [(1, 0.010), (2, 0.020)]
    figure = latency_figure([panel({"A": line, "B": line}), panel({"B": line, "C": line}, "other.json")])
    assert figure is not None
    one, two = ({str(line.get_gid()): line for line in axes.get_lines()} for axes in figure.axes)
    assert one["mean-0-1"].get_color() == two["mean-1-0"].get_color() != two["mean-1-1"].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "A",
        "B",
        "C",
        "mean",
        "90th percentile",
    ]


def test_nothing_measured_is_no_picture() -> None:
    assert latency_figure([]) is None
    assert latency_figure([Panel("", {"A": []})]) is None


def test_one_load_each_is_bars() -> None:
    """A curve of one dot says nothing: two systems at one load are two pairs of bars, with their throughput above."""
    figure = latency_figure([panel({"A": [(1.25, 0.010)], "_B": [(2, 0.030)]})])
    assert figure is not None
    (axes,) = figure.axes
    assert not axes.get_lines()
    heights = {str(bar.get_gid()): bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)}
    assert heights == {"mean-0-0": 10, "p90-0-0": 15, "mean-0-1": 30, "p90-0-1": 45}
    assert {text.get_text() for text in axes.texts} == {"1.25 turns/s", "2.00 turns/s"}
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 45


def test_one_measurement_is_no_picture() -> None:
    assert latency_figure([panel({"A": [(1, 0.010)]})]) is None
