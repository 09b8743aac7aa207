"""Clients talk under faults for as long as you like: ``python tests/robustness/run.py --minutes 30``.

Prints progress and a table, and writes both to files. Exit status 1 when a history was not a legal one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.robustness import report
from support.robustness.arena import Fsync, Leg, Outcome, Plan, ground, run
from support.robustness.nemesis import Nemesis


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--part", type=float, default=5.0, show_default=True, help="Minutes between two last looks.")
@click.option("--clients", type=int, default=6, show_default=True, help="Of each store.")
@click.option("--store", type=click.Choice(["sqlite", "redis"]), multiple=True, help="Default: both.")
@click.option(
    "--slow-disk",
    type=click.Choice(["everysec", "always"]),
    help="Redis is on a disk whose flushes take 0.2 to 3 s (always: 20 to 400 ms), and syncs so often.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder that keeps histories and logs.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(
    minutes: float,
    seed: int,
    part: float,
    clients: int,
    store: tuple[str, ...],
    slow_disk: Fsync | None,
    keep: Path | None,
    out: Path | None,
) -> None:
    """Faults drawn from a seeded stream, on SQLite and on Redis with two servers; then the checker."""
    outcomes: list[Outcome] = []
    command = f"python tests/robustness/run.py --minutes {minutes:g} --seed {seed} --part {part:g}"
    command += "".join(f" --store {name}" for name in store)
    command += f" --slow-disk {slow_disk}" if slow_disk else ""

    def told(nemeses: list[Nemesis], legs: list[Leg]) -> None:
        acknowledged = sum(leg.floor.acknowledged for leg in legs)
        print(report.line(nemeses, acknowledged, time.monotonic() - began), flush=True)

    with tempfile.TemporaryDirectory(prefix="pensieve-robustness-") as own:
        if keep is not None and keep.exists() and any(keep.iterdir()):
            raise click.BadParameter("a folder that is new or empty", param_hint="--keep")
        folder = keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        with ground(folder) as (nest, disk):
            end = time.monotonic() + minutes * 60
            while (left := end - time.monotonic()) > 1 or not outcomes:
                began = time.monotonic()
                plan = Plan(
                    seed=seed + len(outcomes),
                    seconds=min(left, part * 60),
                    legs=store or ("sqlite", "redis"),
                    clients=clients,
                    slow_disk=slow_disk,
                    record=keep is not None,
                )
                outcomes.append(asyncio.run(run(plan, folder / f"part{len(outcomes)}", nest, disk, told)))
                print(report.table(outcomes, command), flush=True)
                if out is not None:
                    out.with_suffix(".json").write_text(report.dump(report.as_json(outcomes, command)))
                    out.with_suffix(".md").write_text(report.table(outcomes, command))
                _violations(outcomes[-1])
    verdicts = [(name, verdict) for one in outcomes for name, verdict in one.verdicts.items()]
    for name in {name for name, verdict in verdicts if not verdict.acknowledged}:
        print(f"{name}: a part in which nothing was acknowledged, which proves nothing")
    sys.exit(any(verdict.violations or not verdict.acknowledged for _, verdict in verdicts))


def _violations(outcome: Outcome) -> None:
    for name, verdict in outcome.verdicts.items():
        for found in verdict.violations[:20]:
            print(f"{name}: {found.kind}: {found.session}: {found.what}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
