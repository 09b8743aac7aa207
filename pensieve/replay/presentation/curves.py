"""The entries of reports as curves: which are the same system at different loads, and what is drawn of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.replay.measure.report import at

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CurveEntry:
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
    """Number of the report that it stands in."""
    path: str
    """Where its summary is in the report: ``targets.1``."""
    summary: Mapping[str, Any]
    interval_s: tuple[float, float] | None
    """95 % interval of the mean normalised latency over the seeds of its report, where there are several."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A system at one load: means over its seeds."""

    load: str
    throughput: float
    """Completed turns per second."""
    mean_s: float
    """Normalised latency: mean over turns."""
    p90_s: float | None
    """Normalised latency: 90th percentile over turns."""
    interval_s: tuple[float, float] | None
    """95 % interval of ``mean_s``, where several seeds were run."""


def entries(reports: Sequence[Report]) -> list[CurveEntry]:
    """An entry for every target of every run of every report, in order, named as in its report."""
    return [entry for number, report in enumerate(reports) for entry in _of_report(number, report)]


def unsteady(found: Sequence[CurveEntry]) -> Iterator[str]:
    """A line for each entry whose load was not steady: its numbers depend on when they were taken."""
    for entry in found:
        if at(entry.summary, "window.steady") is False:
            yield (
                f"{entry.system}, {entry.load}: the load was not steady in the measured window; "
                "a longer warm-up helps, or a lower rate where turns pile up"
            )


def by_system(found: Sequence[CurveEntry]) -> dict[str, list[CurveEntry]]:
    """System → curve, in the order in which systems first appear; a curve goes from the lowest load to the highest."""
    curves: dict[str, list[CurveEntry]] = {}
    for entry in found:
        curves.setdefault(entry.system, []).append(entry)
    for curve in curves.values():
        curve.sort(key=_order)
    return curves


def busiest(curve: Sequence[CurveEntry]) -> CurveEntry:
    """The entry with the highest load, where a cache is under most pressure; of several seeds the first."""
    return next(entry for entry in curve if entry.load == curve[-1].load)


def curve_points(curve: Sequence[CurveEntry]) -> list[CurvePoint]:
    """One per load, in the order of ``curve``.

    Entries are left out that have no throughput or latency, or that are void because the client was late.
    """
    groups: dict[str, list[CurveEntry]] = {}
    for entry in curve:
        if entry.summary.get("valid") is not False:
            groups.setdefault(entry.load, []).append(entry)
    points = []
    for load, group in groups.items():
        throughput, mean, p90 = (
            _mean([at(entry.summary, path) for entry in group])
            for path in ("turns_per_s", "normalised_latency_s.mean", "normalised_latency_s.p90")
        )
        if throughput is not None and mean is not None:
            points.append(CurvePoint(load, throughput, mean, p90, group[0].interval_s))
    return points


def _of_report(number: int, report: Report) -> Iterator[CurveEntry]:
    # A report from before there were sweeps has one load, which only its options tell.
    arrivals = at(report, "options.arrivals") or {}
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
    clients = clients or at(report, "options.run.concurrency")
    if clients:
        return f"{clients} clients"
    return "recorded times" if at(report, "options.arrivals.recorded") else "all at once"


def _order(entry: CurveEntry) -> tuple[float, float, int, float]:
    throughput = at(entry.summary, "turns_per_s") or 0.0
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
