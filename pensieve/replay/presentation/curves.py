"""The entries of reports as curves, and the panels in which they may be compared.

Entries of one system at different loads are a curve. Reports of one workload on one model share a panel.

Reports of several runs are compared by ratios of throughput at the same normalised latency.
A curve is the straight lines between neighbouring loads. The load that a system carries at a latency L is the
most turns/s on its curve at a latency of at most L: this envelope never falls as L grows, although a curve
folds back where more load gives less throughput. Nothing is extrapolated: a system that was faster than L
even at its highest load carries *at least* that much, and below its lowest latency nothing is known.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path, PurePath
from typing import Any, Literal

import click

from pensieve.replay.load.generators import NAMES
from pensieve.replay.measure import value_at

_LOAD_KEYS = frozenset({"rate", "seed", "clients"})
_ADDRESS = re.compile(r"\bCUDA_VISIBLE_DEVICES=\S+|(?:--port[ =]|\S+:)\d+\b")
"""The parts in which equal servers side by side differ: the device and the ports."""
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    """Its difference from the other panels; empty if it is the only one."""
    curves: Mapping[str, Sequence[CurveEntry]]
    """System → its entries, from the lowest load to the highest."""

    @property
    def points(self) -> dict[str, list[CurvePoint]]:
        return {name: curve_points(curve) for name, curve in self.curves.items()}

    @property
    def entries(self) -> list[CurveEntry]:
        return [entry for curve in self.curves.values() for entry in curve]


def panels(reports: Sequence[Report], names: Sequence[str] = ()) -> list[Panel]:
    """Panels in the order of the reports; ``names`` has a name for each report.

    The work is the data set, the lengths, the pauses and the model, but not the load. In a panel, targets of
    one name are one curve if settings, machine and versions are the same and they share no load; otherwise
    the report's name is added.
    """
    names = names or report_numbers(reports)
    groups = _groups(reports)
    titles = _titles(reports, groups, names)
    found = entries(reports)
    inside = [[entry for entry in found if entry.report in group] for group in groups]
    return [
        Panel(title, by_system(_with_distinct_names(reports, members, names)))
        for title, members in zip(titles, inside, strict=True)
    ]


def report_numbers(reports: Sequence[Report]) -> list[str]:
    return [str(number + 1) for number in range(len(reports))]


def _groups(reports: Sequence[Report]) -> list[list[int]]:
    """Group report numbers into panels: the same work, and at least one model in common.

    Targets of one report share a panel even if they name their models differently.
    """
    groups: list[tuple[str, set[str], list[int]]] = []
    for number, report in enumerate(reports):
        if not report["targets"]:
            continue
        work, models = json.dumps(_work(report), sort_keys=True), _models(report)
        # A report with targets of two models may join two groups that had nothing in common before.
        same = [group for group in groups if group[0] == work and group[1] & models]
        merged = (
            work,
            models.union(*(group[1] for group in same)),
            [n for g in same for n in g[2]] + [number],
        )
        groups = [group for group in groups if group not in same] + [merged]
    return sorted(group[2] for group in groups)


def _work(report: Report) -> dict[str, Any]:
    """The work apart from the load. A field that an older report lacks counts as not set."""
    name, work = value_at(report, "dataset.name"), report.get("workload") or {}
    cut = work.get("cut_conversations") or work.get("dropped_conversations")
    shape, arrivals = (value_at(report, f"options.{key}") or {} for key in ("shape", "arrivals"))
    facts = {
        "dataset": name if name in NAMES else value_at(report, "dataset.sha256"),
        "context_limit": work.get("context_limit") if cut else None,
        "force_lengths": value_at(report, "options.run.force_lengths"),
        **shape,
        **{key: value for key, value in arrivals.items() if key not in _LOAD_KEYS},
    }
    return {key: value for key, value in facts.items() if value}


def _models(report: Report) -> set[str]:
    """Last parts of the models' names: one server gives a path where another gives a name."""
    return {PurePath(str(value_at(summary, "details.model") or "")).name for summary in report["targets"]}


def _titles(reports: Sequence[Report], groups: Sequence[list[int]], names: Sequence[str]) -> list[str]:
    if len(groups) == 1:
        return [""]
    works = [_work(reports[group[0]]) for group in groups]
    titles: list[str] = []
    for work, group in zip(works, groups, strict=True):
        models = sorted({model for number in group for model in _models(reports[number]) if model})
        differing = [
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {json.dumps(value)}"
            for key, value in work.items()
            if key != "dataset" and any(other.get(key) != value for other in works)
        ]
        titles.append(", ".join([str(value_at(reports[group[0]], "dataset.name")), *models, *differing]))
    repeated = {title for title, count in Counter(titles).items() if count > 1}
    return [
        f"{title} ({', '.join(names[number] for number in group)})" if title in repeated else title
        for title, group in zip(titles, groups, strict=True)
    ]


def _with_distinct_names(
    reports: Sequence[Report], found: Sequence[CurveEntry], names: Sequence[str]
) -> list[CurveEntry]:
    """The entries, with the report's name added where one system name stands for different systems."""
    settings: dict[str, set[str]] = defaultdict(set)
    loads: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for entry in found:
        settings[entry.system].add(_setting(reports[entry.report], entry))
        loads[entry.system].add((entry.report, entry.load))
    ambiguous = {
        system
        for system, seen in settings.items()
        if len(seen) > 1 or len(loads[system]) > len({load for _, load in loads[system]})
    }
    return [
        replace(entry, system=f"{entry.system} ({names[entry.report]})")
        if entry.system in ambiguous
        else entry
        for entry in found
    ]


def _setting(report: Report, entry: CurveEntry) -> str:
    """Everything that can change a number except work and load, as comparable text."""
    details = {
        key: _ADDRESS.sub("", str(value)) for key, value in (entry.summary.get("details") or {}).items()
    }
    return json.dumps([report.get("machine"), report.get("versions"), details], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class CurveEntry:
    system: str
    load: str
    """Offered load for people: ``4 turns/s``."""
    rate: float | None
    clients: int | None
    seed: int | None
    report: int
    path: str
    """Path of its summary in the report: ``targets.1``."""
    summary: Mapping[str, Any]
    interval_s: tuple[float, float] | None
    """95 % interval of the mean normalised latency over the seeds of its report, if there are several."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    load: str
    throughput: float
    """Completed turns per second."""
    mean_s: float
    """Normalised latency: mean over turns."""
    p90_s: float | None
    """Normalised latency: 90th percentile over turns."""
    interval_s: tuple[float, float] | None
    """95 % interval of ``mean_s``, if there are several seeds."""


def entries(reports: Sequence[Report]) -> list[CurveEntry]:
    return [entry for number, report in enumerate(reports) for entry in _report_entries(number, report)]


def unsteady(found: Sequence[CurveEntry]) -> Iterator[str]:
    """A line for each entry whose load was not steady: its numbers depend on the time of measurement."""
    for entry in found:
        if value_at(entry.summary, "window.steady") is False:
            yield (
                f"{entry.system}, {entry.load}: the load was not steady in the measured window; "
                "a longer warm-up helps, or a lower rate where turns pile up"
            )


def by_system(found: Sequence[CurveEntry]) -> dict[str, list[CurveEntry]]:
    """System → curve in order of load, in order of the first appearance of systems."""
    curves: dict[str, list[CurveEntry]] = {}
    for entry in found:
        curves.setdefault(entry.system, []).append(entry)
    for curve in curves.values():
        curve.sort(key=_order)
    return curves


def busiest(curve: Sequence[CurveEntry]) -> CurveEntry:
    """The entry with the highest load, where a cache is under most pressure; the first of several seeds."""
    return next(entry for entry in curve if entry.load == curve[-1].load)


def curve_points(curve: Sequence[CurveEntry]) -> list[CurvePoint]:
    """One point per load, in the order of ``curve``, without entries that are incomplete or not valid."""
    groups: dict[str, list[CurveEntry]] = {}
    for entry in curve:
        if entry.summary.get("valid") is not False:
            groups.setdefault(entry.load, []).append(entry)
    points = []
    for load, group in groups.items():
        throughput, mean, p90 = (
            _mean([value_at(entry.summary, path) for entry in group])
            for path in ("turns_per_s", "normalised_latency_s.mean", "normalised_latency_s.p90")
        )
        if throughput is not None and mean is not None:
            points.append(CurvePoint(load, throughput, mean, p90, group[0].interval_s))
    return points


def _report_entries(number: int, report: Report) -> Iterator[CurveEntry]:
    # A report from before sweeps existed has one load, which only its options contain.
    arrivals = value_at(report, "options.arrivals") or {}
    for index, summary in enumerate(report["targets"]):
        rate, seed = (summary.get(key, arrivals.get(key)) for key in ("rate", "seed"))
        clients = summary.get("clients")
        name = str(summary["target"])
        yield CurveEntry(
            name, _load(report, rate, clients), rate, clients, seed, number, f"targets.{index}", summary,
            _interval(report, name, rate, clients),
        )  # fmt: skip


def _load(report: Report, rate: float | None, clients: int | None) -> str:
    if rate is not None:
        return f"{rate:g} turns/s"
    clients = clients or value_at(report, "options.run.concurrency")
    if clients:
        return f"{clients} clients"
    return "recorded times" if value_at(report, "options.arrivals.recorded") else "all at once"


def _order(entry: CurveEntry) -> tuple[float, float, int, float]:
    throughput = value_at(entry.summary, "turns_per_s") or 0.0
    return entry.rate or math.inf, entry.clients or math.inf, entry.seed or 0, throughput


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _interval(
    report: Report, target: str, rate: float | None, clients: int | None
) -> tuple[float, float] | None:
    for row in report.get("intervals") or []:
        if (row.get("target"), row.get("rate"), row.get("clients")) == (target, rate, clients):
            band = (row.get("metrics") or {}).get("normalised_latency_s.mean") or {}
            low, high = band.get("low"), band.get("high")
            return None if low is None or high is None else (low, high)
    return None


Line = Sequence[tuple[float, float]]
"""(turns/s, normalised latency in seconds) from the lowest load to the highest."""
Bound = Literal["equal", "at least", "at most"]
_SIGNS: Mapping[Bound, str] = {"equal": "", "at least": "≥ ", "at most": "≤ "}

RULE = (
    "The most turns/s of the first over those of the second at the same normalised latency, on straight lines between "
    "measured points. The latency is the geometric middle of the range that both curves cover; where they have none in "
    "common, that of the slower one at its highest load. A system that was faster even at its own highest load may "
    "carry more: ≥ or ≤."
)
SCHEMA = "pensieve.replay.compare/1"


@dataclass(frozen=True, slots=True)
class CarriedLoad:
    turns_per_s: float
    at_least: bool
    """The system was faster even at its highest load, so it may carry more."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput of one system over that of another at one latency."""

    latency_s: float
    ours: CarriedLoad | None
    """None: slower than this at every measured load."""
    other: CarriedLoad | None

    @property
    def bound(self) -> Bound | None:
        """Whether ``times`` is exact or a bound; None if the curves do not show either."""
        if self.ours is None or self.other is None or (self.ours.at_least and self.other.at_least):
            return None
        if self.ours.at_least:
            return "at least"
        return "at most" if self.other.at_least else "equal"

    @property
    def times(self) -> float | None:
        if self.bound is None or self.ours is None or self.other is None:
            return None
        return self.ours.turns_per_s / self.other.turns_per_s

    @property
    def text(self) -> str:
        """``2.07``, ``≥ 2.07``, or the reason why there is no number."""
        if self.bound is not None:
            return f"{_SIGNS[self.bound]}{self.times:,.2f}"
        if self.ours is None and self.other is None:
            return "neither is so fast"
        if self.ours is None:
            return "only the second is so fast"
        return "only the first is so fast" if self.other is None else "both are faster"


@dataclass(frozen=True, slots=True)
class Comparison:
    ours: str
    other: str
    mean: Ratio | None
    """Ratio at equal mean normalised latency; None if a system has no measured point."""
    p90: Ratio | None


def load_at_latency(line: Line, latency_s: float) -> CarriedLoad | None:
    """The envelope at ``latency_s``; None below the lowest latency of the line."""
    if not line or latency_s < min(y for _, y in line):
        return None
    loads = [x for x, y in line if y <= latency_s]
    # A curve may cross the level several times, up or, where it folds back, down: every crossing counts.
    for (x0, y0), (x1, y1) in pairwise(line):
        if min(y0, y1) < latency_s < max(y0, y1):
            loads.append(x0 + (x1 - x0) * (latency_s - y0) / (y1 - y0))
    return CarriedLoad(max(loads), latency_s > line[-1][1])


def common_latency(ours: Line, other: Line) -> float:
    """Geometric mean of the range of latencies that both lines cover.

    Without a common range, the latency of the slower system at its highest load. This understates the
    difference: the slower system at its best against what the faster one was seen to carry.
    """
    low = max(min(y for _, y in line) for line in (ours, other))
    high = min(line[-1][1] for line in (ours, other))
    if low > high:
        return max(ours[-1][1], other[-1][1])
    return min(max(math.sqrt(low * high), low), high)  # rounding must not leave the range


def ratio(ours: Line, other: Line, latency_s: float | None = None) -> Ratio | None:
    """The ratio at ``latency_s``, by default at the ``common_latency``. None if a line has no point."""
    if not ours or not other:
        return None
    level = common_latency(ours, other) if latency_s is None else latency_s
    return Ratio(level, load_at_latency(ours, level), load_at_latency(other, level))


def comparisons(
    points: Mapping[str, Sequence[CurvePoint]], latency_s: float | None = None
) -> list[Comparison]:
    mean = {name: [(point.throughput, point.mean_s) for point in curve] for name, curve in points.items()}
    p90 = {
        name: [(point.throughput, point.p90_s) for point in curve if point.p90_s is not None]
        for name, curve in points.items()
    }
    return [
        Comparison(a, b, ratio(mean[a], mean[b], latency_s), ratio(p90[a], p90[b], latency_s))
        for a, b in combinations(points, 2)
    ]


class NotAReport(click.ClickException):
    """The file is not a report."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report of any version; newer ones only have more fields. Raises NotAReport, OSError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAReport(f"{path}: {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if not str(schema).startswith("pensieve."):
        raise NotAReport(f"{path}: not a report of `pensieve replay --json`: its schema is {schema!r}")
    targets = report.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, dict) and "target" in t for t in targets):
        raise NotAReport(f"{path}: `targets` must be a list of named entries")
    if not targets and not report.get("unreached"):
        raise NotAReport(f"{path}: it has no target")
    return report


def names_of(files: tuple[Path, ...]) -> list[str]:
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]


def comparison(
    reports: Sequence[Report], names: Sequence[str], latency_s: float | None = None
) -> dict[str, Any]:
    """The content of the plots and of the table of ratios for JSON; bench/README.md describes it."""
    return {
        "schema": SCHEMA,
        "reports": [
            {"name": name, "created": report.get("created"), "command": report.get("command")}
            for name, report in zip(names, reports, strict=True)
        ],
        "at_latency_s": latency_s,
        "panels": [_panel_json(panel, names, latency_s) for panel in panels(reports, names)],
    }


def _panel_json(panel: Panel, names: Sequence[str], latency_s: float | None) -> dict[str, Any]:
    systems = [
        {
            "system": system,
            "reports": sorted({names[entry.report] for entry in panel.curves[system]}),
            "points": [_point_json(point) for point in points],
        }
        for system, points in panel.points.items()
    ]
    pairs = [_pair_json(pair) for pair in comparisons(panel.points, latency_s)]
    return {"workload": panel.title, "systems": systems, "ratios": pairs}


def _point_json(point: CurvePoint) -> dict[str, Any]:
    low, high = point.interval_s or (None, None)
    return {
        "load": point.load,
        "turns_per_s": point.throughput,
        "normalised_latency_s": {"mean": point.mean_s, "low": low, "high": high, "p90": point.p90_s},
    }


def _pair_json(pair: Comparison) -> dict[str, Any]:
    return {
        "system": pair.ours,
        "against": pair.other,
        "mean": _ratio_json(pair.mean),
        "p90": _ratio_json(pair.p90),
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    ours, other = (side and side.turns_per_s for side in (ratio.ours, ratio.other))
    return {
        "latency_s": ratio.latency_s, "turns_per_s": ours, "against_turns_per_s": other, "times": ratio.times,
        "bound": ratio.bound, "text": ratio.text,
    }  # fmt: skip
