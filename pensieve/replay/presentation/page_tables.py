"""The tables of a page, made from reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.replay.measure.activity import RULE, largest_within_limit
from pensieve.replay.measure.report import at
from pensieve.replay.presentation.columns import (
    BY_TURN,
    FAILURES,
    FIRST_TOKEN,
    LATENESS,
    NOTHING,
    SESSIONS,
    SPEED,
    TOKENS,
    Column,
    limit_text,
    number,
    ratio_texts,
)
from pensieve.replay.presentation.curves import CurveEntry, curve_points
from pensieve.replay.presentation.equal_latency import RULE as RATIO_RULE
from pensieve.replay.presentation.equal_latency import comparisons
from pensieve.replay.presentation.panels import Panel


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. ``path`` leads to ``value`` in the reports that the page embeds; a derived number has neither."""

    text: str
    path: str = ""
    value: float | int | None = None


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    key: str
    title: str
    note: str
    heads: tuple[str, ...]
    labels: int
    """How many columns on the left are names; the others are numbers."""
    rows: tuple[Row, ...]
    folded: bool = False
    """The reader has to unfold it."""


def headline_tables(panels: Sequence[Panel], latency_s: float | None) -> Iterator[Table]:
    """The tables beside the first picture. ``latency_s``: where ratios are taken; None: chosen for each pair."""
    yield _systems(panels)
    ratios = _ratios(panels, latency_s)
    if ratios.rows:
        yield ratios


def tables(panels: Sequence[Panel]) -> Iterator[Table]:
    """The tables of all numbers, further down the page."""
    found = [entry for panel in panels for entry in panel.entries]
    yield _grid("speed", "Throughput and latency", "", panels, SPEED)
    told = "Cold: the first turn of a conversation; warm: the later ones."
    yield _grid("ttft", "Time to first token", told, panels, FIRST_TOKEN)
    swap = _swap_columns(found)
    note = (
        ""
        if swap
        else "No target told its swap traffic in bytes; host tokens are those that were swapped in."
    )
    yield _grid("tokens", "Tokens by source, and swap traffic", note, panels, (*TOKENS, *swap))
    yield _grid("sessions", "Active conversations", RULE, panels, SESSIONS)
    yield _grid("failures", "Failures and receipts", "", panels, FAILURES)
    if any(at(entry.summary, "client_lag_s") for entry in found):
        told = "How much later than due the client sent its turns."
        yield _grid("lateness", "The client's own lateness", told, panels, LATENESS)
    for panel in panels:
        for entry in panel.entries:
            if at(entry.summary, "by_turn"):
                yield _by_turn(panel, entry)


def _systems(panels: Sequence[Panel]) -> Table:
    heads = (
        "system", "most turns/s", "offered then", "normalised latency then [ms/token]",
        "lowest normalised latency [ms/token]",
        "active conversations with TTFT p95 ≤ 2 s", "turns lost",
    )  # fmt: skip
    rows = [(panel, _system(name, curve)) for panel in panels for name, curve in panel.curves.items()]
    note = "Means over turns and seeds; how active conversations are counted is said below."
    return _with_work(Table("systems", "At a glance", note, heads, 1, ()), panels, rows)


def _system(name: str, curve: Sequence[CurveEntry]) -> Row:
    points = curve_points(curve)
    best = max(points, key=lambda point: point.throughput, default=None)
    bins = [row for entry in curve for row in at(entry.summary, "active_sessions.bins") or []]
    lost = sum(at(entry.summary, f"turns.{key}") or 0 for entry in curve for key in ("failed", "skipped"))
    texts = (
        name,
        NOTHING if best is None else number(best.throughput, ",.2f"),
        NOTHING if best is None else best.load,
        NOTHING if best is None else number(best.mean_s, ",.1f", 1000.0),
        number(min((point.mean_s for point in points), default=None), ",.1f", 1000.0),
        limit_text(largest_within_limit(bins) if bins else None),
        f"{lost:,d}",
    )
    return tuple(Cell(text) for text in texts)


def _ratios(panels: Sequence[Panel], latency_s: float | None) -> Table:
    rows = [
        (
            panel,
            tuple(
                Cell(text)
                for text in (pair.ours, pair.other, *ratio_texts(pair.mean), *ratio_texts(pair.p90))
            ),
        )
        for panel in panels
        for pair in comparisons(panel.points, latency_s)
    ]
    heads = (
        "system", "against", "at mean normalised latency [ms/token]", "times the throughput",
        "at p90 normalised latency [ms/token]", "times the throughput",
    )  # fmt: skip
    table = Table("ratios", "Throughput at equal normalised latency", RATIO_RULE, heads, 2, ())
    return _with_work(table, panels, rows)


def _grid(key: str, title: str, note: str, panels: Sequence[Panel], columns: Sequence[Column]) -> Table:
    found = [(panel, entry) for panel in panels for entry in panel.entries]
    seeds = any(entry.seed is not None for _, entry in found)
    rows = [(panel, (*_labels(entry, seeds), *_cells(entry, columns))) for panel, entry in found]
    heads = ("system", "offered", *(("seed",) if seeds else ()), *(column.title for column in columns))
    return _with_work(Table(key, title, note, heads, 3 if seeds else 2, ()), panels, rows)


def _with_work(table: Table, panels: Sequence[Panel], rows: Sequence[tuple[Panel, Row]]) -> Table:
    """``table`` with its rows; where there are several panels, with a first column that tells them apart."""
    several = len(panels) > 1
    return Table(
        table.key,
        table.title,
        table.note,
        (("workload",) if several else ()) + table.heads,
        table.labels + several,
        tuple((Cell(panel.title), *row) if several else row for panel, row in rows),
    )


def _labels(entry: CurveEntry, seeds: bool) -> Row:
    texts = [entry.system, entry.load]
    if seeds:
        texts.append(NOTHING if entry.seed is None else str(entry.seed))
    return tuple(Cell(text) for text in texts)


def _cells(entry: CurveEntry, columns: Sequence[Column]) -> Iterator[Cell]:
    for column in columns:
        path = f"{entry.report}.{entry.path}.{column.path}"
        text = column.text(entry.summary)
        if column is SESSIONS[-1]:
            text = limit_text(at(entry.summary, "active_sessions"))
        yield Cell(text, path, at(entry.summary, column.path))


def _swap_columns(found: Sequence[CurveEntry]) -> list[Column]:
    """Whatever numbers the targets gave under ``swap``."""
    names = dict.fromkeys(
        name
        for entry in found
        for name, value in _mapping(at(entry.summary, "swap")).items()
        if isinstance(value, int | float)
    )
    return [Column(f"swap {name.replace('_', ' ')}", f"swap.{name}", ",.10g") for name in names]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _by_turn(panel: Panel, entry: CurveEntry) -> Table:
    rows = []
    for index, row in enumerate(entry.summary["by_turn"]):
        base = f"{entry.report}.{entry.path}.by_turn.{index}"
        cells = (Cell(c.text(row), f"{base}.{c.path}", at(row, c.path)) for c in BY_TURN)
        rows.append((Cell(str(row["turn"] + 1)), *cells))
    seed = "" if entry.seed is None else f"seed {entry.seed}"
    key = f"turns-{entry.report}-{entry.path.replace('.', '-')}"
    title = "By turn: " + ", ".join(part for part in (entry.system, panel.title, entry.load, seed) if part)
    return Table(key, title, "", ("turn", *(c.title for c in BY_TURN)), 1, tuple(rows), folded=True)
