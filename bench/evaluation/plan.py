"""Which device runs what, how long that takes, and what is left out when time is short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evaluation.experiments import Line

END_S = 8.0
"""A guess: for a server to end, and for the replay to import, write and show."""
BETWEEN_S = 3.0
"""A guess: between two rates, to delete the sessions of the first."""


class NoTime(Exception):
    """Not even one rate of each job fits into the time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One server and the rates that it meets, from its start to its end."""

    line: Line
    uses: tuple[tuple[str, str], ...]
    """(experiment, label there) of all lines that this is: a default meets the same load in many ablations."""
    rates: tuple[float, ...]
    """The most telling first."""

    @property
    def seconds(self) -> float:
        """Seconds that the job is expected to take."""
        return self.line.system.start_up_s + END_S + len(self.rates) * self.step_s

    @property
    def step_s(self) -> float:
        """Seconds for one rate, as if it were the highest."""
        return self.line.workload.point_s + BETWEEN_S

    @property
    def title(self) -> str:
        (experiment, label), *others = self.uses
        return f"{experiment}: {label}" + (f" (and in {len(others)} more)" if others else "")


def jobs_for(lines: Iterable[tuple[str, Line]]) -> list[Job]:
    """The jobs of all (experiment, line), with all rates. Lines that differ in nothing but their label are one job."""
    found: dict[Any, Job] = {}
    for experiment, line in lines:
        system = line.system
        key = (system.command, system.environment, line.model, line.workload)
        job = found.get(key, Job(line, (), line.workload.rates))
        found[key] = replace(job, uses=(*job.uses, (experiment, line.label)))
    return list(found.values())


def pack(jobs: Sequence[Job], devices: int) -> list[list[Job]]:
    """Jobs of each device, the longest first, each to the device that is free first."""
    queues: list[list[Job]] = [[] for _ in range(devices)]
    for job in sorted(jobs, key=lambda job: -job.seconds):
        min(queues, key=total).append(job)
    return queues


def total(jobs: Sequence[Job]) -> float:
    """Seconds, one after the other."""
    return sum(job.seconds for job in jobs)


def makespan(queues: Sequence[Sequence[Job]]) -> float:
    """Seconds until the last device is done."""
    return max(map(total, queues), default=0.0)


def fit(jobs: Sequence[Job], devices: int, seconds: float) -> list[list[Job]]:
    """``pack``, with as many rates as fit into ``seconds``.

    All jobs keep the same number of rates, as far as they have so many: systems are compared at the same loads. A
    device that then has time left gives its jobs more, one rate each in turn. Raises NoTime.
    """
    for kept in range(max((len(job.rates) for job in jobs), default=0), 0, -1):
        queues = pack([replace(job, rates=job.rates[:kept]) for job in jobs], devices)
        if makespan(queues) <= seconds:
            whole = {job.uses: job.rates for job in jobs}
            return [_filled(queue, whole, seconds) for queue in queues]
    if not jobs:
        return [[] for _ in range(devices)]
    raise NoTime(f"one rate of each system alone takes {makespan(queues):.0f} s")


def _filled(queue: list[Job], whole: Mapping[Any, tuple[float, ...]], seconds: float) -> list[Job]:
    """``queue`` with one rate more for the job that has the fewest and can have it, as often as there is time."""
    left = seconds - total(queue)
    able = [job for job in queue if len(job.rates) < len(whole[job.uses]) and job.step_s <= left]
    if not able:
        return queue
    chosen = min(able, key=lambda job: len(job.rates))
    more = replace(chosen, rates=whole[chosen.uses][: len(chosen.rates) + 1])
    return _filled([more if job is chosen else job for job in queue], whole, seconds)
