"""What may be compared: reports of one workload on one model are a panel of a picture, others are panels beside it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pensieve.replay.load.generators import NAMES
from pensieve.replay.measure.report import at
from pensieve.replay.presentation.curves import (
    CurveEntry,
    CurvePoint,
    Report,
    by_system,
    curve_points,
    entries,
)

_LOAD_KEYS = frozenset({"rate", "seed", "clients"})
_PLACE = re.compile(r"\bCUDA_VISIBLE_DEVICES=\S+|(?:--port[ =]|\S+:)\d+\b")
"""What differs between equal servers that run side by side: the device, and the ports."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Systems under the same work."""

    title: str
    """What sets it apart from the other panels; empty where it is the only one."""
    curves: Mapping[str, Sequence[CurveEntry]]
    """System → its entries, from the lowest load to the highest."""

    @property
    def points(self) -> dict[str, list[CurvePoint]]:
        return {name: curve_points(curve) for name, curve in self.curves.items()}

    @property
    def entries(self) -> list[CurveEntry]:
        """The entries of all systems, system by system."""
        return [entry for curve in self.curves.values() for entry in curve]


def panels(reports: Sequence[Report], names: Sequence[str] = ()) -> list[Panel]:
    """In the order of the reports, of which those without a measured target are in none; ``names`` are of the reports.

    The work is the data set, the lengths, the pauses and the model; the load is not part of it. Within a panel, targets
    of the same name are one curve when their settings, machine and versions are the same and they share no load; else
    the name of the report tells them apart.
    """
    names = names or report_numbers(reports)
    groups = _groups(reports)
    titles = _titles(reports, groups, names)
    found = entries(reports)
    inside = [[entry for entry in found if entry.report in group] for group in groups]
    return [
        Panel(title, by_system(_told_apart(reports, its_entries, names)))
        for title, its_entries in zip(titles, inside, strict=True)
    ]


def report_numbers(reports: Sequence[Report]) -> list[str]:
    """Names for reports that have none."""
    return [str(number + 1) for number in range(len(reports))]


def _groups(reports: Sequence[Report]) -> list[list[int]]:
    """Numbers of the reports that make a panel: the same work, and one model at least in common.

    Targets of one report are of one panel even where they name their model differently.
    """
    groups: list[tuple[str, set[str], list[int]]] = []
    for number, report in enumerate(reports):
        if not report["targets"]:
            continue
        work, models = json.dumps(_work(report), sort_keys=True), _models(report)
        same = [group for group in groups if group[0] == work and group[1] & models]
        merged = (
            work,
            models.union(*(group[1] for group in same)),
            [n for g in same for n in g[2]] + [number],
        )
        groups = [group for group in groups if group not in same] + [merged]
    return sorted(group[2] for group in groups)


def _work(report: Report) -> dict[str, Any]:
    """What was to be done, as far as it is not load. Fields that an older report lacks were nothing then."""
    name, work = at(report, "dataset.name"), report.get("workload") or {}
    cut = work.get("cut_conversations") or work.get("dropped_conversations")
    shape, arrivals = (at(report, f"options.{key}") or {} for key in ("shape", "arrivals"))
    facts = {
        "dataset": name if name in NAMES else at(report, "dataset.sha256"),
        "context_limit": work.get("context_limit") if cut else None,
        "force_lengths": at(report, "options.run.force_lengths"),
        **shape,
        **{key: value for key, value in arrivals.items() if key not in _LOAD_KEYS},
    }
    return {key: value for key, value in facts.items() if value}


def _models(report: Report) -> set[str]:
    """Last parts of their names: one server gives a path where another gives a name."""
    return {PurePath(str(at(summary, "details.model") or "")).name for summary in report["targets"]}


def _titles(reports: Sequence[Report], groups: Sequence[list[int]], names: Sequence[str]) -> list[str]:
    if len(groups) == 1:
        return [""]
    works = [_work(reports[group[0]]) for group in groups]
    told: list[str] = []
    for work, group in zip(works, groups, strict=True):
        models = sorted({model for number in group for model in _models(reports[number]) if model})
        differing = [
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {json.dumps(value)}"
            for key, value in work.items()
            if key != "dataset" and any(other.get(key) != value for other in works)
        ]
        told.append(", ".join([str(at(reports[group[0]], "dataset.name")), *models, *differing]))
    repeated = {title for title, count in Counter(told).items() if count > 1}
    return [
        f"{title} ({', '.join(names[number] for number in group)})" if title in repeated else title
        for title, group in zip(told, groups, strict=True)
    ]


def _told_apart(
    reports: Sequence[Report], found: Sequence[CurveEntry], names: Sequence[str]
) -> list[CurveEntry]:
    settings: dict[str, set[str]] = defaultdict(set)
    loads: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in found:
        settings[entry.system].add(_setting(reports[entry.report], entry))
        loads[entry.system][entry.report].add(entry.load)
    apart = {
        system
        for system, seen in settings.items()
        if len(seen) > 1 or _share_a_load(list(loads[system].values()))
    }
    return [
        replace(entry, system=f"{entry.system} ({names[entry.report]})") if entry.system in apart else entry
        for entry in found
    ]


def _share_a_load(loads: Sequence[set[str]]) -> bool:
    return sum(map(len, loads)) > len(set().union(*loads))


def _setting(report: Report, entry: CurveEntry) -> str:
    """All that can change a number and is neither work nor load, as text that compares."""
    details = {key: _PLACE.sub("", str(value)) for key, value in (entry.summary.get("details") or {}).items()}
    return json.dumps([report.get("machine"), report.get("versions"), details], sort_keys=True, default=str)
