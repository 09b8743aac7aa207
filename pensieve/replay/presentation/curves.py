"""The entries of reports as curves, and the panels in which they may be compared.

Entries of one system at different loads are a curve. Reports of one workload on one model share a panel.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pensieve.replay.load.generators import NAMES
from pensieve.replay.measure.report import value_at

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
