"""Simulates 1, 4, 16 and 64 replicas behind routers of several kinds, and the loss and return of one of them.

    python bench/replica_study/run.py                  # all of it
    python bench/replica_study/run.py four-lost        # one simulation anew, the others as they are in replicas.json
    python bench/replica_study/run.py --write          # no simulation: the page and the picture from replicas.json

Runs a ``pensieve simulate`` for each row of ``SIMULATIONS``; writes ``replicas.json``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.provenance import commit, portable
from replica_study.page import write

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "bench" / "results"
MACHINE: Final = "bench/results/validation_13b_h200.machine.json"
TURNS_PER_SESSION: Final = 5.3
"""A little less than the load has, so that sessions begin until the window is over."""
THINK_S: Final = 30
WARM_UP_S: Final = 600
LOST_S, BACK_S, END_S, ROW_S = 700, 900, 1050, 10
"""When replica 0 goes and comes back, when the window ends, and a row of the time line."""
KEPT: Final = (
    "turns", "turns_per_s", "tokens", "hit_rate", "device_hit_rate", "ttft_s", "normalised_latency_s",
    "recomputed_cost_s", "repeated_turns", "by_replica", "timeline", "window",
)  # fmt: skip
"""Of a report's target."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulation: ``rate`` is of each replica, in turns per second."""

    replicas: int
    rate: float
    routing: str = "hash"
    ring_points: int = 1600
    window_s: int = 600
    """From ``WARM_UP_S`` on; where a replica is lost, the window ends at ``END_S``."""
    lost: bool = False

    def arguments(self) -> list[str]:
        """The arguments for ``pensieve``, but for where its report goes."""
        window = END_S - WARM_UP_S if self.lost else self.window_s
        offered = self.rate * self.replicas
        sessions = int(offered * (WARM_UP_S + window) / TURNS_PER_SESSION)
        loss = f"--lose-replica-at {LOST_S} --replica-returns-at {BACK_S} --row {ROW_S}" if self.lost else ""
        return (
            f"simulate sharegpt --sessions {sessions} --rate {offered:g} --think-time {THINK_S} --warm-up {WARM_UP_S} "
            f"--window {window} --policy gittins --machine {MACHINE} --device-cache 37GiB --host-cache 205GiB "
            f"--context-limit 16384 --max-batch-tokens 8192 --max-running 512 --replicas {self.replicas} "
            f"--routing {self.routing} --ring-points {self.ring_points} {loss}"
        ).split()


SIMULATIONS: Final = {
    "one": Simulated(1, 14, window_s=3000),
    "one-full": Simulated(1, 18, window_s=3000),
    "four": Simulated(4, 14),
    "four-full": Simulated(4, 18),
    "sixteen": Simulated(16, 14, window_s=300),
    "sixteen-full": Simulated(16, 18, window_s=300),
    "sixty-four": Simulated(64, 14, window_s=100),
    "four-few-points": Simulated(4, 14, ring_points=16),
    "sixteen-few-points": Simulated(16, 14, ring_points=16, window_s=300),
    "sixty-four-few-points": Simulated(64, 14, ring_points=16, window_s=100),
    "four-bounded": Simulated(4, 14, "bounded", 16),
    "sixteen-bounded": Simulated(16, 14, "bounded", 16, window_s=300),
    "four-random": Simulated(4, 14, "random"),
    "sixteen-random": Simulated(16, 14, "random", window_s=300),
    "four-lost": Simulated(4, 14, lost=True),
    "four-full-lost": Simulated(4, 18, lost=True),
    "sixteen-lost": Simulated(16, 14, lost=True),
    "sixteen-full-lost": Simulated(16, 18, lost=True),
    "sixty-four-lost": Simulated(64, 14, lost=True),
}


def simulate(one: Simulated) -> dict[str, Any]:
    """What is kept of its report. Raises CalledProcessError."""
    arguments = one.arguments()
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        file = Path(folder) / "report.json"
        program = [sys.executable, "-P", "-m", "pensieve", *arguments, "--jobs", "1", "--json", str(file)]
        subprocess.run(program, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(file.read_text(encoding="utf-8"))
    (target,) = report["targets"]
    return {
        "command": portable(["pensieve", *arguments]), "commit": commit(), "cpu": report["machine"]["cpu"],
        "replicas": one.replicas, "rate": one.rate, "routing": one.routing, "ring_points": one.ring_points,
        "lost": one.lost, **{key: target[key] for key in KEPT},
    }  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SIMULATIONS)), metavar="[SIMULATION...]")
@click.option("--write", "only_write", is_flag=True, help="Simulate nothing.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, metavar="FOLDER"
)
def main(names: tuple[str, ...], only_write: bool, results: Path) -> None:
    """Simulate those that are named, or all, and write ``replicas.json``, ``.md`` and ``.png``."""
    file = results / "replicas.json"
    for name in () if only_write else names or SIMULATIONS:
        told = simulate(SIMULATIONS[name])
        # Read only now: several of these may run side by side.
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found = {key: (known | {name: told})[key] for key in SIMULATIONS if key in known or key == name}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
        file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        click.echo(name)
    write(json.loads(file.read_text(encoding="utf-8")), results, (LOST_S, BACK_S))


if __name__ == "__main__":
    main()
