"""Which small faults do the tests notice? ``python tests/robustness/mutate.py --count 100``.

Samples statement mutants by seed, runs the tests that reach each of them, and writes a table of those that were caught.
The first run of a revision records which test reaches which line. That takes about twice as long as the tests do.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.mutation.copies import Copy, Reach, collect, data_name
from support.mutation.sample import PARTS, Mutant, draw
from support.sources import ROOT

TESTS: dict[str, list[str]] = {
    "engine": ["engine", "engine_worker", "exactness", "sharing", "cost", "ranks", "logprobs"],
    "server": [
        *("admission", "service", "server_infra", "history", "links"),
        *("operations", "page", "client", "faults"),
    ],
    "store": ["store", "store_maintenance", "replicas"],
    "http": ["http", "door", "interop", "speech"],
}
"""Part → folders with its tests. A part's mutants are tried on its own tests first, then on those of the others."""
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
"""Mutants that change no behaviour that is promised, each with the reason."""
STUCK_S = 300.0
BUILD = ROOT / "build" / "mutation"


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught_by: str | None
    seconds: float
    equivalent: str | None = None


@click.command()
@click.option("--count", default=100, show_default=True, help="Mutants in all, equally many of each part.")
@click.option("--seed", default=1, show_default=True)
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="Default: all.")
@click.option("--revision", default="HEAD", show_default=True, help="Sources and tests of this revision.")
@click.option("--jobs", default=1, show_default=True, help="Mutants tried at the same time.")
@click.option("--limit", default=600.0, show_default=True, help="Seconds of tests for one mutant.")
@click.option("--only", help="Only mutants whose name contains this.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(
    count: int,
    seed: int,
    parts: tuple[str, ...],
    revision: str,
    jobs: int,
    limit: float,
    only: str | None,
    out: Path | None,
) -> None:
    """Sample mutants, run tests on each, and say which were caught."""
    commit = _git("rev-parse", "--short=10", revision)
    chosen = list(parts or PARTS)
    copies: queue.Queue[Copy] = queue.Queue()
    for job in range(jobs):
        copies.put(Copy(ROOT, BUILD / f"{commit}-{job}", commit))
    with Progress() as progress:
        reach = _reach(copies, commit, jobs, progress)
        first = copies.queue[0]
        mutants = [
            mutant for mutant in draw(first.root, seed, count, chosen) if only is None or only in mutant.name
        ]
        equivalent = _equivalent()
        task = progress.add_task("mutants", total=len(mutants))
        written = threading.Lock()
        outcomes: list[Outcome] = []

        def one(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                outcome = _try(copy, mutant, reach, limit, equivalent.get(mutant.identity))
            finally:
                copies.put(copy)
            with written:
                outcomes.append(outcome)
                word = "caught" if outcome.caught_by else "equivalent" if outcome.equivalent else "SURVIVED"
                progress.console.print(f"{word:10} {outcome.seconds:5.0f} s  {mutant.name}", highlight=False)
                progress.advance(task)
                if out is not None:
                    _write(out, outcomes, commit, seed, len(mutants))

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutants))
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught, {sum(o.equivalent is not None for o in outcomes)} equivalent")


def _reach(copies: queue.Queue[Copy], commit: str, jobs: int, progress: Progress) -> Reach:
    """Which tests reach which lines, recorded once a revision."""
    saved = BUILD / f"{commit}-reach.json"
    if saved.exists():
        return Reach.load(saved)
    folder = BUILD / f"{commit}-data"
    times = folder / "seconds"
    times.mkdir(parents=True, exist_ok=True)
    files = copies.queue[0].test_files([f"tests/{name}" for names in TESTS.values() for name in names])
    task = progress.add_task("lines that each test reaches", total=len(files))
    seconds: dict[str, float] = {}

    def one(name: str) -> None:
        took = times / data_name(name)
        if not took.exists():  # a recording that was stopped goes on where it was
            copy = copies.get()
            try:
                run = copy.run([name], 2 * STUCK_S, data=folder / data_name(name))
            finally:
                copies.put(copy)
            if run.failed:
                progress.console.print(f"fails without a mutant: {', '.join(run.failed)}", highlight=False)
            took.write_text(str(run.seconds))
        seconds[name] = float(took.read_text())
        progress.advance(task)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, files))
    reach = collect(copies.queue[0], folder, files, seconds)
    reach.save(saved)
    return reach


def _try(copy: Copy, mutant: Mutant, reach: Reach, limit_s: float, equivalent: str | None) -> Outcome:
    single, files = reach.of_lines(mutant.path, mutant.first, mutant.last)
    own = tuple(f"tests/{folder}/" for folder in TESTS[mutant.part])
    files.sort(key=lambda name: not name.startswith(own))  # stable: the quickest of each group stay first
    # Single tests first, then whole files: where a file's tests share a server, one test may do the damage and a later
    # one see it.
    groups = [[test for test in single if test.startswith(name + "::")] for name in files]
    source = (copy.root / mutant.path).read_text()
    spent = 0.0
    try:
        (copy.root / mutant.path).write_text(mutant.apply(source))
        for tests in [group for group in groups if group] + [[name] for name in files]:
            if spent > limit_s:
                break
            run = copy.run(tests, STUCK_S, "-x", "--timeout=60")
            spent += run.seconds
            if run.failed and _repeats(copy, mutant, source, tests, run.failed):
                return Outcome(mutant, run.failed[0], spent)
    finally:
        (copy.root / mutant.path).write_text(source)
    return Outcome(mutant, None, spent, equivalent)


def _repeats(copy: Copy, mutant: Mutant, source: str, tests: list[str], failed: tuple[str, ...]) -> bool:
    """Whether the tests that failed pass without the mutant."""
    names = [name for name in failed if not name.startswith("(")] or tests
    try:
        (copy.root / mutant.path).write_text(source)
        return not copy.run(names, STUCK_S, "--timeout=120").failed
    finally:
        (copy.root / mutant.path).write_text(mutant.apply(source))


def _equivalent() -> dict[tuple[str, str, str], str]:
    if not EQUIVALENT.exists():
        return {}
    rows = json.loads(EQUIVALENT.read_text())
    return {(row["path"], row["kind"], row["text"]): row["reason"] for row in rows}


def _write(out: Path, outcomes: list[Outcome], commit: str, seed: int, total: int) -> None:
    rows = [
        {
            "part": outcome.mutant.part,
            "mutant": outcome.mutant.name,
            "identity": outcome.mutant.identity,
            "caught_by": outcome.caught_by,
            "equivalent": outcome.equivalent,
            "seconds": round(outcome.seconds, 1),
        }
        for outcome in outcomes
    ]
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    equivalent = sum(outcome.equivalent is not None for outcome in outcomes)
    lines = [
        f"Seed {seed}, commit {commit}: {caught} of {len(outcomes)} caught, {equivalent} equivalent"
        + ("" if len(outcomes) == total else f" ({total - len(outcomes)} not tried yet)"),
        "",
        "| mutant | caught by |",
        "|---|---|",
    ]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.mutant.name):
        name = outcome.mutant.name.replace("|", "\\|")
        verdict = outcome.caught_by or (
            f"equivalent: {outcome.equivalent}" if outcome.equivalent else "**survived**"
        )
        lines.append(f"| `{name}` | {verdict.replace('|', chr(92) + '|')} |")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
