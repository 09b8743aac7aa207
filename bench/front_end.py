"""How many streamed tokens per second one front-end process carries, with an engine that costs nothing.

    python bench/front_end.py --streams 100 --streams 250

Every stream gets a token per engine step and answers all the time. Reported per number of streams is the front end's
processor time per token, opening and closing the sessions included, which says what a core could carry, beside what
arrived at the clients, whose processes share this machine. One JSON line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from replay_client import streams_of
from stand_ins.front_end_engine import STEP_VARIABLE

from pensieve.debug import child_environment
from pensieve.replay.load.schedule import Script
from pensieve.replay.load.workload import TurnLengths
from pensieve.replay.measure.report import summarise
from pensieve.replay.play import crew
from pensieve.replay.records import Outcome, RunOptions
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.spawn import wait_ready

START_LIMIT_S = 60.0


@contextmanager
def server(step_ms: float, store: str, *options: str) -> Iterator[tuple[int, str]]:
    """A server in front of the engine without a model: its process id and address."""
    command = [
        *(
            sys.executable,
            str(Path(__file__).parent / "stand_ins" / "front_end_engine.py"),
            "--model",
            "demo",
        ),
        *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", store, *options),
    ]
    environment = child_environment(failpoints=False) | {STEP_VARIABLE: str(step_ms)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address, _ = wait_ready(process, START_LIMIT_S)
            yield process.pid, address
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def play(address: str, scripts: Sequence[Script], processes: int) -> Outcome:
    """Replay the load against the server at ``address``."""
    target = PensieveTarget(address)
    try:
        info = await target.open()
        options = RunOptions(processes=processes)
        return await crew.replay(target.name, target.address(), info, scripts, options)
    finally:
        await target.close()


def measure(
    streams: int, step_ms: float, turn: TurnLengths, seconds: float, processes: int, store: str
) -> dict[str, Any]:
    """One number of streams, on a server of its own."""
    turns = max(1, round(seconds / (turn.output_tokens * step_ms / 1e3)))
    load = streams_of(streams, turn, turns)
    with server(step_ms, store) as (pid, address):
        before = cpu_seconds(pid)
        outcome = asyncio.run(play(address, load, processes))
        used = cpu_seconds(pid) - before
    summary = summarise(outcome)
    if summary["turns"]["failed"]:
        raise click.ClickException(
            f"{summary['turns']['failed']} turns failed: {summary['error_examples'][0]}"
        )
    tokens = summary["tokens"]["output"]
    return {
        "streams": streams,
        "offered_tokens_per_s": streams / step_ms * 1e3,
        "tokens_per_s": summary["output_tokens_per_s"],
        "messages_per_s": sum(len(record.arrivals) for record in outcome.records) / outcome.duration_s,
        "front_end_us_per_token": used / tokens * 1e6,
        "tokens_per_s_per_core": tokens / used,
        "cpu_share": used / outcome.duration_s,
        "inter_token_p99_s": summary["inter_token_s"]["p99"],
    }


@click.command()
@click.option(
    "--streams", type=click.IntRange(min=1), multiple=True, default=(100, 250, 400), show_default=True
)
@click.option("--step-ms", type=float, default=20.0, show_default=True, help="Length of an engine step.")
@click.option(
    "--input-tokens", type=click.IntRange(min=1), default=38, show_default=True, help="Of each turn."
)
@click.option("--output-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--seconds", type=float, default=12.0, show_default=True, help="Of each number of streams, about."
)
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Of the client.")
@click.option(
    "--store", default="", metavar="URL", help="History store. Default: SQLite in a temporary folder."
)
def main(
    streams: tuple[int, ...], step_ms: float, input_tokens: int, output_tokens: int, seconds: float, processes: int,
    store: str,
) -> None:  # fmt: skip
    """Measure the front end."""
    for count in streams:
        with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
            url, turn = (
                store or f"sqlite:///{folder}/history.sqlite3",
                TurnLengths(input_tokens, output_tokens),
            )
            click.echo(json.dumps(measure(count, step_ms, turn, seconds, min(processes, count), url)))


if __name__ == "__main__":
    main()
