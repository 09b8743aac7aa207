"""Several reports as one set of curves: which entries are the same system at different loads."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Report = Mapping[str, Any]
_LOAD_KEYS = frozenset({"rate", "rates", "seed", "seeds", "clients", "concurrency"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One target of a report at one load."""

    system: str
    """Name of the curve."""
    load: str
    """What was offered, for people: ``4 turns/s``."""
    rate: float | None
    """Offered turns per second; None where nothing paced them."""
    clients: int | None
    seed: int | None
    report: int
    """Number of the report."""
    path: str
    """Where its summary is in the report: ``targets.1``."""
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A system at one load: the mean over its seeds."""

    load: str
    rate: float | None
    throughput: float
    """Completed turns per second."""
    latency_s: float
    """Mean normalised latency."""
    low_s: float | None
    """Ends of its 95 % interval, where several seeds were run."""
    high_s: float | None


def at(summary: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where an older report has no such field."""
    value: Any = summary
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def entries(reports: Sequence[Report], names: Sequence[str] = ()) -> list[Entry]:
    """All targets of all runs of all reports, in order.

    Targets of the same name in several reports are one system when nothing but the load differs between the reports;
    else ``names``, of the reports, tell them apart.
    """
    names = names or [str(number + 1) for number in range(len(reports))]
    found = [entry for number, report in enumerate(reports) for entry in _of_report(number, report)]
    settings: dict[str, dict[int, str]] = defaultdict(dict)
    loads: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in found:
        settings[entry.system][entry.report] = _setting(reports[entry.report], entry)
        loads[entry.system][entry.report].add(entry.load)
    apart = {
        system
        for system, seen in settings.items()
        if len(set(seen.values())) > 1 or _share_a_load(list(loads[system].values()))
    }
    return [
        replace(entry, system=f"{entry.system} ({names[entry.report]})") if entry.system in apart else entry
        for entry in found
    ]


def by_system(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """In the order in which systems first appear; each from the lowest load to the highest."""
    curves: dict[str, list[Entry]] = {}
    for entry in found:
        curves.setdefault(entry.system, []).append(entry)
    for curve in curves.values():
        curve.sort(key=_order)
    return curves


def busiest(curve: Sequence[Entry]) -> Entry:
    """The entry with the highest load, where a cache is under most pressure; of several seeds the first."""
    return next(entry for entry in curve if entry.load == curve[-1].load)


def curve_points(reports: Sequence[Report], curve: Sequence[Entry]) -> list[Point]:
    """One per load, in the order of ``curve``; those without throughput or latency are left out."""
    groups: dict[str, list[Entry]] = {}
    for entry in curve:
        groups.setdefault(entry.load, []).append(entry)
    points = []
    for load, group in groups.items():
        throughput = _mean([at(entry.summary, "turns_per_s") for entry in group])
        latency = _mean([at(entry.summary, "normalised_latency_s.mean") for entry in group])
        if throughput is not None and latency is not None:
            low, high = _interval(reports[group[0].report], group[0])
            points.append(Point(load, group[0].rate, throughput, latency, low, high))
    return points


def throughput_at(points: Sequence[Point], latency_s: float) -> float | None:
    """The most turns/s at a mean normalised latency of at most ``latency_s``, straight lines between points.

    None where even the lowest latency is above it, or all are below it: then more load would have told.
    """
    if all(point.latency_s < latency_s for point in points):
        return None
    found = [point.throughput for point in points if point.latency_s <= latency_s]
    for one, two in pairwise(points):
        y0, y1 = one.latency_s, two.latency_s
        if min(y0, y1) < latency_s < max(y0, y1):
            found.append(one.throughput + (two.throughput - one.throughput) * (latency_s - y0) / (y1 - y0))
    return max(found, default=None)


def equal_latency_ratio(ours: Sequence[Point], other: Sequence[Point]) -> tuple[float, float] | None:
    """(latency in seconds, turns/s of ``ours`` over those of ``other``) at the geometric middle of the latencies that
    both curves cover; None where they cover none together."""
    if len(ours) < 2 or len(other) < 2:
        return None
    mine, theirs = ([point.latency_s for point in points] for points in (ours, other))
    low, high = max(min(mine), min(theirs)), min(max(mine), max(theirs))
    if low > high or low <= 0:
        return None
    middle = min(max(math.sqrt(low * high), low), high)  # rounding must not leave the range
    first, second = throughput_at(ours, middle), throughput_at(other, middle)
    return (middle, first / second) if first and second else None


def _of_report(number: int, report: Report) -> Iterator[Entry]:
    # A report from before there were sweeps has one load, which only its options tell.
    arrivals = at(report, "options.arrivals") or {}
    for index, summary in enumerate(report["targets"]):
        rate, seed = (summary.get(key, arrivals.get(key)) for key in ("rate", "seed"))
        clients = summary.get("clients")
        load = _load(report, rate, clients)
        yield Entry(
            str(summary["target"]), load, rate, clients, seed, number, f"targets.{index}", summary
        )


def _share_a_load(loads: Sequence[set[str]]) -> bool:
    return sum(map(len, loads)) > len(set().union(*loads))


def _setting(report: Report, entry: Entry) -> str:
    """Everything but the load that can change a number, as text that compares."""
    options = {key: _without_load(value) for key, value in (report.get("options") or {}).items()}
    parts = [
        at(report, "dataset.sha256"),
        options,
        report.get("machine"),
        report.get("versions"),
        entry.summary.get("details"),
    ]
    return json.dumps(parts, sort_keys=True, default=str)


def _without_load(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: inner for key, inner in value.items() if key not in _LOAD_KEYS}


def _load(report: Report, rate: float | None, clients: int | None) -> str:
    if rate is not None:
        return f"{rate:g} turns/s"
    clients = clients or at(report, "options.run.concurrency")
    if clients:
        return f"{clients} clients"
    return "recorded times" if at(report, "options.arrivals.recorded") else "all at once"


def _order(entry: Entry) -> tuple[float, float, int, float]:
    throughput = at(entry.summary, "turns_per_s") or 0.0
    return entry.rate or math.inf, entry.clients or math.inf, entry.seed or 0, throughput


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _interval(report: Report, entry: Entry) -> tuple[float | None, float | None]:
    target = entry.summary["target"]
    for row in report.get("intervals") or []:
        if (row.get("target"), row.get("rate"), row.get("clients")) == (target, entry.rate, entry.clients):
            band = (row.get("metrics") or {}).get("normalised_latency_s.mean") or {}
            return band.get("low"), band.get("high")
    return None, None
