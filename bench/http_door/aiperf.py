"""AIPerf against the HTTP door of a real server with the demo model: does a client that others wrote find faults?

    python -m venv aiperf && aiperf/bin/pip install -r bench/http_door/requirements.txt
    python bench/http_door/aiperf.py --aiperf aiperf/bin/aiperf --out OUT

Conversations of several turns, once as chat completions, which resend the history, and once as responses whose history
the server holds. It needs no network: AIPerf makes its texts with the demo model's tokenizer, and tokens are counted by
the server. Exit code 1 when a request failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from http_door.systems import door

from pensieve import demo
from pensieve.spawn import ServerProcess

WAYS = {"chat": (), "responses": ("--extra-inputs", "store:true")}
"""Endpoint of AIPerf → what makes it chain."""
TOKENIZER = Path(demo.__file__).parent / "model"
METRICS = {
    "time_to_first_token": "first token ms", "inter_token_latency": "between tokens ms",
    "request_latency": "request ms",
}  # fmt: skip


def profile(
    aiperf: Path, way: str, url: str, out: Path, conversations: int, turns: int, concurrency: int
) -> dict[str, Any]:
    """One run; its report. Raises ClickException with the last words of a run that made none."""
    folder = out / way
    command = [
        str(aiperf), "profile", "--model", "demo", "--url", url, "--endpoint-type", way, "--streaming",
        "--tokenizer", str(TOKENIZER), "--use-server-token-count", "--num-conversations", str(conversations),
        "--conversation-turn-mean", str(turns), "--conversation-turn-stddev", "0", "--isl", "60", "--osl", "24",
        "--concurrency", str(concurrency), "--ui", "none", "--random-seed", "1", "--output-artifact-dir", str(folder),
        *WAYS[way],
    ]  # fmt: skip
    # Told to be offline, it looks for a folder's tokenizer in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with (out / f"{way}.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    if not found:
        last = (out / f"{way}.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise click.ClickException(f"{way}: no report:\n{last}")
    report: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
    return report


def row(way: str, report: dict[str, Any]) -> str:
    """A line of the table."""

    def number(name: str, part: str = "avg") -> str:
        value = (report.get(name) or {}).get(part)
        return "" if value is None else f"{value:.1f}" if value % 1 else f"{value:.0f}"

    cells = [way, number("request_count"), number("error_request_count") or "0"]
    cells += [number(name, part) for name in METRICS for part in ("p50", "p95")]
    cells += [number("input_sequence_length"), number("output_sequence_length")]
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option(
    "--aiperf", default="aiperf", show_default=True, type=click.Path(path_type=Path), help="The command."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of its reports.")
@click.option("--way", "ways", type=click.Choice(list(WAYS)), multiple=True, default=list(WAYS),
              show_default=True)  # fmt: skip
@click.option("--conversations", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=4, show_default=True)
def main(
    aiperf: Path, out: Path, ways: Sequence[str], conversations: int, turns: int, concurrency: int
) -> None:
    """Run AIPerf against the door."""
    out.mkdir(parents=True, exist_ok=True)
    shown = [f"{name} {part}" for name in METRICS.values() for part in ("p50", "p95")]
    heads = ["endpoint", "requests", "failed", *shown, "input tokens", "output tokens"]
    click.echo(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    failed = False
    with tempfile.TemporaryDirectory(prefix="pensieve-aiperf-") as folder:
        store = f"sqlite:///{folder}/history.sqlite3"
        with (
            ServerProcess("--model", "demo", "--store", store, "--threads", "1") as server,
            asyncio.Runner() as run,
        ):
            held = door(server.target, Path(folder) / "door.log")
            url, _ = run.run(held.__aenter__())
            try:
                for way in ways:
                    report = profile(aiperf, way, url, out, conversations, turns, concurrency)
                    click.echo(row(way, report))
                    wanted = conversations * turns
                    failed |= (report.get("request_count") or {}).get("avg") != wanted
            finally:
                run.run(held.__aexit__(None, None, None))
    if failed:
        raise click.ClickException("not every request was answered")


if __name__ == "__main__":
    main()
