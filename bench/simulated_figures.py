"""Figures 10, 14 and 15 of the EuroSys paper on simulated servers, where a load can go on until it is steady.

    python bench/simulated_figures.py --trace sharegpt_sample.lengths.jsonl.gz
    python bench/simulated_figures.py figure10 figure15

Runs the ``pensieve simulate`` of each simulation in the table ``FIGURES`` and puts those of a figure together as
``pensieve replay compare`` does. Writes ``NAME.json`` (schema ``pensieve.replay.compare/1``), ``NAME.png`` and
``NAME.md`` with every command. Figure 14 takes a trace that is not in the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from common.provenance import commit, portable
from evaluate_report import compact

from pensieve.replay.presentation.columns import NOTHING, Column, number
from pensieve.replay.presentation.compare import comparison
from pensieve.replay.presentation.page_tables import headline_tables
from pensieve.replay.presentation.panels import Panel, panels
from pensieve.replay.presentation.plots import require, write_plots

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MACHINE = RESULTS / "validation_13b_h200.machine.json"
TRACE = "sharegpt_sample.lengths.jsonl.gz"
"""This as a load means the file of ``--trace``."""
POLICIES = ("retention", "gittins", "lru")
OTHER_POLICIES = ("trailing-half", "whole-session", "clairvoyant")
LIMITS = ("--context-limit", "16384", "--max-batch-tokens", "8192", "--max-running", "512")
"""Limits of every server here, as in ``evaluation/experiments.py``."""
Report = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for KV, as ``pensieve simulate`` takes it."""

    device: str
    host: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """One ``pensieve simulate``."""

    name: str
    load: str
    """A built-in workload, or ``TRACE``."""
    sessions: int
    rates: tuple[float, ...]
    """Turns per second."""
    think_s: float
    warm_up_s: float
    policies: tuple[str, ...]
    memory: Memory
    line: str = ""
    """Name of the curve, where it is not the policy that is compared."""

    def arguments(self, load: str, machine: str) -> list[str]:
        """The arguments for ``pensieve``, but for where its report goes."""
        return [
            "simulate", load, "--sessions", str(self.sessions), "--rates", ",".join(f"{rate:g}" for rate in self.rates),
            "--think-time", f"{self.think_s:g}", "--warm-up", f"{self.warm_up_s:g}",
            *(word for policy in self.policies for word in ("--policy", policy)),
            "--machine", machine, "--device-cache", self.memory.device, "--host-cache", self.memory.host, *LIMITS,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """Simulations in one picture; those of the same load and pauses are a panel."""

    title: str
    about: str
    simulations: tuple[Simulation, ...]
    lines: str = "policy"
    """What the curves of the picture differ in."""


PAPER = Memory("37GiB", "205GiB")
"""EuroSys §6.1: 40 GB and 220 GB."""
BOTH, DEVICE_ONLY = Memory("40GiB", "32GiB"), Memory("40GiB", "0")
"""The memory of the servers in ``evaluation/experiments.py``."""
THINK = (
    (15, 400, 8000, (20, 24, 28, 31)),
    (60, 1000, 12000, (12, 15, 18, 20)),
    (150, 2500, 12000, (8, 11, 14, 16)),
    (300, 5000, 16000, (6, 9, 12, 14)),
    (600, 10000, 30000, (6, 9, 12, 14)),
)
"""Think time and warm-up in seconds, sessions, turns per second."""
TIERS = (
    ("sharegpt-both", "sharegpt", BOTH, "both tiers", (16, 20, 22, 24, 25, 26, 27, 28)),
    ("sharegpt-device", "sharegpt", DEVICE_ONLY, "device tier only", (12, 14, 15, 16, 17, 18, 19, 20)),
    ("ultrachat-both", "ultrachat", BOTH, "both tiers", (20, 25, 28, 29, 30, 32, 33, 34)),
    ("ultrachat-device", "ultrachat", DEVICE_ONLY, "device tier only", (14, 18, 19, 20, 22, 24, 26, 28)),
)
"""Name, load, memory, name of the curve, turns per second."""
FIGURES = {
    "figure10": Figure(
        "Figure 10: two tiers against one, in simulation",
        "40 GiB of KV on the device, with 32 GiB on the host and without; the built-in ShareGPT-like and UltraChat-like"
        " loads, think time 6 s, policy `gittins`, as in the evaluation on GPUs. Its recorded runs measure 60 s; this "
        "is what the same servers would carry for long.",
        tuple(
            Simulation(f"figure10-{name}", load, 6000, rates, 6, 120, ("gittins",), memory, line)
            for name, load, memory, line, rates in TIERS
        ),
        lines="KV in",
    ),
    "figure14": Figure(
        "Figure 14: eviction policies, in simulation",
        "40 GB of KV on the device and 220 GB on the host, as in the paper (EuroSys §6.1), think time 60 s, not scaled."
        " Left: the built-in ShareGPT-like load, whose turns are geometric, so that nothing can be learned of who "
        "returns; right: a sample of ShareGPT.",
        tuple(
            Simulation(name, load, sessions, rates, 60, 1000, POLICIES + OTHER_POLICIES, PAPER)
            for name, load, sessions, rates in (
                ("figure14-sharegpt", "sharegpt", 12000, (9, 12, 15, 18, 20, 22)),
                ("figure14-sample", TRACE, 18000, (12, 15, 18, 20, 21, 22)),
            )
        ),
    ),
    "figure15": Figure(
        "Figure 15: think time, in simulation",
        "40 GB of KV on the device and 220 GB on the host, the built-in ShareGPT-like load, think times of 15, 60, 150,"
        " 300 and 600 s, not scaled.",
        tuple(
            Simulation(f"figure15-{think}", "sharegpt", sessions, rates, think, warm_up, POLICIES, PAPER)
            for think, warm_up, sessions, rates in THINK
        ),
    ),
}  # fmt: skip
_STEADY = {True: "yes", False: "no", None: NOTHING}
_SOURCES = ("gpu_cached", "swapped_in", "recomputed")
_COLUMNS = (
    Column("TTFT warm mean ms", "ttft_s.warm.mean", ",.0f", 1e3),
    Column("p90 ms", "ttft_s.warm.p90", ",.0f", 1e3),
    Column("normalised latency mean ms/token", "normalised_latency_s.mean", ",.1f", 1e3),
    Column("p90 ms", "normalised_latency_s.p90", ",.1f", 1e3),
)


# -- simulating ------------------------------------------------------------------------------------------------------


def simulated(simulation: Simulation, trace: Path | None, machine: Path, jobs: int | None) -> Report:
    """The report of one simulation, its command as it can be told elsewhere. Raises ClickException."""
    load = str(trace) if simulation.load == TRACE else simulation.load
    aside = () if jobs is None else ("--jobs", str(jobs))
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        file = Path(folder) / "report.json"
        arguments = [*simulation.arguments(load, str(machine)), *aside, "--json", str(file)]
        done = subprocess.run([sys.executable, "-P", "-m", "pensieve", *arguments], check=False)
        if done.returncode:
            raise click.ClickException(f"{simulation.name}: `pensieve simulate` ended with {done.returncode}")
        report: Report = json.loads(file.read_text(encoding="utf-8"))
    return report | {
        "command": ["pensieve", *simulation.arguments(Path(load).name, told(machine))],
        "targets": [row | {"target": simulation.line or row["target"]} for row in report["targets"]],
    }


def told(path: Path) -> str:
    """From the root of the repository; of files elsewhere only the name."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# -- writing ---------------------------------------------------------------------------------------------------------


def write(name: str, figure: Figure, reports: Sequence[Report], folder: Path) -> None:
    """``NAME.json``, ``NAME.png`` and ``NAME.md``."""
    names = [simulation.name for simulation in figure.simulations]
    shown = panels(reports, names)
    page = folder / f"{name}.md"
    page.with_suffix(".json").write_text(compact(comparison(reports, names)), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as drawn:
        write_plots(reports, Path(drawn), names)
        page.with_suffix(".png").write_bytes((Path(drawn) / "latency.png").read_bytes())
    page.write_text("\n".join(markdown(name, figure, reports, shown)) + "\n", encoding="utf-8")


def markdown(name: str, figure: Figure, reports: Sequence[Report], shown: Sequence[Panel]) -> Iterator[str]:
    """The page."""
    command = reports[0]["command"]
    machine = Path(command[command.index("--machine") + 1]).name
    yield f"# {figure.title}\n\n{figure.about}\n"
    yield (
        f"Simulated, commit {commit()}, on {reports[0]['machine']['cpu']}; machine: `{machine}`, fitted to "
        f"{reports[0]['simulation']['machine']['name']}. Shares are of the history tokens. All of it: "
        f"`{portable(['python', 'bench/simulated_figures.py', *sys.argv[1:]])}`\n"
    )
    yield f"![{figure.title}]({name}.png)"
    for report in reports:
        yield f"\n`{portable(report['command'])}`\n"
        yield from _rows(figure.lines, report["targets"])
    yield from _ratios(shown)


def _rows(lines: str, targets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    heads = ("offered turns/s", "device %", "host %", "recomputed %", *(column.title for column in _COLUMNS))
    yield f"| {lines} | " + " | ".join(heads) + " | steady |"
    yield "|---" + "|---:" * len(heads) + "|---|"
    for row in targets:
        tokens = row["tokens"]
        history = tokens["context"] - tokens["new"]
        shares = (number(tokens[name] / history if history else None, ".1f", 100.0) for name in _SOURCES)
        values = (number(row["rate"], "g"), *shares, *(column.text(row) for column in _COLUMNS))
        yield "| " + " | ".join((row["target"], *values, _STEADY[row["window"]["steady"]])) + " |"


def _ratios(shown: Sequence[Panel]) -> Iterator[str]:
    """The table of ``pensieve replay compare`` with this name."""
    table = next(table for table in headline_tables(shown, None) if table.key == "ratios")
    yield f"\n{table.title}. {table.note}\n"
    yield "| " + " | ".join(table.heads) + " |"
    yield "|---" * table.labels + "|---:" * (len(table.heads) - table.labels) + "|"
    yield from ("| " + " | ".join(cell.text for cell in row) + " |" for row in table.rows)


@click.command()
@click.argument("names", metavar="[FIGURE...]", nargs=-1, type=click.Choice(list(FIGURES)))
@click.option("--trace", type=_FILE, metavar="FILE", help=f"For figure14: a sample of ShareGPT, {TRACE}.")
@click.option("--machine", type=_FILE, default=MACHINE, metavar="FILE",
              help="As `pensieve profile --machine` writes it.  [default: of one H200, in results/]")  # fmt: skip
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, metavar="FOLDER",
              help="Where to write.  [default: results/]")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N",
              help="Simulations at a time.  [default: one per core]")  # fmt: skip
def main(names: tuple[str, ...], trace: Path | None, machine: Path, results: Path, jobs: int | None) -> None:
    """Simulate, compare and write figure10, figure14 and figure15, or those that are named."""
    require()
    wanted = {name: FIGURES[name] for name in names or FIGURES}
    for name, figure in wanted.items():
        if trace is None and any(simulation.load == TRACE for simulation in figure.simulations):
            raise click.UsageError(f"{name} needs --trace FILE: a sample of ShareGPT, {TRACE}")
    results.mkdir(parents=True, exist_ok=True)
    for name, figure in wanted.items():
        started = time.perf_counter()
        reports = [simulated(simulation, trace, machine, jobs) for simulation in figure.simulations]
        write(name, figure, reports, results)
        click.echo(f"{name}: {time.perf_counter() - started:.0f} s, {results / name}.*")


if __name__ == "__main__":
    main()
