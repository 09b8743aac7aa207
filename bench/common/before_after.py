"""Runs one benchmark of two checkouts in turns, and tells how the figures of one differ from those of the other.

    python bench/common/before_after.py --before ../old --rounds 5 --only 'cpu' -- bench/front_end.py --streams 100
    python bench/common/before_after.py --before ../old -- bench/engine.py --section decode --out {folder}

The program prints JSON objects, one a line, or writes JSON files below ``{folder}``. Every number in them is a figure,
named by where it stands; in lists, by the words and sizes of its row. In turns, because a machine's own speed drifts: a
difference between the checkouts is one that every round shows. Each checkout runs its own program on its own package.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
ROW_NAMES = (
    "name", "section", "batch", "context", "new tokens", "history", "new", "swapping", "streams", "label", "target",
    "part", "way",
)  # fmt: skip
"""Fields that say which row of a list it is."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--before",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The other checkout.",
)
@click.option(
    "--after",
    default=ROOT,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Default: this one.",
)
@click.option("--rounds", default=3, help="Runs of each.")
@click.option("--only", default="", help="Only figures whose name matches this regular expression.")
@click.option(
    "--json",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures of all runs here.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def main(before: Path, after: Path, rounds: int, only: str, out: Path | None, program: Sequence[str]) -> None:
    """Run PROGRAM (a path below both checkouts, with its options) in both, in turns, and compare."""
    found: dict[str, dict[str, list[float]]] = {"before": defaultdict(list), "after": defaultdict(list)}
    console = Console(stderr=True)
    for turn in track(range(2 * rounds), "running", console=console, transient=True):
        # Each begins every other round: whoever runs second finds warm caches.
        name = ("before", "after")[(turn + turn // 2) % 2]
        for key, value in run(before if name == "before" else after, program):
            found[name][key].append(value)
    rows = [
        row(key, found["before"][key], found["after"][key])
        for key in found["before"]
        if key in found["after"] and re.search(only, key)
    ]
    if not rows:
        raise click.ClickException("both gave no figure of the same name")
    if out is not None:
        out.write_text(
            json.dumps({"program": list(program), "rounds": rounds, "figures": found}, indent=1) + "\n"
        )
    click.echo("| figure | before | after | after ÷ before | in each round |\n|---|---:|---:|---:|---|")
    click.echo("\n".join(rows))


def row(key: str, before: Sequence[float], after: Sequence[float]) -> str:
    one, other = statistics.median(before), statistics.median(after)
    ratios = [f"{b / a:.3f}" if a else "-" for a, b in zip(before, after, strict=False)]
    return f"| {key} | {one:.6g} | {other:.6g} | {other / one if one else float('nan'):.3f} | {', '.join(ratios)} |"


def run(checkout: Path, program: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The figures of one run. Raises ClickException with the end of its errors when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        search = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        words = [word.replace("{folder}", folder) for word in program]
        done = subprocess.run(
            [sys.executable, str(checkout / words[0]), *words[1:]],
            cwd=checkout, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise click.ClickException(f"{checkout.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        documents = [json.loads(file.read_text()) for file in sorted(Path(folder).rglob("*.json"))]
        documents += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield from figures(documents, "")


def figures(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number below ``value`` and where it stands."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{name} {key}".strip())
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            label = str(index)
            if isinstance(inner, dict):
                label = " ".join(f"{key}={inner[key]}" for key in ROW_NAMES if key in inner) or label
            yield from figures(inner, f"{name} {label}".strip())


if __name__ == "__main__":
    main()
