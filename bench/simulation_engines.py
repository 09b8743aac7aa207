"""Both engines of ``pensieve simulate`` on the same loads: how far runs of steps taken at once are from single steps.

    python bench/simulation_engines.py --chat sharegpt_sample.lengths.jsonl.gz --long mooncake_conversation.jsonl.gz

Each load draws its sessions from one of the two length traces and runs under ``retention`` on the default machine.
Writes ``NAME.json`` and ``NAME.md``.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from common.provenance import commit, portable
from rich.console import Console

from pensieve.config import CacheConfig
from pensieve.replay.load.shaping import Shaping, shape
from pensieve.replay.load.workload import Conversation, load
from pensieve.replay.measure.report import environment
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Settings

RESULTS = Path(__file__).parent / "results"
SOURCES = ("gpu_cached", "swapped_in", "recomputed")
SLACK_SHARE = 0.08
"""As ``pensieve simulate`` has it without ``--exact``."""
CHUNK = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One load: turns/s, mean pause in s, sessions drawn, tokens of both tiers."""

    name: str
    trace: str
    rate: float
    think_s: float
    sessions: int
    device: int
    host: int


CASES = (
    Case("chat, light", "chat", 10, 60, 250, 120_000, 240_000),
    Case("chat, moderate", "chat", 16, 20, 250, 60_000, 100_000),
    Case("chat, heavy", "chat", 30, 20, 250, 60_000, 100_000),
    Case("chat, saturated", "chat", 24, 20, 250, 24_000, 60_000),
    Case("long, light", "long", 0.8, 60, 80, 400_000, 400_000),
    Case("long, moderate", "long", 1.2, 60, 80, 200_000, 400_000),
    Case("long, saturated", "long", 3, 30, 80, 200_000, 400_000),
)


def run(case: Case, talks: Sequence[Conversation]) -> dict[str, Any]:
    """Both engines, ``turns`` as it is by default."""
    machine = Machine()
    cache = CacheConfig(case.device // CHUNK, case.host // CHUNK, CHUNK)
    limit = cache.device_chunks * CHUNK
    fitting = shape(talks, Shaping(), min(limit, 60_000)).conversations
    lives = Load(fitting, case.sessions, case.rate, case.think_s, seed=0)
    settings = Settings(
        machine, cache, machine.cost(CHUNK, limit), limit, slack=int(SLACK_SHARE * cache.device_chunks)
    )
    full, turns = (Simulation(settings, lives, engine, "retention").run() for engine in ("full", "turns"))
    return {"case": case.name, "full": full, "turns": turns}


def page(report: dict[str, Any]) -> str:
    """The table: of each figure what ``full`` has, and the error of ``turns``."""
    lines = [
        "# `turns` against `full`", "", f"`{report['command']}`", "",
        f"Commit {report['commit']}; {report['created']}. Tokens as shares of the context, errors in points of it.", "",
        "| load | turns | hit | swapped in | recomputed | TTFT cold ms | warm ms | seconds full / turns |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in report["rows"]:
        full, turns = row["full"], row["turns"]
        context = full["tokens"]["context"]
        cells = [
            f"{full['tokens'][name] / context:.1%} {(turns['tokens'][name] - full['tokens'][name]) / context:+.2%}"
            for name in SOURCES
        ]
        for kind in ("cold", "warm"):
            there, ours = full["ttft_s"][kind]["mean"], turns["ttft_s"][kind]["mean"]
            cells.append(f"{there * 1e3:.1f} {ours / there - 1:+.1%}")
        cells.append(f"{full['wall_s']:.1f} / {turns['wall_s']:.1f}")
        lines.append(f"| {row['case']} | {full['turns']['completed']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option(
    "--chat", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="Trace."
)
@click.option(
    "--long", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="Trace."
)
@click.option("--name", default="simulation_engines", show_default=True, help="Of the files.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Their folder."
)
def main(chat: Path, long: Path, name: str, results: Path) -> None:
    """Run all loads under both engines."""
    console = Console(stderr=True)
    traces = {"chat": load(chat).conversations, "long": load(long).conversations}
    rows = []
    for case in CASES:
        console.print(case.name)
        rows.append(run(case, traces[case.trace]))
    report = {
        "schema": "pensieve.simulation_engines/1",
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": portable(["python", "bench/simulation_engines.py", *sys.argv[1:]]),
        "commit": commit(),
        **environment(),
        "rows": rows,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (results / f"{name}.md").write_text(page(report), encoding="utf-8")
    click.echo(page(report))


if __name__ == "__main__":
    main()
