"""Two checkouts on the same ``pensieve simulate``: whether their reports are the same, and which one is faster.

    python bench/common/simulation_speed.py ../before --turns 5 -- sharegpt_sample.lengths.jsonl.gz \
        --sessions 20000 --rate 20 --think-time 60 --policy retention

What follows ``--`` is given to ``pensieve simulate`` of both, in turns, on one core each. What is compared is the
processor time that a run spent for itself, imports and all: cores that are shared with other work distort that least.
The first checkout is the one to hold against, the second one (default: this one) should be faster. Exit code 1 when
their reports differ in anything but times and memory. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

COMPARED = ("dataset", "options", "workload", "runs", "targets", "intervals", "simulation")
"""Parts of a report; the others say when, where and with what it was made."""
MEASURED = ("wall_s", "peak_rss_mib")
"""What one target's numbers have of the machine that simulated."""


def imported_from(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds this checkout's package. Raises ClickException when it does not."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import pensieve; print(pensieve.__file__)"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if Path(found) != checkout / "pensieve" / "__init__.py":
        raise click.ClickException(f"{checkout}: Python imports {found}")
    return environment


def simulate(environment: dict[str, str], arguments: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
    """Seconds of processor time of one run and all its processes, and what it found. Raises ClickException."""
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-P", "-m", "pensieve", "simulate", *arguments]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [*command, "--jobs", "1", "--json", str(report)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        if done.returncode:
            raise click.ClickException(done.stderr or done.stdout)
        found = json.loads(report.read_text(encoding="utf-8"))
    return seconds, findings(found)


def findings(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of a report that the same simulation always has the same."""
    parts = {name: report[name] for name in COMPARED}
    targets = [{key: row[key] for key in row if key not in MEASURED} for row in report["targets"]]
    return {**parts, "targets": targets}


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option(
    "--now",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=Path(__file__).resolve().parents[2],
    help="The checkout to measure; default: this one.",
)
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each.")
@click.argument("arguments", nargs=-1, required=True)
def main(before: Path, now: Path, turns: int, arguments: tuple[str, ...]) -> None:
    """Run both in turns."""
    environments = {"before": imported_from(before), "now": imported_from(now)}
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    first: dict[str, Any] | None = None
    for turn in range(turns):
        for name, environment in environments.items():
            spent, found = simulate(environment, arguments)
            seconds[name].append(spent)
            first = first or found
            if json.dumps(found, sort_keys=True) != json.dumps(first, sort_keys=True):
                raise click.ClickException(f"run {turn + 1} of the checkout `{name}` found something else")
        click.echo(
            f"{turn + 1}: " + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["before"] / medians["now"]
    click.echo(
        f"Same reports. {ratio:.2f} times as fast: {medians['before']:.2f} s -> {medians['now']:.2f} s."
    )
    told = {
        "schema": "pensieve.simulation_speed/1",
        "arguments": arguments,
        "user_s": seconds,
        "ratio": ratio,
    }
    click.echo(json.dumps(told))


if __name__ == "__main__":
    main()
