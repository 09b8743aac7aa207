"""Runs experiments of ``bench/evaluation/experiments.py``: every system with its own server, side by side on devices.

    python bench/evaluate.py systems-13b-sharegpt --devices 0,1,2,3 --results FOLDER --budget 540
    python bench/evaluate.py ablate-unified --small --results FOLDER

A job is one server under one load: started once, swept over the rates by one ``pensieve replay``, on one device, with
a share of the machine's cores for server and client together. After every job the results of its experiment are
written anew (``NAME.json``; the logs of all in ``evaluate.log``), so what was measured is there whenever this is
stopped; ``NAME.md`` and ``NAME.png`` come last, or from ``bench/evaluate_report.py``. A system that fails is reported
with its last words; the others go on. Where ``--budget`` is short, the least telling rates are left out of every job,
before the start and, if servers take longer than expected, on the way. Exit code 1 when a system failed, a turn failed
or a client was late.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import dummy_model
from common.provenance import commit, gpu_name, portable
from evaluate_report import Origin, combine, job_report, write, write_page
from evaluation.experiments import Experiment, Line, experiments
from evaluation.jobs import Device, JobResult, Site, devices, last_lines, run_job
from evaluation.plan import Job, NoTime, fit, jobs_for, makespan, total
from evaluation.scales import FULL, SMALL

from pensieve.machine import memory
from pensieve.replay.presentation import plots

STATUS_S = 15.0
"""Between two lines that say how far a job is."""
STOP_S, PAGE_S = 10.0, 2.5
"""Kept of the budget: to stop servers, and for the page of each experiment."""


@dataclass
class Evaluation:
    """The experiments in hand and what has come of them; written after every job."""

    chosen: Sequence[Experiment]
    results_folder: Path
    origin: Origin
    keep_logs: bool
    deadline: float
    """When the last job has to end, on the clock of ``time.monotonic``."""
    stopped: bool = False
    done: list[JobResult] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The report of each experiment, so far."""
    started: float = field(default_factory=time.monotonic)

    async def run(self, queues: Sequence[Sequence[Job]], where: Sequence[Device], site: Site) -> None:
        async with asyncio.TaskGroup() as group:
            for queue, device in zip(queues, where, strict=True):
                group.create_task(self._work_off(list(queue), device, site))

    async def _work_off(self, queue: list[Job], device: Device, site: Site) -> None:
        while queue:
            job = self._next(queue)
            if job is None:
                self._finish(_not_run(queue.pop(0), device))
                continue
            queue.pop(0)
            self.say(device, f"{job.title}: rates {_numbers(sorted(job.rates))}")
            self._finish(await run_job(job, device, site, self._status(device), self._left_s))

    def _next(self, queue: Sequence[Job]) -> Job | None:
        """The first job, with as many rates as there is time for if those after it are to have as many.

        When not all can have one, the first one takes what it needs. None: there is no time even for that.
        """
        for count in (len(queue), 1):
            jobs = [replace(job, rates=job.line.workload.rates) for job in queue[:count]]
            try:
                fitting = fit(jobs, 1, self._left_s())[0]
            except NoTime:
                continue
            return next(job for job in fitting if job.uses == queue[0].uses)
        return None

    def stop(self) -> None:
        """Leave no time: what is under way ends, and what it has done is written."""
        self.stopped = True
        self.deadline = time.monotonic()

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _finish(self, result: JobResult) -> None:
        self.done.append(result)
        failed = (
            f"failed: {last_lines(result.error, 3)}" if result.error else f"done in {result.wall_s:.0f} s"
        )
        self.say(result.device, f"{result.job.title}: {failed}")
        self.write()

    def write(self) -> None:
        """All numbers so far. Pages and pictures, which take longer and show no more, are for the end."""
        self.results_folder.mkdir(parents=True, exist_ok=True)
        for experiment in self.chosen:
            mine = [result for result in self.done if experiment.name in dict(result.job.uses)]
            if mine:
                parts = [job_report(experiment, result, self.origin) for result in mine]
                self.reports[experiment.name] = combine(parts)
                write(self.reports[experiment.name], self.results_folder)
        log = "\n".join(_log(result, whole=self.keep_logs) for result in self.done)
        (self.results_folder / "evaluate.log").write_text(log, encoding="utf-8")

    def write_pages(self) -> None:
        for report in self.reports.values():
            write_page(report, self.results_folder)

    def say(self, device: Device | str, text: str) -> None:
        name = device if isinstance(device, str) else device.name
        click.echo(f"[{time.monotonic() - self.started:6.1f} s] device {name}: {text}")

    def _status(self, device: Device) -> Callable[[str], None]:
        """Says what it is told, but not more often than every ``STATUS_S``."""
        last = time.monotonic()

        def say(text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= STATUS_S:
                last = time.monotonic()
                self.say(device, text)

        return say


def _not_run(job: Job, device: Device) -> JobResult:
    error = "not run: no time was left"
    return JobResult(
        job, device.name, "", "", 0.0, None, None, error, logs={"replay.log": "", "server.log": ""}
    )


def _log(result: JobResult, *, whole: bool) -> str:
    parts = [f"=== {result.job.title} on device {result.device}"]
    for name, text in result.logs.items():
        parts.append(f"--- {name}\n{text if whole else last_lines(text)}")
    return "\n".join(parts) + "\n"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def plan(
    chosen: Sequence[Experiment], rates: Sequence[float], only: Sequence[str], devices: int, seconds: float
) -> list[list[Job]]:
    """Jobs of each device. Raises UsageError."""
    lines = [
        (experiment.name, _with_rates(line, rates))
        for experiment in chosen
        for line in experiment.lines
        if not only or line.label in only
    ]
    unknown = set(only) - {line.label for _, line in lines}
    if unknown:
        raise click.UsageError(f"no system of these experiments is called {', '.join(sorted(unknown))}")
    jobs = jobs_for(lines)
    try:
        return fit(jobs, devices, seconds)
    except NoTime as error:
        raise click.UsageError(f"--budget is too short: {error}") from error


def _with_rates(line: Line, rates: Sequence[float]) -> Line:
    """``line`` with these rates in place of its own, if there are any."""
    return replace(line, workload=replace(line.workload, rates=tuple(rates) or line.workload.rates))


def make_models(lines: Sequence[Line], folder: Path) -> dict[str, Path]:
    """Make a model folder for each shape; shape → folder."""
    return {
        shape: dummy_model.make(shape, folder / shape)
        for shape in dict.fromkeys(line.model for line in lines)
    }


def check_memory(queues: Sequence[Sequence[Job]]) -> None:
    """Raises UsageError when the largest host tiers of all devices do not fit at once."""
    needed = sum(max((job.line.system.host_bytes for job in queue), default=0) for queue in queues)
    free = memory().available
    if needed > free:
        raise click.UsageError(
            f"host tiers of up to {needed / 2**30:.0f} GiB at once, but {free / 2**30:.0f} GiB are available "
            "(some virtual machines get more only when it is used: fill it once before)"
        )


def show(queues: Sequence[Sequence[Job]], where: Sequence[Device], budget: float | None) -> None:
    """Print the plan: what each device runs, and how long that takes."""
    for queue, device in zip(queues, where, strict=True):
        click.echo(f"device {device.name} ({len(device.cores)} cores), {total(queue):.0f} s:")
        for job in queue:
            rates = _numbers(sorted(job.rates))
            click.echo(f"  {job.seconds:4.0f} s  {job.title}, rates {rates}")
    limit = f" of {budget:.0f} s" if budget else ""
    click.echo(f"expected: {makespan(queues):.0f} s{limit}")


def _floats(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(",")) if value else ()
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers like 30,60") from error


@click.command()
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", type=click.Choice(list(experiments(FULL)))
)
@click.option("--devices", "device_names", metavar="0,1,…",
              help="GPUs by number, or `cpu`; 0+1: both for one server. Default: 0, with --small cpu.")  # fmt: skip
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="FOLDER",
              help="Is made.")  # fmt: skip
@click.option("--rates", callback=_floats, metavar="R,R,…", help="In place of those of the table.")
@click.option("--only", multiple=True, metavar="SYSTEM", help="Only this one; again for several.")
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds that all may take."
)
@click.option("--models", "models_folder", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where model folders are made; vLLM finds the graphs that it compiled again by their path. "
              "Default: a temporary one.")  # fmt: skip
@click.option("--small", is_flag=True, help="On a CPU with a tiny model: only shows that it runs.")
@click.option("--keep-logs", is_flag=True, help="Whole logs in evaluate.log, not only their ends.")
@click.option("--dry-run", is_flag=True, help="Only say what would run.")
def main(
    names: tuple[str, ...], device_names: str | None, results: Path, rates: tuple[float, ...], only: tuple[str, ...],
    budget: float | None, models_folder: Path | None, small: bool, keep_logs: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Run the experiments NAME..."""
    table = experiments(SMALL if small else FULL)
    chosen = [table[name] for name in dict.fromkeys(names)]
    try:
        where = devices((device_names or ("cpu" if small else "0")).split(","))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    seconds = budget - STOP_S - PAGE_S * len(chosen) if budget else float("inf")
    queues = plan(chosen, rates, only, len(where), seconds)
    show(queues, where, budget)
    if dry_run:
        return
    check_memory(queues)
    plots.require()  # before an hour of measurement
    command = portable(["python", "bench/evaluate.py", *sys.argv[1:]])
    origin = Origin(command, commit(), gpu_name(), dt.datetime.now(dt.UTC).isoformat(timespec="seconds"))
    evaluation = Evaluation(chosen, results, origin, keep_logs, time.monotonic() + seconds)
    with tempfile.TemporaryDirectory(prefix="pensieve-evaluate-") as folder:
        lines = [job.line for queue in queues for job in queue]
        models = make_models(lines, (models_folder or Path(folder) / "models").absolute())
        asyncio.run(_until_signalled(evaluation, queues, where, Site(Path(folder), models)))
    evaluation.write_pages()
    for name, report in evaluation.reports.items():
        failed = [f"{missing['target']}: {missing['error']}" for missing in report["unreached"]]
        for line in (*report["problems"], *report["invalid_reasons"], *failed):
            click.echo(f"{name}: {line}", err=True)
    click.echo(f"results in {results}")
    if evaluation.stopped or not all(map(_clean, evaluation.reports.values())):
        sys.exit(1)


async def _until_signalled(
    evaluation: Evaluation, queues: Sequence[Sequence[Job]], where: Sequence[Device], site: Site
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, evaluation.stop)
    await evaluation.run(queues, where, site)


def _clean(report: dict[str, Any]) -> bool:
    failed = any(s["turns"]["failed"] or s["receipts"]["violations"] for s in report["targets"])
    return report["valid"] and not report["unreached"] and not failed


if __name__ == "__main__":
    main()
